/* Talking to the server: its state, a streamed answer, and errors in a user's words. Addresses are relative, so that the
   page works behind a proxy's prefix. */

const MAX_WAIT_S = 15;

export class ServerError extends Error {
  /* `detail` is what the server said, where the message does not say it. `waitS`: worth another try after so long. */
  constructor(message, { status = 0, detail = "", waitS = null } = {}) {
    super(message);
    this.status = status;
    this.detail = detail;
    this.waitS = waitS;
  }
}

const UNREACHABLE = "The server is not reachable.";
const WORDS = {
  401: "This server needs an API key.",
  403: "The server does not allow this.",
  413: "This message is larger than the server accepts.",
  429: "The server is busy.",
  503: "The server is not ready",
  504: "The answer took longer than the server allows.",
};

function explain(status, error, { hasKey = false, retryAfter = 0 } = {}) {
  const detail = error?.message ?? "",
    waitS = status === 429 || status === 503 ? retryAfter || 1 : null;
  if (status === 401 && hasKey) return new ServerError("The server did not accept the API key.", { status });
  if (error?.code === "context_length_exceeded") {
    const message =
      "This chat no longer fits into the model's context. Start a new chat, or shorten an earlier message.";
    return new ServerError(message, { status, detail });
  }
  if (error?.code === "engine_asleep")
    return new ServerError("The model sleeps; its operator can wake it.", { status, detail });
  if (status === 503)
    return new ServerError(detail ? `${WORDS[503]}: ${detail}.` : `${WORDS[503]}.`, { status, waitS });
  const message =
    WORDS[status] ?? (status >= 500 ? "The server failed while it answered." : "The server refused the request.");
  return new ServerError(message, { status, detail, waitS });
}

async function readFailure(response, hasKey) {
  const text = await response.text().catch(() => "");
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    error = { message: text.slice(0, 300) };
  } // a proxy's page
  return explain(response.status, error, { hasKey, retryAfter: Number(response.headers.get("retry-after")) });
}

/* Seconds that pass, with `tick(left)` each second; ends early when `signal` aborts or `skip` resolves. */
async function wait(seconds, signal, tick, skip) {
  for (let left = Math.ceil(seconds); left > 0 && !signal.aborted; left--) {
    tick(left);
    const isSkipped = await new Promise((resolve) => {
      const timer = setTimeout(resolve, 1000, false);
      const end = () => {
        clearTimeout(timer);
        resolve(true);
      };
      signal.addEventListener("abort", end, { once: true });
      skip.then(end);
    });
    if (isSkipped) break;
  }
  signal.throwIfAborted();
}

/* Server-sent events of a response, parsed, until [DONE]. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.startsWith("data: ") ? frame.slice(6) : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

export class Server {
  /* `readKey()` is asked for each request; `onFailure()` is told when the server was not reached or not ready. */
  constructor({ readKey, onFailure }) {
    this.readKey = readKey;
    this.onFailure = onFailure;
  }

  get headers() {
    const key = this.readKey();
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  async get(path) {
    const response = await fetch(path, { headers: this.headers, cache: "no-store" });
    if (!response.ok) throw await readFailure(response, Boolean(this.readKey()));
    return response.json();
  }

  /* What is served: {state, text, model: {id, contextLen, task, takesImages, adapters}, defaults (sampling, by name)}. */
  async look() {
    try {
      const cards = (await this.get("v1/models")).data;
      const card = cards[0];
      const info = await this.get("server_info").catch(() => ({})); // a proxy may hide it: then without defaults
      const defaults = info.sampling_defaults ?? info.default_sampling ?? info.model?.default_sampling ?? {};
      const model = {
        id: card.id,
        contextLen: card.max_model_len ?? null,
        task: card.task ?? "generate",
        adapters: cards.filter((other) => other.parent === card.id).map((other) => other.id),
        takesImages: card.input_modalities?.includes("image") ?? false,
      };
      return { state: "ready", text: "Ready", model, defaults };
    } catch (error) {
      if (!(error instanceof ServerError))
        return { state: "unreachable", text: "The server is not reachable, retrying…" };
      if (error.status === 401) return { state: "key", text: error.message };
      return { state: "loading", text: await this.describeLoading(error) };
    }
  }

  async describeLoading(error) {
    const health = await this.get("health").catch(() => ({}));
    if (!health.stage) return error.message;
    const share = health.progress ? ` (${Math.round(health.progress * 100)} %)` : "";
    return `The model is loading: ${health.stage}${share}…`;
  }

  /* The events of a streamed answer. What passes (no connection, a full queue, a model that loads) is tried again until
     `signal` aborts; `onWait(message, left, skip)` is called each second meanwhile, with null once it is over. */
  async *stream(body, signal, onWait) {
    const response = await this.open(body, signal, onWait);
    try {
      for await (const event of readEvents(response)) {
        if (event.error) throw explain(500, event.error);
        yield event;
      }
    } catch (error) {
      if (error instanceof ServerError || signal.aborted) throw error;
      this.onFailure();
      throw new ServerError("The connection was lost while the server answered.");
    }
  }

  async open(body, signal, onWait) {
    for (let tries = 0; ; tries++) {
      const failure = await this.post(body, signal).catch((error) => error);
      if (failure instanceof Response) {
        if (tries) onWait(null);
        return failure;
      }
      if (signal.aborted || !(failure instanceof ServerError) || failure.waitS === null) throw failure;
      this.onFailure();
      const { promise, resolve } = Promise.withResolvers();
      const seconds = Math.min(MAX_WAIT_S, Math.max(failure.waitS, 2 ** tries));
      await wait(seconds, signal, (left) => onWait(failure.message, left, resolve), promise);
    }
  }

  async post(body, signal) {
    const request = {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers },
      body: JSON.stringify(body),
    };
    let response;
    try {
      response = await fetch("v1/chat/completions", { ...request, signal });
    } catch (error) {
      throw signal.aborted ? error : new ServerError(UNREACHABLE, { waitS: 1 });
    }
    if (response.ok) return response;
    throw await readFailure(response, Boolean(this.readKey()));
  }
}
