/* The chat page: joins the store, the server and the views. */

import { fitHeight, formatCount, make } from "./dom.js";
import { Tray, imageFiles } from "./images.js";
import { KeyDialog, Panel, Toast } from "./panels.js";
import { Run, requestBody } from "./run.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Sidebar, titleOf } from "./sidebar.js";
import { Store } from "./store.js";
import { TurnList, describeContext } from "./turns.js";

const $ = (id) => document.getElementById(id);
const SAVE_GAP_MS = 500,
  LOOK_GAP_MS = 2000;
const IDEAS = [
  "Explain how a water wheel works, in three sentences.",
  "Compare tea and coffee in a table.",
  "Write a Python function that reverses a string.",
];

class Chat {
  constructor() {
    this.store = new Store();
    this.runs = new Map(); // by chat id
    this.model = null;
    this.settings = new Settings($("settings"), this.store);
    this.server = new Server({ readKey: () => this.store.key, onFailure: () => this.watchServer() });
    this.turns = new TurnList($("log"), $("scroller"), {
      resend: (turn, text) => this.resend(turn, text),
      retry: (turn) => this.retry(turn),
      extend: (turn) => this.extend(turn),
    });
    this.sidebar = new Sidebar($("list"), {
      open: (chat) => {
        this.open(chat);
        this.chatsPanel.leave();
      },
      rename: (chat, title) => this.rename(chat, title),
      remove: (chat) => this.remove(chat),
    });
    this.chatsPanel = new Panel($("chats"), { opener: $("open-chats"), closer: $("close-chats"), isShown: true });
    this.settingsPanel = new Panel($("settings"), { opener: $("tune"), closer: $("close-settings"), isShown: false });
    this.toast = new Toast();
    this.tray = new Tray($("tray"), {
      changed: (images) => {
        this.chat.images = images;
        this.keepDraft();
      },
      refused: (text) => this.toast.show(text, "OK", () => {}),
    });
    this.keyDialog = new KeyDialog((key) => this.useKey(key));
    this.listen();
    this.open(this.store.chats.get(this.store.currentId) ?? this.store.create());
    this.watchServer();
  }

  listen() {
    const box = $("prompt");
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    box.addEventListener("input", () => this.keepDraft());
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.listenForImages();
    $("stop").addEventListener("click", () => this.run?.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.run?.stop();
    });
    for (const id of ["fresh", "fresh-narrow"]) $(id).addEventListener("click", () => this.startFresh());
    for (const id of ["enter-key", "change-key"])
      $(id).addEventListener("click", () => this.askKey("The key of this server's API."));
    $("jump").addEventListener("click", () => this.turns.jump());
    this.turns.onScroll = () => {
      $("jump").hidden = this.turns.gap() < 200;
    };
    $("ideas").append(
      ...IDEAS.map((text) => make("button", { type: "button", textContent: text, onclick: () => this.say(text) })),
    );
    this.store.watch((id) => this.takeOver(id));
    addEventListener("pagehide", () => this.saveNow());
    document.addEventListener("visibilitychange", () => document.hidden && this.saveNow()); // phones end hidden pages
    addEventListener("online", () => this.watchServer());
  }

  listenForImages() {
    const add = (event, transfer) => {
      const files = this.model?.takesImages ? imageFiles(transfer) : [];
      if (!files.length) return;
      event.preventDefault();
      this.tray.add(files);
    };
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", (event) => {
      add(event, $("files"));
      $("files").value = ""; // the same file may be chosen again
    });
    $("prompt").addEventListener("paste", (event) => add(event, event.clipboardData));
    // Anywhere on the page: a file dropped beside the box would replace the page.
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      $("box").classList.toggle("dropping", Boolean(this.model?.takesImages));
    });
    document.addEventListener("dragleave", () => $("box").classList.remove("dropping"));
    document.addEventListener("drop", (event) => {
      $("box").classList.remove("dropping");
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
      add(event, event.dataTransfer);
    });
  }

  get run() {
    return this.runs.get(this.chat.id);
  }

  /* The chats. */

  open(chat) {
    this.chat = chat;
    this.store.currentId = chat.id;
    $("prompt").value = chat.draft;
    this.tray.show(chat.images);
    this.turns.isFollowing = true;
    this.refresh();
    fitHeight($("prompt"));
    this.turns.jump();
  }

  startFresh() {
    if (this.chat.turns.length || this.chat.draft || this.chat.images.length) this.open(this.store.create());
    this.chatsPanel.leave();
    $("prompt").focus();
  }

  rename(chat, title) {
    if (title && title !== chat.title) {
      Object.assign(chat, { title, isNamed: true });
      this.store.save(chat);
    }
    this.refresh();
  }

  remove(chat) {
    this.runs.get(chat.id)?.stop();
    this.store.delete(chat.id);
    if (chat === this.chat) this.open(this.store.list()[0] ?? this.store.create());
    else this.refresh();
    this.toast.show(`“${titleOf(chat)}” is deleted.`, "Undo", () => {
      this.store.save(chat);
      this.open(chat);
    });
  }

  /* Another tab has changed a chat. */
  takeOver(id) {
    if (id === this.chat.id && !this.run) {
      const draft = $("prompt").value,
        chat = this.store.chats.get(id);
      if (chat) this.open(document.activeElement === $("prompt") ? Object.assign(chat, { draft }) : chat);
    } else this.refresh();
  }

  keepDraft() {
    this.chat.draft = $("prompt").value;
    fitHeight($("prompt"));
    $("send").disabled = !this.chat.draft.trim() && !this.chat.images.length;
    this.saveSoon();
  }

  saveSoon(chat = this.chat) {
    this.unsaved ??= new Set();
    this.unsaved.add(chat);
    this.saveTimer ??= setTimeout(() => this.saveNow(), SAVE_GAP_MS);
  }

  saveNow() {
    clearTimeout(this.saveTimer);
    this.saveTimer = null;
    for (const chat of this.unsaved ?? []) {
      if (chat === this.chat || this.store.chats.has(chat.id) || this.runs.has(chat.id)) this.store.save(chat);
    }
    this.unsaved?.clear();
    this.refresh();
  }

  refresh() {
    const { chat } = this,
      last = chat.turns.findLast((turn) => turn.stats);
    this.turns.show(chat.turns);
    this.sidebar.show(this.store.list(), chat.id, (each) => this.runs.has(each.id));
    $("hello").hidden = chat.turns.length > 0;
    $("send").hidden = Boolean(this.run);
    $("stop").hidden = !this.run;
    $("send").disabled = !$("prompt").value.trim() && !chat.images.length;
    $("context").textContent = last
      ? describeContext({ ...last.stats, contextLen: this.model?.contextLen ?? last.stats.contextLen })
      : this.model?.contextLen
        ? `${formatCount(this.model.contextLen)} tokens of context`
        : "";
    document.title = chat.title ? `${chat.title} · Headrace` : "Headrace";
    $("unkept").hidden = this.store.isKeeping;
  }

  /* Asking and answering. */

  say(text) {
    $("prompt").value = text;
    this.keepDraft();
    this.send();
  }

  send() {
    const text = $("prompt").value.trim(),
      { images } = this.chat;
    if ((!text && !images.length) || this.run) return;
    $("prompt").value = "";
    this.tray.set([]);
    this.chat.turns.push({ role: "user", content: text, ...(images.length ? { images } : {}) });
    this.answer();
  }

  /* An edited message. */
  resend(turn, text) {
    this.run?.stop();
    this.replaceFrom(this.chat.turns.indexOf(turn), { ...turn, content: text });
    this.answer();
  }

  /* The answer once more. */
  retry(turn) {
    const place = this.chat.turns.indexOf(turn);
    if (this.run || place < 0) return;
    this.replaceFrom(place);
    this.answer();
  }

  /* The answer from where it ended. */
  extend(turn) {
    const place = this.chat.turns.indexOf(turn);
    if (this.run || place < 0) return;
    this.replaceFrom(place + 1);
    this.answer(turn);
  }

  /* Puts `added` in the place of all turns from a place on; what was written there can be brought back. */
  replaceFrom(place, ...added) {
    const { chat } = this,
      before = chat.turns;
    chat.turns = [...before.slice(0, place), ...added];
    if (!before.slice(place).some((turn) => turn.role === "assistant" && turn.content)) return;
    this.toast.show("What came after is replaced.", "Undo", () => {
      this.runs.get(chat.id)?.stop();
      chat.turns = before;
      this.store.save(chat);
      this.open(chat);
    });
  }

  async answer(continued = null) {
    const { chat } = this,
      turn = continued ?? { role: "assistant", content: "", reasoning: "", state: "running" };
    const body = requestBody(chat.turns, this.settings.values, Boolean(continued));
    if (!$("adapter").hidden) body.model = $("adapter").value;
    if (!continued) chat.turns.push(turn);
    if (!chat.isNamed) chat.title = chat.turns[0].content.replace(/\s+/g, " ").trim().slice(0, 60) || "Image";
    chat.updated = Date.now();
    const run = new Run(chat, turn, {
      server: this.server,
      contextLen: this.model?.contextLen ?? null,
      keep: () => this.saveSoon(chat),
      paint: (waiting) => {
        if (this.chat === chat) this.turns.update(turn, waiting);
      },
    });
    this.runs.get(chat.id)?.stop();
    this.runs.set(chat.id, run);
    turn.state = "running";
    this.store.save(chat);
    this.refresh();
    this.turns.update(turn);
    this.turns.jump();
    this.announce("Answering");
    const failure = await run.follow(body);
    if (this.runs.get(chat.id) === run) this.runs.delete(chat.id);
    if (this.store.chats.has(chat.id)) this.store.save(chat);
    this.refresh();
    this.announce(failure ? failure.message : turn.state === "stopped" ? "Stopped" : "The answer is complete");
    if (failure?.status === 401) this.askKey(failure.message, turn);
    else if (this.isReady === false || failure) this.watchServer();
  }

  announce(text) {
    $("live").textContent = text;
  }

  /* The server. */

  /* Looks who answers here; again and again until someone does. */
  async watchServer() {
    clearTimeout(this.lookTimer);
    const found = await this.server.look();
    clearTimeout(this.lookTimer);
    const hasReturned = this.isReady === false && found.state === "ready";
    this.isReady = found.state === "ready";
    if (hasReturned) for (const run of this.runs.values()) run.wake();
    $("dot").className = `dot ${found.state}`;
    if (found.model) this.meet(found);
    else if (!this.model) $("model").textContent = "Headrace";
    this.showBanner(this.isReady ? this.describeTask() : found.text, { needsKey: found.state === "key" });
    if (found.state === "key" && !this.isAsked) this.askKey(found.text);
    if (found.state === "unreachable" || found.state === "loading")
      this.lookTimer = setTimeout(() => this.watchServer(), LOOK_GAP_MS);
  }

  meet({ model, defaults }) {
    this.model = model;
    $("model").textContent = $("model").title = model.id;
    this.offerAdapters(model);
    $("about").textContent = [
      model.id,
      model.contextLen && `${formatCount(model.contextLen)} tokens of context`,
      model.takesImages && "takes images",
    ]
      .filter(Boolean)
      .join(" · ");
    this.settings.learn(defaults);
    $("attach").hidden = !model.takesImages;
    this.refresh();
  }

  /* A choice of the model and its adapters, where it has some. */
  offerAdapters({ id, adapters }) {
    const select = $("adapter"),
      chosen = adapters.includes(select.value) ? select.value : id;
    select.replaceChildren(...[id, ...adapters].map((name) => new Option(name, name, false, name === chosen)));
    select.hidden = !adapters.length;
    $("model").hidden = !select.hidden;
  }

  describeTask() {
    return this.model.task === "generate"
      ? ""
      : `${this.model.id} makes no text (it serves “${this.model.task}”): see the API.`;
  }

  showBanner(text, { needsKey = false } = {}) {
    $("banner").hidden = !text;
    $("banner-text").textContent = text;
    $("enter-key").hidden = !needsKey;
  }

  askKey(text, turn = this.refused) {
    this.isAsked = true;
    this.refused = turn; // answered once the key is right
    this.keyDialog.ask(text, this.store.key);
  }

  async useKey(key) {
    this.store.key = key;
    this.isAsked = false;
    await this.watchServer();
    if (!this.isReady) return;
    const turn = this.refused;
    this.refused = null;
    $("prompt").focus();
    if (this.chat.turns.includes(turn)) this.retry(turn);
  }
}

new Chat();
$("prompt").focus();
