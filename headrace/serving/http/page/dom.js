/* Building elements. Text enters the page through text nodes alone: what a model writes can never become markup. */

const SVG = "http://www.w3.org/2000/svg";

/* An element with properties (`data-` and `aria-` names become attributes) and children. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/* One of the symbols at the top of the document. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"),
    use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/* A button that shows an icon; the label is its name and its tooltip. */
export function iconButton(name, label, onclick, className = "quiet") {
  return make("button", { type: "button", className, title: label, "aria-label": label, onclick }, icon(name));
}

/* A button that copies `read()` and says so for a moment. `showsText`: beside the icon. */
export function copyButton(label, read, { showsText = false } = {}) {
  const text = showsText ? make("span", { textContent: "Copy" }) : null;
  const show = (name, title, word) => {
    button.replaceChildren(icon(name), ...(text ? [text] : []));
    if (text) text.textContent = word;
    button.title = title;
    button.setAttribute("aria-label", title);
  };
  const button = make("button", { type: "button", className: "quiet copy" });
  let timer = 0;
  button.onclick = async () => {
    const isCopied = await copyText(read());
    show(
      isCopied ? "check" : "close",
      isCopied ? "Copied" : "The browser refused to copy",
      isCopied ? "Copied" : "Refused",
    );
    clearTimeout(timer);
    timer = setTimeout(show, 1600, "copy", label, "Copy");
  };
  show("copy", label, "Copy");
  return button;
}

/* The clipboard API exists only on HTTPS and localhost; elsewhere the old command still works. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = make("textarea", { value: text, className: "offscreen", readOnly: true });
    const focused = document.activeElement;
    document.body.append(box);
    box.select();
    const isCopied = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return isCopied;
  }
}

/* Makes a text box as high as its text; CSS bounds the height. */
export function fitHeight(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`; // with its border
}

export const formatCount = (count) => count.toLocaleString("en-US");
