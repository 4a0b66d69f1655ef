/* The panels at both sides, which cover the chat on narrow screens, and the question for the API key. */

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 60rem)");

/* One panel: wide screens show it beside the chat, narrow ones over it, where what lies below can not be reached. */
export class Panel {
  constructor(panel, { opener, closer, isShown }) {
    this.panel = panel;
    this.opener = opener;
    this.isShownWide = isShown;
    opener.addEventListener("click", () => this.show(!this.isOpen));
    closer.addEventListener("click", () => this.show(false));
    $("backdrop").addEventListener("click", () => this.isCovering && this.show(false));
    panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && (narrow.matches || !isShown)) {
        event.stopPropagation();
        this.show(false);
      }
    });
    narrow.addEventListener("change", () => this.set(!narrow.matches && this.isShownWide));
    this.set(!narrow.matches && isShown);
  }

  get isOpen() {
    return !this.panel.hidden;
  }

  get isCovering() {
    return this.isOpen && narrow.matches;
  }

  show(isShown) {
    this.set(isShown);
    if (isShown) this.panel.querySelector("button, input, textarea").focus();
    else this.opener.focus();
  }

  set(isShown) {
    this.panel.hidden = !isShown;
    this.opener.setAttribute("aria-expanded", String(isShown));
    $("backdrop").hidden = !this.isCovering;
    for (const node of document.querySelectorAll("header, main, .panel")) {
      if (node !== this.panel) node.inert = this.isCovering;
    }
  }

  /* After a choice was made in it. */
  leave() {
    if (this.isCovering) this.show(false);
  }
}

/* Asks for the key; `onKey(key)` gets it. */
export class KeyDialog {
  constructor(onKey) {
    this.dialog = $("key-dialog");
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.dialog.close();
      onKey($("key").value.trim());
    });
    $("cancel-key").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("keydown", (event) => event.stopPropagation()); // Esc stops nothing
  }

  ask(text, key) {
    if (this.dialog.open) return;
    $("key-text").textContent = text;
    $("key").value = key;
    this.dialog.showModal();
    $("key").select();
  }
}

/* A line that goes away by itself, with one thing to do about it. */
export class Toast {
  show(text, action, onclick) {
    const node = $("toast"),
      button = document.createElement("button");
    button.type = "button";
    button.textContent = action;
    button.onclick = () => {
      this.hide();
      onclick();
    };
    node.replaceChildren(text, button);
    node.hidden = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), 8000);
  }

  hide() {
    $("toast").hidden = true;
  }
}
