/* One answer on its way: the request, and the turn that grows. */

const PAINT_SHARE = 4; // of the time between two paintings, painting takes at most one part in this

/* The conversation as the server takes it. Unanswered messages in a row are one: templates want the roles to alternate. */
function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, images = [] } of turns) {
    if (!content && !images.length) continue;
    const last = messages.at(-1);
    if (last?.role === role) {
      last.content = [last.content, content].filter(Boolean).join("\n\n");
      last.images = [...(last.images ?? []), ...images];
    } else messages.push({ role, content, images });
  }
  return messages.map(withParts);
}

/* A message as the API takes it: with images its content is a list of parts. */
function withParts({ role, content, images = [] }) {
  if (!images.length) return { role, content };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
}

/* The body of a request. Only what the user has set is sent: all else is as the model's makers advise. */
export function requestBody(turns, { system = "", ...sampling }, isContinued) {
  return {
    messages: messagesOf(turns, system.trim()),
    ...sampling,
    ...(isContinued ? { add_generation_prompt: false, continue_final_message: true } : {}),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_timings: true,
  };
}

/* Calls `paint` at most once a frame, and less often where painting is slow: typing and scrolling stay smooth. */
function pacer(paint) {
  let isDue = false;
  let restUntil = 0;
  const run = () => {
    if (!isDue) return;
    const start = performance.now();
    if (start < restUntil) return void setTimeout(() => requestAnimationFrame(run), restUntil - start);
    isDue = false;
    paint();
    restUntil = performance.now() + (performance.now() - start) * (PAINT_SHARE - 1);
  };
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(run);
  };
}

export class Run {
  /* `turn` is the answer, last in `chat.turns`; `paint(waiting)` shows it. */
  constructor(chat, turn, { server, contextLen, paint, keep }) {
    this.chat = chat;
    this.turn = turn;
    this.server = server;
    this.contextLen = contextLen;
    this.paint = paint;
    this.keep = keep;
    this.controller = new AbortController();
  }

  stop() {
    this.controller.abort();
  }

  /* Tries again at once if the server is being waited for. */
  wake() {
    this.skip?.();
  }

  /* Until the answer is whole, stopped or failed; returns the error, if any. */
  async follow(body) {
    const { turn } = this,
      { signal } = this.controller,
      repaint = pacer(() => this.paint());
    const onWait = (message, left, skip) => {
      this.skip = skip;
      this.paint(message && { message, left, skip });
    };
    Object.assign(turn, { state: "running", error: null });
    this.start = performance.now();
    this.begun = 0;
    let failure = null,
      reason = null;
    try {
      for await (const event of this.server.stream(body, signal, onWait)) {
        reason = this.take(event) ?? reason;
        repaint();
        this.keep();
      }
      turn.state = reason === "length" ? "length" : "done";
    } catch (error) {
      turn.state = error.name === "AbortError" ? "stopped" : "failed";
      if (turn.state === "failed") {
        failure = error;
        turn.error = { message: error.message, detail: error.detail ?? "" };
      }
    }
    this.paint();
    return failure;
  }

  /* Adds an event to the turn; returns why the answer ended, once it has. */
  take({ choices: [choice], usage, timings }) {
    const { turn } = this,
      now = performance.now(),
      delta = choice?.delta ?? {},
      wasThinking = turn.reasoning && !turn.content;
    if (delta.content || delta.reasoning_content) {
      this.begun ||= now;
      turn.reasoning = (turn.reasoning ?? "") + (delta.reasoning_content ?? "");
      turn.content += delta.content ?? "";
      if (wasThinking && turn.content) turn.thinkS = (now - this.begun) / 1000;
    }
    this.timings = timings ?? this.timings; // with the end alone
    if (usage && this.begun) {
      // The prompt of a continued answer holds its beginning; figures are of what came now.
      turn.stats = {
        usage,
        timings: this.timings,
        contextLen: this.contextLen,
        firstS: (this.begun - this.start) / 1000,
        decodeS: (now - this.begun) / 1000,
      };
    }
    return choice?.finish_reason ?? null;
  }
}
