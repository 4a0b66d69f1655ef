/* How one turn of a chat looks: a user's message with its editor; an answer with its reasoning, figures and actions. */

import { copyButton, fitHeight, formatCount, icon, iconButton, make } from "./dom.js";
import { showImages } from "./images.js";
import { MarkdownView } from "./markdown.js";

const ENDINGS = {
  length: "stopped at the longest answer",
  stopped: "stopped",
  interrupted: "interrupted when the page was closed",
};

const formatRate = (rate) => (rate < 100 ? rate.toFixed(1) : formatCount(Math.round(rate)));

/* What is shown below an answer, each where its figures are known. `stats`: `usage` and, at the end, `timings` as the
   server sent them, seconds to the first token and while tokens came, and the model's context. */
const FIGURES = [
  ({ usage }) =>
    usage && `${formatCount(usage.completion_tokens)} ${usage.completion_tokens === 1 ? "token" : "tokens"}`,
  ({ usage, decodeS }) =>
    usage?.completion_tokens > 1 && decodeS > 0 && `${formatRate((usage.completion_tokens - 1) / decodeS)} tokens/s`,
  ({ usage, timings }) =>
    usage &&
    timings?.draft_tokens > 0 &&
    `${(usage.completion_tokens / (usage.completion_tokens - timings.accepted_tokens)).toFixed(1)} tokens/step`,
  ({ firstS }) => firstS > 0 && `first token ${firstS < 10 ? firstS.toFixed(2) : firstS.toFixed(0)} s`,
  ({ usage }) =>
    usage?.prompt_tokens_details?.cached_tokens > 0 &&
    `${formatCount(usage.prompt_tokens_details.cached_tokens)} cached`,
  (stats) => describeContext(stats),
];

export function describeContext({ usage, contextLen }) {
  if (!usage) return "";
  const used = usage.prompt_tokens + usage.completion_tokens;
  if (!contextLen) return `context ${formatCount(used)}`;
  return `context ${formatCount(used)} of ${formatCount(contextLen)} (${Math.round((100 * used) / contextLen)} %)`;
}

class UserTurn {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.node = make("article", { className: "turn user", "aria-label": "Your message" });
    this.show();
  }

  show() {
    const { content, images = [] } = this.turn;
    this.node.replaceChildren(
      ...(images.length ? [make("div", { className: "pictures" }, ...showImages(images))] : []),
      ...(content ? [make("div", { className: "bubble", textContent: content })] : []),
      make(
        "div",
        { className: "actions" },
        copyButton("Copy message", () => this.turn.content),
        iconButton("pencil", "Edit message", () => this.edit()),
      ),
    );
  }

  edit() {
    const box = make("textarea", { value: this.turn.content, rows: 1, "aria-label": "Edit message" });
    const close = () => {
      this.show();
      this.node.querySelector("[aria-label='Edit message']").focus();
    };
    const send = () => {
      const text = box.value.trim();
      if (text || this.turn.images?.length) this.actions.resend(this.turn, text);
    };
    box.addEventListener("input", () => fitHeight(box));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.node.replaceChildren(
      make(
        "div",
        { className: "editor" },
        box,
        make(
          "div",
          { className: "choices" },
          make("button", { type: "button", textContent: "Cancel", onclick: close }),
          make("button", { type: "button", className: "main", textContent: "Send", onclick: send }),
        ),
      ),
    );
    fitHeight(box);
    box.focus();
  }

  update() {}
}

class AnswerTurn {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.words = make("div", { className: "words" });
    this.thoughts = make("div", { className: "words" });
    this.summary = make("summary");
    this.reasoning = make("details", { className: "reasoning", hidden: true }, this.summary, this.thoughts);
    this.notice = make("div", { className: "notice", hidden: true });
    this.figures = make("div", { className: "figures" });
    this.buttons = make("div", { className: "actions" });
    this.node = make(
      "article",
      { className: "turn assistant", "aria-label": "Answer" },
      this.reasoning,
      this.words,
      this.notice,
      make("div", { className: "foot" }, this.buttons, this.figures),
    );
    this.views = { content: new MarkdownView(this.words), reasoning: new MarkdownView(this.thoughts) };
    this.shown = {};
    this.summary.addEventListener("click", () => {
      this.isFoldChosen = true;
    });
    this.update();
  }

  /* Shows what the turn holds now; `waiting`: {message, left, skip} while the server is tried again. */
  update(waiting = null) {
    const { turn } = this,
      isRunning = turn.state === "running";
    this.node.classList.toggle("running", isRunning && !waiting);
    for (const [name, view] of Object.entries(this.views)) this.showText(name, view, !isRunning);
    this.reasoning.hidden = !turn.reasoning;
    const isThinking = isRunning && !turn.content;
    this.summary.textContent = isThinking
      ? "Thinking…"
      : turn.thinkS
        ? `Thought for ${turn.thinkS.toFixed(1)} s`
        : "Reasoning";
    if (!this.isFoldChosen && isRunning) this.reasoning.open = isThinking; // folds itself once the answer begins
    this.showNotice(waiting);
    this.showFigures(isRunning);
  }

  showText(name, view, isWhole) {
    const text = this.turn[name] ?? "",
      key = `${isWhole}:${text.length}`;
    if (this.shown[name] === key) return;
    this.shown[name] = key;
    view.update(text, { isWhole });
  }

  showNotice(waiting) {
    const { error } = this.turn;
    this.notice.hidden = !waiting && !error;
    if (waiting) {
      this.notice.className = "notice waiting";
      if (!this.notice.querySelector(".wait")) {
        this.notice.replaceChildren(
          make("span", { className: "wait" }),
          make("button", { type: "button", textContent: "Try now", onclick: () => this.skip() }),
        );
      }
      this.skip = waiting.skip;
      this.notice.querySelector(".wait").textContent = `${waiting.message} Retrying in ${waiting.left} s…`;
    } else if (error) {
      this.notice.className = "notice error";
      this.notice.replaceChildren(
        make(
          "div",
          {},
          make("strong", { textContent: error.message }),
          error.detail ? make("div", { className: "detail", textContent: error.detail }) : null,
        ),
        make(
          "button",
          { type: "button", className: "retry", onclick: () => this.actions.retry(this.turn) },
          icon("again"),
          "Retry",
        ),
      );
    }
  }

  showFigures(isRunning) {
    const { turn } = this,
      known = turn.stats ? FIGURES.map((figure) => figure(turn.stats)).filter(Boolean) : [];
    const ending = ENDINGS[turn.state];
    this.figures.replaceChildren(
      ...[...known, ending].filter(Boolean).map((text) => make("span", { textContent: text })),
    );
    if (this.buttonsOf === turn.state) return;
    this.buttonsOf = turn.state;
    this.buttons.replaceChildren();
    if (isRunning) return;
    const isCut = turn.content && turn.state !== "done";
    this.buttons.append(
      ...[
        turn.content ? copyButton("Copy answer", () => turn.content) : null,
        turn.state === "failed" ? null : iconButton("again", "Answer again", () => this.actions.retry(turn)),
        isCut ? iconButton("continue", "Continue this answer", () => this.actions.extend(turn)) : null,
      ].filter(Boolean),
    );
  }
}

/* The column of turns. Follows what is written at its end unless the reader has scrolled away. */
export class TurnList {
  constructor(column, scroller, actions) {
    this.column = column;
    this.scroller = scroller;
    this.actions = actions;
    this.views = new Map();
    this.isFollowing = true;
    scroller.addEventListener(
      "scroll",
      () => {
        this.isFollowing = this.gap() < 60;
        this.onScroll?.();
      },
      { passive: true },
    );
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  gap() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
  }

  follow() {
    if (this.isFollowing) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  jump() {
    this.isFollowing = true;
    this.follow();
  }

  /* Shows exactly these turns; those already shown stay as they are. */
  show(turns) {
    const kept = new Set(turns);
    for (const [turn, view] of this.views) {
      if (kept.has(turn)) continue;
      view.node.remove();
      this.views.delete(turn);
    }
    for (const turn of turns) {
      if (this.views.has(turn)) continue;
      const view = turn.role === "user" ? new UserTurn(turn, this.actions) : new AnswerTurn(turn, this.actions);
      this.views.set(turn, view);
      this.column.append(view.node);
    }
    this.follow();
  }

  update(turn, waiting) {
    this.views.get(turn)?.update(waiting);
    this.follow();
  }
}
