"use strict";
/* Light, dark, or as the system: applied before the first paint, changed by the button `#theme`. */
(() => {
  const NAME = "headrace.theme",
    THEMES = ["system", "light", "dark"],
    root = document.documentElement;
  const read = () => {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null;
    } // no storage: as the system
  };
  const apply = (theme) => {
    root.dataset.theme = THEMES.includes(theme) ? theme : "system";
  };
  apply(read());
  addEventListener("storage", (event) => {
    if (event.key === NAME) apply(event.newValue);
  });
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      const label = `Theme: ${root.dataset.theme}`;
      button.title = label;
      button.setAttribute("aria-label", label);
    };
    button.addEventListener("click", () => {
      apply(THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length]);
      try {
        localStorage.setItem(NAME, root.dataset.theme);
      } catch {
        /* no storage: for this visit */
      }
      name();
    });
    name();
  });
})();
