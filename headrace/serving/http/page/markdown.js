/* Markdown to DOM nodes: CommonMark's blocks with GitHub's tables and task lists. HTML stays text. `MarkdownView` shows
   a text that grows, and renders its last block alone. */

import { copyButton, make } from "./dom.js";
import { normalizeLabel, renderInline, unescape } from "./inline.js";

const FENCE = /^(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*?)[ \t]*$/,
  HEADING = /^(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/,
  UNDERLINE = /^(?:=+|-+)[ \t]*$/;
const MARKER = /^([-+*]|(\d{1,9})[.)])(?=[ \t]|$)/,
  DELIMITERS = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const DEFINITION =
  /^\[((?:[^[\]\\]|\\.){1,999})\]:\s*(<[^<>\n]*>|\S+)(?:\s*(?<=\s)("[^"]*"|'[^']*'|\([^()]*\)))?[ \t]*(?:\n|$)/;
const MAX_DEPTH = 40; // of lists and quotes in each other
const LAZY = "\u0001"; // before a line that continues a paragraph without its container's prefix: it starts nothing

const isBlank = (line) => !/[^ \t]/.test(line);

/* Columns of white space before a line's text; a tab reaches to the next multiple of four. */
function indentOf(line) {
  let columns = 0;
  for (const char of line) {
    if (char === " ") columns++;
    else if (char === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

/* A line without so many columns of white space at its start. */
function dedent(line, columns) {
  let at = 0,
    column = 0;
  while (column < columns && (line[at] === " " || line[at] === "\t"))
    column += line[at++] === " " ? 1 : 4 - (column % 4);
  return " ".repeat(Math.max(0, column - columns)) + line.slice(at);
}

/* A list item's start: {bullet, number, offset (columns to its text), rest}, or null. */
function readMarker(line) {
  const indent = indentOf(line),
    found = indent < 4 ? MARKER.exec(line.trimStart()) : null;
  if (!found || RULE.test(line.trim())) return null;
  const width = indent + found[1].length,
    after = line.trimStart().slice(found[1].length);
  const tabbed = " ".repeat(width) + after,
    gap = indentOf(tabbed) - width;
  const offset = isBlank(after) || gap > 4 ? width + 1 : width + gap;
  return { bullet: found[1].at(-1), number: found[2], offset, rest: dedent(tabbed, offset) };
}

/* Whether a line ends a paragraph before it. */
function startsBlock(line) {
  const text = line.trim();
  if (indentOf(line) > 3) return false;
  if (FENCE.test(text) || HEADING.test(text) || RULE.test(text) || text.startsWith(">")) return true;
  const marker = readMarker(line);
  return Boolean(marker) && !isBlank(marker.rest) && (marker.number === undefined || Number(marker.number) === 1);
}

/* Whether the last line of a quote or item can be continued by a line without its prefix. */
function isOpenParagraph(lines) {
  let text = lines.at(-1);
  if (indentOf(text) > 3 && isBlank(lines.at(-2) ?? "")) return false; // code
  for (let marker = readMarker(text); marker || text.trim().startsWith(">"); marker = readMarker(text)) {
    text = marker ? marker.rest : text.trimStart().slice(1);
  }
  return !isBlank(text) && !startsBlock(text);
}

const continuesLazily = (inner, line) =>
  !isBlank(line) && !startsBlock(line) && !readMarker(line) && isOpenParagraph(inner);

function splitRow(line) {
  const cells = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(^|[^\\])\|$/, "$1")
    .split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function startsTable(lines, at) {
  const next = lines[at + 1];
  if (
    next === undefined ||
    !lines[at].includes("|") ||
    lines[at].startsWith(LAZY) ||
    !DELIMITERS.test(next.trim()) ||
    indentOf(next) > 3
  )
    return false;
  return /[|:]/.test(next) && splitRow(lines[at]).length === splitRow(next).length;
}

/* Blocks of lines, as {type, line, isApart (a blank line is before it), ...}. */
class BlockParser {
  constructor(lines, references, depth = 0) {
    this.lines = lines;
    this.references = references;
    this.depth = depth;
    this.at = 0;
    this.blocks = [];
  }

  parse() {
    while (this.at < this.lines.length) {
      if (isBlank(this.lines[this.at])) this.at++;
      else this.readBlock();
    }
    return this.blocks;
  }

  add(type, line, fields) {
    this.blocks.push({ type, line, isApart: this.blocks.length > 0 && isBlank(this.lines[line - 1]), ...fields });
  }

  parseInner(lines) {
    if (this.depth >= MAX_DEPTH) return [{ type: "paragraph", text: lines.join("\n").trim() }];
    return new BlockParser(lines, this.references, this.depth + 1).parse();
  }

  readBlock() {
    const line = this.lines[this.at],
      text = line.trim();
    if (indentOf(line) > 3) return this.readIndentedCode();
    const fence = FENCE.exec(text),
      heading = HEADING.exec(text);
    if (fence) return this.readFence(fence, indentOf(line));
    if (heading) return this.add("heading", this.at++, { level: heading[1].length, text: heading[2] ?? "" });
    if (RULE.test(text)) return this.add("rule", this.at++);
    if (text.startsWith(">")) return this.readQuote();
    if (readMarker(line)) return this.readList();
    if (startsTable(this.lines, this.at)) return this.readTable();
    return this.readParagraph();
  }

  readIndentedCode() {
    const start = this.at,
      code = [];
    for (; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (!isBlank(line) && indentOf(line) < 4) break;
      code.push(dedent(line, 4));
    }
    while (isBlank(code.at(-1))) code.pop();
    this.add("code", start, { text: code.join("\n"), info: "" });
  }

  readFence([, mark, info], indent) {
    const start = this.at++,
      code = [],
      close = new RegExp(`^${mark[0]}{${mark.length},}$`);
    for (; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (indentOf(line) < 4 && close.test(line.trim())) break;
      code.push(dedent(line, indent));
    }
    this.at++;
    this.add("code", start, { text: code.join("\n"), info: unescape(info) });
  }

  readQuote() {
    const start = this.at,
      inner = [];
    let fence = null;
    for (; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at],
        text = line.trimStart();
      if (text.startsWith(">") && indentOf(line) < 4) {
        inner.push(dedent(text.slice(1).replace(/^\t/, "   "), 1));
        const mark = FENCE.exec(inner.at(-1).trim());
        if (mark && (!fence || (mark[1].startsWith(fence) && !mark[2]))) fence = fence ? null : mark[1];
      } else if (!fence && continuesLazily(inner, line)) inner.push(LAZY + text);
      else break;
    }
    this.add("quote", start, { blocks: this.parseInner(inner) });
  }

  readList() {
    const start = this.at,
      first = readMarker(this.lines[start]),
      items = [];
    let isLoose = false;
    for (;;) {
      while (this.at < this.lines.length && isBlank(this.lines[this.at])) this.at++;
      const marker = this.at < this.lines.length ? readMarker(this.lines[this.at]) : null;
      if (!marker || marker.bullet !== first.bullet) break;
      if (items.length && isBlank(this.lines[this.at - 1])) isLoose = true;
      const blocks = this.parseInner(this.readItem(marker));
      if (blocks.some((block) => block.isApart)) isLoose = true;
      items.push(blocks);
    }
    this.add("list", start, { number: first.number, items, isLoose });
  }

  /* The lines of one item, without its indentation; `at` ends at the next line that is neither blank nor part of it. */
  readItem(marker) {
    const inner = [marker.rest];
    let fence = FENCE.exec(marker.rest.trim())?.[1] ?? null;
    for (this.at++; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (isBlank(line)) {
        if (inner.length === 1 && isBlank(marker.rest)) break; // an item may not begin with two blank lines
        inner.push("");
        continue;
      }
      if (indentOf(line) >= marker.offset) {
        inner.push(dedent(line, marker.offset));
        const mark = FENCE.exec(inner.at(-1).trim());
        if (mark && (!fence || (mark[1].startsWith(fence) && !mark[2]))) fence = fence ? null : mark[1];
      } else if (!fence && continuesLazily(inner, line)) inner.push(LAZY + line.trimStart());
      else break;
    }
    while (inner.length > 1 && isBlank(inner.at(-1))) inner.pop();
    return inner;
  }

  readTable() {
    const start = this.at,
      head = splitRow(this.lines[start]),
      rows = [];
    const aligns = splitRow(this.lines[start + 1]).map((cell) => {
      if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
      return cell.startsWith(":") ? "left" : "";
    });
    for (this.at += 2; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (isBlank(line) || indentOf(line) > 3 || startsBlock(line)) break;
      rows.push(head.map((_, column, __, cells = splitRow(line)) => cells[column] ?? ""));
    }
    this.add("table", start, { head, aligns, rows });
  }

  readParagraph() {
    const start = this.at,
      text = [this.lines[this.at++].trimStart()];
    for (; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (indentOf(line) < 4 && UNDERLINE.test(line.trim())) {
        const body = this.takeDefinitions(text.join("\n"));
        if (!body) break;
        this.at++;
        return this.add("heading", start, { level: line.trim().startsWith("=") ? 1 : 2, text: body.trim() });
      }
      if (isBlank(line) || startsBlock(line) || startsTable(this.lines, this.at)) break;
      text.push(line.replace(/^[ \t\u0001]+/, ""));
    }
    const body = this.takeDefinitions(text.join("\n"));
    if (body.trim()) this.add("paragraph", start, { text: body.trim() });
  }

  /* The text after its definitions of link references, which are remembered; the first of a name counts. */
  takeDefinitions(text) {
    for (let found = DEFINITION.exec(text); found && found[1].trim(); found = DEFINITION.exec(text)) {
      const name = normalizeLabel(found[1]),
        address = found[2].startsWith("<") ? found[2].slice(1, -1) : found[2];
      if (!this.references.has(name)) this.references.set(name, unescape(address));
      text = text.slice(found[0].length);
    }
    return text;
  }
}

function renderCode(block) {
  const language = block.info.split(/\s/)[0],
    code = make("code", { textContent: block.text });
  if (language) code.dataset.language = language;
  return make(
    "div",
    { className: "code" },
    make(
      "div",
      { className: "code-head" },
      make("span", { textContent: language || "text" }),
      copyButton("Copy code", () => block.text, { showsText: true }),
    ),
    make("pre", { tabIndex: 0 }, code),
  );
}

function renderTable(block, references) {
  const row = (tag, cells) =>
    make(
      "tr",
      {},
      ...cells.map((cell, column) =>
        make(
          tag,
          { className: block.aligns[column] && `align-${block.aligns[column]}` },
          ...renderInline(cell, references),
        ),
      ),
    );
  const table = make("table", {}, make("thead", {}, row("th", block.head)));
  if (block.rows.length) table.append(make("tbody", {}, ...block.rows.map((cells) => row("td", cells))));
  return make("div", { className: "table", tabIndex: 0 }, table);
}

function renderItem(blocks, isLoose, references) {
  const item = make("li"),
    task = blocks[0]?.type === "paragraph" ? /^\[([ xX])\][ \t]+(?=\S)/.exec(blocks[0].text) : null;
  if (task) {
    blocks[0].text = blocks[0].text.slice(task[0].length);
    item.className = "task";
    item.append(make("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }));
  }
  for (const block of blocks) {
    if (block.type === "paragraph" && !isLoose) item.append(...renderInline(block.text, references));
    else item.append(renderBlock(block, references));
  }
  return item;
}

function renderBlock(block, references) {
  switch (block.type) {
    case "heading":
      return make(`h${block.level}`, {}, ...renderInline(block.text, references));
    case "rule":
      return make("hr");
    case "code":
      return renderCode(block);
    case "quote":
      return make("blockquote", {}, ...block.blocks.map((inner) => renderBlock(inner, references)));
    case "table":
      return renderTable(block, references);
    case "list": {
      const list = make(block.number === undefined ? "ul" : "ol");
      if (block.number !== undefined && Number(block.number) !== 1) list.start = Number(block.number);
      list.append(...block.items.map((item) => renderItem(item, block.isLoose, references)));
      return list;
    }
    default:
      return make("p", {}, ...renderInline(block.text, references));
  }
}

/* A text in a node that is rendered again as the text grows. A block is final once a line of another is whole, so only
   the last ones are replaced; what is selected or scrolled above them stays. */
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.reset();
  }

  reset() {
    this.references = new Map();
    this.offset = 0; // characters of final blocks
    this.numFinal = 0; // their nodes
  }

  /* Shows `text`, which begins as it did before. `isWhole`: nothing follows, so all definitions of links are known. */
  update(text, { isWhole = false } = {}) {
    const plain = text.replace(/\r\n?/g, "\n").replace(/[\0\u0001]/g, "\ufffd");
    const numKnown = isWhole ? this.countDefinitions(plain) : 0;
    if (numKnown) this.offset = this.numFinal = 0;
    const lines = plain.slice(this.offset).split("\n"),
      blocks = new BlockParser(lines, this.references).parse();
    while (this.node.childNodes.length > this.numFinal) this.node.lastChild.remove();
    this.node.append(...blocks.map((block) => renderBlock(block, this.references)));
    // The last line may still become another kind of block, or part of the one before it.
    const last = blocks.findLastIndex((block) => block.line < lines.length - 1);
    if (last < 1) return;
    this.numFinal += last;
    for (let line = 0; line < blocks[last].line; line++) this.offset += lines[line].length + 1;
  }

  countDefinitions(plain) {
    this.references.clear(); // of lines that were not whole yet
    new BlockParser(plain.split("\n"), this.references).parse();
    return this.references.size;
  }
}

export function renderMarkdown(text) {
  const node = make("div");
  new MarkdownView(node).update(text, { isWhole: true });
  return node;
}
