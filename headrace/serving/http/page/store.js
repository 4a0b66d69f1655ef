/* What this browser keeps: chats with their drafts and the settings in localStorage, the API key in this tab alone. */

import { imagesIn } from "./images.js";

const CHAT = "headrace.chat.",
  SETTINGS = "headrace.settings",
  CURRENT = "headrace.current",
  KEY = "headrace.key";

function read(storage, name) {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  } // storage is blocked
}

/* Whether it was kept: storage may be full or blocked. */
function write(storage, name, value) {
  try {
    if (value === null) storage().removeItem(name);
    else storage().setItem(name, value);
    return true;
  } catch {
    return false;
  }
}

const local = () => localStorage,
  tab = () => sessionStorage;

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/* A chat as this version knows it, whatever was stored, or null. An answer that a closed page left running is over. */
function readChat(text) {
  const found = parse(text);
  if (typeof found?.id !== "string" || !Array.isArray(found.turns)) return null;
  const turns = found.turns.filter(
    (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string",
  );
  for (const turn of turns) {
    if (turn.state === "running") turn.state = "interrupted";
    if (turn.images) turn.images = imagesIn(turn.images);
  }
  return { title: "", isNamed: false, draft: "", updated: 0, ...found, turns, images: imagesIn(found.images) };
}

function withoutImages(chat) {
  return { ...chat, images: [], turns: chat.turns.map((turn) => ({ ...turn, images: undefined })) };
}

export class Store {
  constructor() {
    this.chats = new Map();
    this.isKeeping = true; // false once the browser has refused
    let names = [];
    try {
      names = Object.keys(localStorage);
    } catch {
      this.isKeeping = false;
    }
    for (const name of names) if (name.startsWith(CHAT)) this.load(name);
  }

  load(name) {
    const chat = readChat(read(local, name)),
      id = name.slice(CHAT.length);
    if (chat) this.chats.set(id, chat);
    else this.chats.delete(id);
    return chat;
  }

  /* Calls `notice(id)` when another tab has changed a chat. */
  watch(notice) {
    addEventListener("storage", ({ key }) => {
      if (!key?.startsWith(CHAT)) return;
      this.load(key);
      notice(key.slice(CHAT.length));
    });
  }

  /* All chats, the one changed last first. */
  list() {
    return [...this.chats.values()].sort((a, b) => b.updated - a.updated);
  }

  create() {
    const random = [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(36)).join("");
    return {
      id: `${Date.now().toString(36)}-${random}`,
      title: "",
      isNamed: false,
      draft: "",
      updated: Date.now(),
      turns: [],
      images: [],
    };
  }

  /* Keeps a chat; an empty one is not worth a place in the list. */
  save(chat) {
    const isEmpty = !chat.turns.length && !chat.draft.trim() && !chat.images.length && !chat.isNamed;
    if (isEmpty) return this.delete(chat.id);
    this.chats.set(chat.id, chat);
    this.isKeeping = write(local, CHAT + chat.id, JSON.stringify(chat));
    // Images fill the storage first: then at least what was written is kept.
    if (!this.isKeeping) write(local, CHAT + chat.id, JSON.stringify(withoutImages(chat)));
  }

  delete(id) {
    this.chats.delete(id);
    write(local, CHAT + id, null);
  }

  /* The chat this tab showed last, else the last one of any tab. */
  get currentId() {
    return read(tab, CURRENT) ?? read(local, CURRENT);
  }

  set currentId(id) {
    write(tab, CURRENT, id);
    write(local, CURRENT, id);
  }

  get settings() {
    return parse(read(local, SETTINGS)) ?? {};
  }

  set settings(settings) {
    write(local, SETTINGS, JSON.stringify(settings));
  }

  get key() {
    return read(tab, KEY) ?? this.heldKey ?? "";
  }

  set key(key) {
    this.heldKey = key; // for a tab without storage
    write(tab, KEY, key || null);
  }
}
