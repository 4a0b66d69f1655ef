/* Inline Markdown to DOM nodes: code, emphasis, strikethrough, links, line breaks, escapes. CommonMark's rules
   (sections 6.1 to 6.9 and its delimiter algorithm) with GitHub's strikethrough and bare addresses. HTML stays text. */

import { make } from "./dom.js";

const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u,
  ESCAPABLE = /[!-/:-@[-`{-~]/;
const BARE = /(?:https?:\/\/|www\.)[^\s<>`*"“”[\]]+/iy,
  ANGLE = /<([a-z][a-z0-9+.-]{1,31}:[^\s<>]*|[\w.+-]+@[\w-]+(?:\.[\w-]+)+)>/iy;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/iy,
  BREAK = /<br ?\/?>/iy;
const PLAIN = /[^\\`*_~![\]<&\nhHwW]+/y;
const NAMED = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "©",
  reg: "®",
  trade: "™",
  hellip: "…",
  ndash: "–",
  mdash: "—",
  lsquo: "‘",
  rsquo: "’",
  ldquo: "“",
  rdquo: "”",
  bull: "•",
  middot: "·",
  times: "×",
  divide: "÷",
  deg: "°",
  plusmn: "±",
  le: "≤",
  ge: "≥",
  ne: "≠",
  larr: "←",
  rarr: "→",
  uarr: "↑",
  darr: "↓",
  euro: "€",
  pound: "£",
  sect: "§",
};

/* The address of a link that may be followed, or null. Others' pages and mail alone: no scripts, no data, and none of
   this server's own routes, which a click would reach with the user's rights. */
export function safeAddress(address) {
  try {
    const url = new URL(address);
    if (url.protocol === "mailto:") return url.href;
    return ["http:", "https:"].includes(url.protocol) && url.host !== location.host ? url.href : null;
  } catch {
    return null; // relative
  }
}

export function makeLink(address, ...children) {
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/* How definitions of link references are found again. */
export const normalizeLabel = (label) => label.trim().replace(/\s+/g, " ").toLowerCase();

function readEntity(found) {
  if (found[3]) return Object.hasOwn(NAMED, found[3]) ? NAMED[found[3]] : null;
  const code = found[1] ? parseInt(found[1], 10) : parseInt(found[2], 16);
  return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
}

/* Text without its escapes and entities, as in addresses, titles and info strings. */
export function unescape(text) {
  return text.replace(/\\([!-/:-@[-`{-~])|&(?:#\d{1,7}|#x[\da-f]{1,6}|\w{2,8});/gi, (whole, escaped) => {
    if (escaped) return escaped;
    ENTITY.lastIndex = 0;
    return readEntity(ENTITY.exec(whole)) ?? whole;
  });
}

/* Reads `(address "title")` at `start`; returns {address, end}, or null. */
function readTarget(text, start) {
  let at = start + 1;
  const skip = () => {
    while (/[ \t\n]/.test(text[at] ?? "")) at++;
  };
  skip();
  const begin = at;
  let address;
  if (text[at] === "<") {
    const found = /<((?:[^<>\n\\]|\\.)*)>/y;
    found.lastIndex = at;
    const match = found.exec(text);
    if (!match) return null;
    address = match[1];
    at += match[0].length;
  } else {
    for (let depth = 0; at < text.length && !/[\s\x00-\x1f]/.test(text[at]); at++) {
      if (text[at] === "\\" && ESCAPABLE.test(text[at + 1] ?? "")) at++;
      else if (text[at] === "(" && ++depth > 32) return null;
      else if (text[at] === ")" && --depth < 0) break;
    }
    address = text.slice(begin, at);
  }
  const afterAddress = at;
  skip();
  if (at > afterAddress && /["'(]/.test(text[at] ?? "")) {
    const title = /"(?:[^"\\]|\\[^])*"|'(?:[^'\\]|\\[^])*'|\((?:[^()\\]|\\[^])*\)/y;
    title.lastIndex = at;
    const match = title.exec(text);
    if (!match) return null;
    at += match[0].length;
    skip();
  }
  return text[at] === ")" ? { address: unescape(address), end: at + 1 } : null;
}

/* Wraps what delimiters enclose: CommonMark's "process emphasis". Items are nodes or delimiters; all become nodes. */
function processEmphasis(items) {
  const done = [],
    bottoms = new Map(); // by kind of closer: below this place in `done` nothing opens it
  for (const item of items) {
    const kind = item.mark && item.canClose ? `${item.mark}${item.canOpen}${item.length % 3}` : null;
    while (kind && item.count) {
      let open = done.length - 1;
      const bottom = bottoms.get(kind) ?? 0;
      while (open >= bottom && !isPair(done[open], item)) open--;
      if (open < bottom) {
        bottoms.set(kind, done.length);
        break;
      }
      const opener = done[open],
        used = opener.count > 1 && item.count > 1 ? 2 : 1;
      const tag = item.mark === "~" ? "del" : used === 2 ? "strong" : "em";
      const wrapped = make(tag, {}, ...done.splice(open + 1).map(toNode));
      opener.count -= used;
      item.count -= used;
      if (!opener.count) done.pop();
      for (const [each, limit] of bottoms) if (limit > done.length) bottoms.set(each, done.length);
      done.push(wrapped);
    }
    if (!item.mark || item.count) done.push(item);
  }
  return done.map(toNode);
}

function isPair(opener, closer) {
  if (opener.mark !== closer.mark || !opener.canOpen) return false;
  const isEither = opener.canClose || closer.canOpen;
  return !(isEither && (opener.length + closer.length) % 3 === 0 && (opener.length % 3 || closer.length % 3));
}

const toNode = (item) => (item.mark ? document.createTextNode(item.mark.repeat(item.count)) : item);

/* One pass over a paragraph's text. `references` maps normalized labels to addresses. */
class InlineParser {
  constructor(text, references) {
    this.text = text;
    this.references = references;
    this.at = 0;
    this.items = [];
    this.openers = []; // of links: places in `items`
    this.unmatched = new Set(); // lengths of runs of backticks that nothing closes
  }

  parse() {
    while (this.at < this.text.length) this.step();
    return processEmphasis(this.items);
  }

  add(text) {
    const last = this.items.at(-1);
    if (last?.nodeType === Node.TEXT_NODE && !last.isBracket) last.data += text;
    else this.items.push(document.createTextNode(text));
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at += found[0].length;
    return found;
  }

  step() {
    const plain = this.match(PLAIN);
    if (plain) return this.add(plain[0]);
    const mark = this.text[this.at];
    if (mark === "\\") return this.readEscape();
    if (mark === "`") return this.readCode();
    if (mark === "*" || mark === "_" || mark === "~") return this.readDelimiter(mark);
    if (mark === "!" && this.text[this.at + 1] === "[") return this.openLink("![");
    if (mark === "[") return this.openLink("[");
    if (mark === "]") return this.closeLink();
    if (mark === "<") return this.readAngle();
    if (mark === "\n") return this.readLineEnd();
    if (mark === "&") {
      const start = this.at,
        found = this.match(ENTITY);
      this.at = found ? this.at : start + 1;
      return this.add((found && readEntity(found)) ?? (found ? found[0] : "&"));
    }
    return this.readBare();
  }

  readEscape() {
    const next = this.text[this.at + 1] ?? "";
    this.at += 1;
    if (next === "\n") {
      this.at += 1;
      this.items.push(make("br"));
    } else if (next && ESCAPABLE.test(next)) {
      this.at += 1;
      this.add(next);
    } else this.add("\\");
  }

  readLineEnd() {
    const last = this.items.at(-1);
    const isHard = last?.nodeType === Node.TEXT_NODE && / {2,}$/.test(last.data);
    if (last?.nodeType === Node.TEXT_NODE) last.data = last.data.replace(/ +$/, "");
    this.at += 1;
    while (this.text[this.at] === " ") this.at++;
    if (isHard) this.items.push(make("br"));
    else this.add("\n");
  }

  readCode() {
    const run = /`+/y;
    const ticks = this.match(run)[0];
    if (!this.unmatched.has(ticks.length)) {
      const close = /`+/g;
      close.lastIndex = this.at;
      for (let found = close.exec(this.text); found; found = close.exec(this.text)) {
        if (found[0].length !== ticks.length) continue;
        let code = this.text.slice(this.at, found.index).replace(/\n/g, " ");
        if (/^ .* $/.test(code) && code.trim()) code = code.slice(1, -1);
        this.items.push(make("code", { textContent: code }));
        this.at = close.lastIndex;
        return;
      }
      this.unmatched.add(ticks.length);
    }
    this.add(ticks);
  }

  readDelimiter(mark) {
    const start = this.at;
    while (this.text[this.at] === mark) this.at++;
    const count = this.at - start;
    const before = start ? [...this.text.slice(Math.max(0, start - 2), start)].at(-1) : "\n";
    const after = this.at < this.text.length ? String.fromCodePoint(this.text.codePointAt(this.at)) : "\n";
    const spaceBefore = /\s/.test(before),
      spaceAfter = /\s/.test(after);
    const markBefore = PUNCTUATION.test(before),
      markAfter = PUNCTUATION.test(after);
    const isLeft = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const isRight = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const isWord = mark === "_"; // never inside of words
    const canOpen = isLeft && (!isWord || !isRight || markBefore),
      canClose = isRight && (!isWord || !isLeft || markAfter);
    if (mark === "~" && count !== 2)
      this.add("~".repeat(count)); // one is "about", in "~5" or "5~10"
    else this.items.push({ mark, count, length: count, canOpen, canClose });
  }

  openLink(source) {
    const node = document.createTextNode(source);
    node.isBracket = true;
    this.openers.push({
      place: this.items.length,
      start: this.at + source.length,
      isImage: source === "![",
      isActive: true,
    });
    this.items.push(node);
    this.at += source.length;
  }

  closeLink() {
    const opener = this.openers.pop();
    this.at += 1;
    if (!opener?.isActive) return this.add("]");
    const target = this.readDestination(opener);
    const address = target && safeAddress(target.address);
    if (!address) return this.add("]");
    this.at = target.end;
    const inner = processEmphasis(this.items.splice(opener.place + 1));
    this.items.pop();
    const link = makeLink(address, ...inner);
    for (const nested of link.querySelectorAll("a")) nested.replaceWith(...nested.childNodes);
    // Not loaded as an image: that would tell its server who reads, and what a model was made to write into the address.
    if (opener.isImage) link.textContent = link.textContent || "image";
    this.items.push(link);
    if (!opener.isImage) for (const outer of this.openers) outer.isActive &&= outer.isImage; // no links in links
  }

  readDestination(opener) {
    if (this.text[this.at] === "(") {
      const target = readTarget(this.text, this.at);
      if (target) return target;
    }
    const label = /\[((?:[^[\]\\]|\\.){0,999})\]/y;
    label.lastIndex = this.at;
    const found = label.exec(this.text);
    const shown = this.at - opener.start < 1000 ? this.text.slice(opener.start, this.at - 1) : "";
    const address = this.references.get(normalizeLabel(found?.[1] || shown));
    return address === undefined ? null : { address, end: this.at + (found?.[0].length ?? 0) };
  }

  readAngle() {
    if (this.match(BREAK)) return this.items.push(make("br")); // the one tag that models write into tables
    const found = this.match(ANGLE);
    const address = found && safeAddress(found[1].includes(":") ? found[1] : `mailto:${found[1]}`);
    if (address) return this.items.push(makeLink(address, found[1]));
    if (!found) this.at += 1;
    return this.add(found ? found[0] : "<");
  }

  readBare() {
    const start = this.at,
      isInWord = /[\p{L}\p{N}_]/u.test(this.text[start - 1] ?? "");
    const shown = trimAddress((!isInWord && this.match(BARE)?.[0]) || "");
    const address = /[./]\w/.test(shown) ? safeAddress(/^www/i.test(shown) ? `https://${shown}` : shown) : null;
    this.at = start + (address ? shown.length : 1);
    if (address) this.items.push(makeLink(address, shown));
    else this.add(this.text[start]);
  }
}

/* A bare address without what follows it: closing parentheses that it did not open, and punctuation at its end. */
function trimAddress(address) {
  let depth = 0;
  const end = [...address].findIndex((char) => (depth += char === "(" ? 1 : char === ")" ? -1 : 0) < 0);
  const inside = end < 0 ? address : [...address].slice(0, end).join("");
  return inside.replace(/(?:[?!.,:;_~']|&\w+;)+$/, "");
}

export function renderInline(text, references) {
  return new InlineParser(text, references).parse();
}
