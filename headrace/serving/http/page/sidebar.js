/* The list of chats: open, rename, delete. */

import { iconButton, make } from "./dom.js";

export const titleOf = (chat) => chat.title || chat.draft.trim().slice(0, 60) || "New chat";

export class Sidebar {
  /* `actions`: open(chat), rename(chat, title), remove(chat). */
  constructor(list, actions) {
    this.list = list;
    this.actions = actions;
  }

  show(chats, currentId, isRunning) {
    const shown = JSON.stringify(chats.map((chat) => [chat.id, titleOf(chat), chat.id === currentId, isRunning(chat)]));
    if (shown === this.shown || this.list.querySelector("input")) return; // as before, or a name is being written
    this.shown = shown;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.list.replaceChildren(...chats.map((chat) => this.makeItem(chat, chat.id === currentId, isRunning(chat))));
    if (!chats.length)
      this.list.append(make("li", { className: "none", textContent: "Chats are kept in this browser." }));
    if (focused) [...this.list.querySelectorAll("button")].find((button) => button.dataset.key === focused)?.focus();
  }

  makeItem(chat, isCurrent, isRunning) {
    const item = make("li", { className: isCurrent ? "current" : "" });
    const open = make("button", {
      type: "button",
      className: "title",
      textContent: titleOf(chat),
      title: titleOf(chat),
      "aria-current": isCurrent ? "true" : undefined,
      onclick: () => this.actions.open(chat),
    });
    if (isRunning) open.prepend(make("span", { className: "dot busy", role: "img", "aria-label": "answering" }));
    const rename = iconButton("pencil", `Rename ${titleOf(chat)}`, () => this.rename(item, chat));
    const remove = iconButton("trash", `Delete ${titleOf(chat)}`, () => this.actions.remove(chat));
    for (const [name, button] of Object.entries({ open, rename, remove })) button.dataset.key = `${name} ${chat.id}`;
    item.append(open, rename, remove);
    return item;
  }

  rename(item, chat) {
    const box = make("input", {
      type: "text",
      value: titleOf(chat),
      maxLength: 120,
      "aria-label": "Name of this chat",
    });
    let isOver = false;
    const end = (isKept) => {
      if (isOver) return;
      isOver = true;
      box.remove();
      this.shown = null;
      this.actions.rename(chat, isKept ? box.value.trim() : chat.title);
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    });
    box.addEventListener("blur", () => end(true));
    item.replaceChildren(box);
    box.select();
  }
}
