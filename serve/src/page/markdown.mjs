// Markdown of a model's answer: text to blocks (plain data), and blocks to nodes of a document.
//
// Nothing here makes markup of a model's text: elements have names from this file, text goes in as text, and an address becomes a
// link only if its scheme is one of three. HTML in an answer is shown as it is written; pictures become links, since the page loads nothing from elsewhere.
// Every pass is linear in the text and nesting is bounded, so no answer can hang the page. Half an answer is parsed like a whole one: an open fence is code to the end.
// Two departures from CommonMark suit chats: a line break is kept, and a line of dashes below a paragraph is a rule, not a heading.

/// Quotes and lists within each other, emphasis within emphasis: what is deeper stays text.
const MOST_DEPTH = 12;
const MOST_EMPHASIS = 16;
const SCHEMES = ["http:", "https:", "mailto:"];

/// The blocks of a text: `{ kind, … }`, each with the lines it came from in `raw`.
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\0/g, "\ufffd").split("\n"), 0);
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const isBlank = (line) => line.trim() === "";
const isRule = (line) => /^ {0,3}[-*_]/.test(line) && /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/[ \t]/g, ""));
const indentOf = (line) => line.length - line.trimStart().length;

function fenceOf(line) {
  const found = FENCE.exec(line);
  return found && !(found[1][0] === "`" && found[2].includes("`")) ? found : null;
}

/// Whether a line starts a block of its own where a paragraph could go on.
function interrupts(line) {
  const item = ITEM.exec(line);
  const starts = item && item[1].length < 4 && !isBlank(line.slice(item[0].length)) && (/^\D/.test(item[2]) || parseInt(item[2], 10) === 1);
  return Boolean(starts) || fenceOf(line) !== null || HEADING.test(line) || QUOTE.test(line) || isRule(line);
}

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at += 1; continue; }
    const [block, next] = blockAt(lines, at, depth);
    block.raw = lines.slice(at, next).join("\n");
    found.push(block);
    at = next;
  }
  return found;
}

/// The block that starts at a line, and the line after it.
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, content: inline((heading[2] ?? "").replace(/(?:^|[ \t]+)#+[ \t]*$/, "")) }, at + 1];
  if (isRule(line)) return [{ kind: "rule" }, at + 1];
  if (depth < MOST_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MOST_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !interrupts(lines[next]) && !isTable(lines, next)) next += 1;
  return [{ kind: "paragraph", content: inline(lines.slice(at, next).map((one) => one.trim()).join("\n")) }, next];
}

function code(lines, at, [, fence, info]) {
  const indent = indentOf(lines[at]);
  const closes = (line) => indentOf(line) < 4 && line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);
  let next = at + 1;
  while (next < lines.length && !closes(lines[next])) next += 1;
  const text = lines.slice(at + 1, next).map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  return [{ kind: "code", language: info.trim().split(/\s/)[0].slice(0, 40), text }, Math.min(next + 1, lines.length)];
}

function quote(lines, at, depth) {
  const inner = [];
  let next = at;
  // A paragraph may go on without its mark.
  for (; next < lines.length; next += 1) {
    const isMarked = QUOTE.test(lines[next]);
    if (!isMarked && (isBlank(lines[next]) || isBlank(inner.at(-1)) || interrupts(lines[next]))) break;
    inner.push(isMarked ? lines[next].replace(QUOTE, "") : lines[next]);
  }
  return [{ kind: "quote", blocks: blocks(inner, depth + 1) }, next];
}

function list(lines, at, depth) {
  const [, indent, first] = ITEM.exec(lines[at]);
  const kindOf = (mark) => (/\d/.test(mark) ? mark.at(-1) : mark);
  const items = [];
  let next = at, isLoose = false;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || isRule(lines[next]) || kindOf(item[2]) !== kindOf(first) || Math.abs(item[1].length - indent.length) > 1) break;
    // Five spaces and more are part of what the item says.
    const column = item[1].length + item[2].length + (item[3].length > 4 ? 1 : Math.max(item[3].length, 1));
    const inner = [lines[next].slice(column)];
    // Models indent by two below any mark.
    const least = Math.min(column, item[1].length + 2);
    next += 1;
    let blank = 0;
    for (; next < lines.length; next += 1) {
      const line = lines[next];
      if (isBlank(line)) { blank += 1; continue; }
      const belongs = indentOf(line) >= least || (blank === 0 && !isBlank(inner.at(-1)) && !interrupts(line) && !ITEM.test(line));
      if (!belongs) break;
      for (; blank > 0; blank -= 1) { inner.push(""); isLoose = true; }
      inner.push(line.slice(Math.min(column, indentOf(line))));
    }
    const content = blocks(inner, depth + 1);
    items.push({ blocks: content, done: taskOf(content) });
    // Blank lines between two items, not those after the last.
    const goesOn = next < lines.length && ITEM.exec(lines[next]);
    if (blank > 0 && goesOn && kindOf(goesOn[2]) === kindOf(first)) isLoose = true;
    if (blank > 0 && !goesOn) { next -= blank; break; }
  }
  const isOrdered = /\d/.test(first);
  return [{ kind: "list", start: isOrdered ? parseInt(first, 10) : null, isLoose, items }, next];
}

/// `[x] done`: whether a task is done, which is taken off its text; null of what is no task.
function taskOf([first]) {
  const text = first?.kind === "paragraph" && typeof first.content[0] === "string" ? first.content[0] : "";
  const mark = /^\[([ xX])\] /.exec(text);
  if (!mark) return null;
  first.content[0] = text.slice(mark[0].length);
  return mark[1] !== " ";
}

/// The cells of a table's row; a `\|` is a bar within one.
function cells(line) {
  const found = [""];
  const row = line.trim();
  for (let at = row[0] === "|" ? 1 : 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") { found[found.length - 1] += "|"; at += 1; }
    else if (row[at] === "|") { if (at + 1 < row.length) found.push(""); }
    else found[found.length - 1] += row[at];
  }
  return found.map((cell) => cell.trim());
}

function isTable(lines, at) {
  const [head, below] = [lines[at], lines[at + 1]];
  if (below === undefined || !head.includes("|") || !below.includes("-") || !/^[ |:-]+$/.test(below)) return false;
  const marks = cells(below);
  return marks.every((mark) => /^:?-+:?$/.test(mark)) && marks.length === cells(head).length;
}

function table(lines, at) {
  const align = cells(lines[at + 1]).map((mark) => (mark.at(-1) !== ":" ? "" : mark[0] === ":" ? "centre" : "right"));
  const row = (line) => cells(line).slice(0, align.length).map(inline);
  let next = at + 2;
  while (next < lines.length && !isBlank(lines[next]) && !interrupts(lines[next])) next += 1;
  return [{ kind: "table", align, head: row(lines[at]), rows: lines.slice(at + 2, next).map(row) }, next];
}

/// An address that may be a link; null of any other, however it is spelt.
export function safeAddress(text) {
  try {
    const address = new URL(text);
    return SCHEMES.includes(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

/// A line of text: strings, and `{ kind, content }`.
export function inline(text) {
  const tokens = tokenize(text);
  return assemble(tokens, 0, tokens.length, pairs(tokens), false);
}

const TARGET = /\(\s*(?:<([^<>\n]{0,2000})>|([^\s<>()]{0,2000}(?:\([^\s()]{0,2000}\)[^\s<>()]{0,2000}){0,8}))(?:\s+(?:"[^"]{0,500}"|'[^']{0,500}'))?\s*\)/y;
const BETWEEN_ANGLES = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BARE = /https?:\/\/[^\s<>"`]{1,2000}/y;
const BREAK = /<br *\/?>/iy;
const IDEOGRAPH = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u;
const isSpace = (character) => character === "" || /\s/.test(character);
// Between ideographs there are no spaces that could say where emphasis ends, so they count like punctuation.
const isPunctuation = (character) => /[\p{P}\p{S}]/u.test(character) || IDEOGRAPH.test(character);

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function tokenize(text) {
  const tokens = [];
  const fences = codeSpans(text);
  let plain = "";
  const push = (token) => {
    if (plain) tokens.push({ kind: "text", text: plain });
    plain = "";
    tokens.push(token);
  };
  for (let at = 0; at < text.length;) {
    const character = text[at];
    let found;
    if (character === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; }
    else if (character === "\\" && text[at + 1] === "\n") at += 1;
    else if (character === "\n") { push({ kind: "break" }); at += 1; }
    else if (character === "`") {
      const span = fences.get(at);
      if (span?.text !== undefined) push({ kind: "code", text: span.text });
      else plain += text.slice(at, span.end);
      at = span.end;
    } else if (character === "<" && (found = matchAt(BREAK, text, at))) { push({ kind: "break" }); at += found[0].length; }
    else if (character === "<" && (found = matchAt(BETWEEN_ANGLES, text, at)) && safeAddress(found[1])) {
      push({ kind: "address", href: safeAddress(found[1]), text: found[1] });
      at += found[0].length;
    } else if (character === "h" && !/\w/.test(text[at - 1] ?? "") && (found = matchAt(BARE, text, at)) && safeAddress(bare(found[0]))) {
      const address = bare(found[0]);
      push({ kind: "address", href: safeAddress(address), text: address });
      at += address.length;
    } else if (character === "*" || character === "_" || character === "~") {
      let end = at + 1;
      while (text[end] === character) end += 1;
      const run = delimiters(text, at, end);
      if (run) push(run);
      else plain += text.slice(at, end);
      at = end;
    } else if (character === "[" || (character === "!" && text[at + 1] === "[")) {
      const raw = character === "[" ? "[" : "![";
      push({ kind: "opens", raw });
      at += raw.length;
    } else if (character === "]") {
      found = text[at + 1] === "(" ? matchAt(TARGET, text, at + 1) : null;
      const raw = "]" + (found?.[0] ?? "");
      push({ kind: "closes", raw, href: found && safeAddress(found[1] ?? found[2]) });
      at += raw.length;
    } else { plain += character; at += 1; }
  }
  if (plain) tokens.push({ kind: "text", text: plain });
  return tokens;
}

/// For each run of backticks where it ends, and the text of the code it opens if a run of its length closes it.
function codeSpans(text) {
  const runs = [...text.matchAll(/`+/g)].map((run) => ({ at: run.index, length: run[0].length }));
  const later = new Map(), spans = new Map();
  for (const run of [...runs].reverse()) {
    const end = run.at + run.length, closing = later.get(run.length);
    later.set(run.length, run.at);
    if (closing === undefined) { spans.set(run.at, { end }); continue; }
    const inner = text.slice(end, closing).replaceAll("\n", " ");
    const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    spans.set(run.at, { end: closing + run.length, text: isPadded ? inner.slice(1, -1) : inner });
  }
  return spans;
}

/// An address in running text, without the punctuation that ends its sentence.
function bare(address) {
  let end = address.length;
  const count = (character) => address.slice(0, end).split(character).length - 1;
  while (end > 0 && (/[.,:;!?'*_~\]]/.test(address[end - 1]) || (address[end - 1] === ")" && count(")") > count("(")))) end -= 1;
  return address.slice(0, end);
}

/// A run that may open or close emphasis, by CommonMark's rules; null of one that does neither.
function delimiters(text, at, end) {
  const character = text[at], length = end - at;
  if (length > 3 || (character === "~" && length !== 2)) return null;
  const before = [...text.slice(Math.max(at - 2, 0), at)].at(-1) ?? "", after = String.fromCodePoint(...(end < text.length ? [text.codePointAt(end)] : []));
  const isLeft = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
  const isRight = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
  const opens = isLeft && (character !== "_" || !isRight || isPunctuation(before));
  const closes = isRight && (character !== "_" || !isLeft || isPunctuation(after));
  return opens || closes ? { kind: "run", character, length, opens, closes } : null;
}

/// Which bracket that opens belongs to which that closes with an address.
function pairs(tokens) {
  const open = [], found = new Map();
  tokens.forEach((token, at) => {
    if (token.kind === "opens") open.push(at);
    if (token.kind !== "closes" || !open.length) return;
    const start = open.pop();
    if (token.href) found.set(start, at);
  });
  return found;
}

/// Emphasis that may still close is a frame on a stack; a frame that never does becomes text.
function assemble(tokens, from, to, links, isInLink) {
  const frames = [{ content: [] }];
  const add = (node) => {
    const content = frames.at(-1).content;
    if (typeof node === "string" && typeof content.at(-1) === "string") content[content.length - 1] += node;
    else if (node !== "") content.push(node);
  };
  const drop = () => {
    const frame = frames.pop();
    add(frame.character.repeat(frame.left));
    frame.content.forEach(add);
  };
  for (let at = from; at < to; at += 1) {
    const token = tokens[at];
    if (token.kind === "text") add(token.text);
    else if (token.kind === "break") add({ kind: "break" });
    else if (token.kind === "code") add({ kind: "code", text: token.text });
    else if (token.kind === "address") add(isInLink ? token.text : { kind: "link", href: token.href, content: [token.text] });
    else if (token.kind === "closes") add(token.raw);
    else if (token.kind === "opens") {
      const end = isInLink ? undefined : links.get(at);
      if (end === undefined || end >= to) { add(token.raw); continue; }
      const content = assemble(tokens, at + 1, end, links, true);
      add({ kind: "link", href: tokens[end].href, content: content.length ? content : [tokens[end].href] });
      at = end;
    } else emphasise(token, frames, add, drop);
  }
  while (frames.length > 1) drop();
  return frames[0].content;
}

function emphasise(run, frames, add, drop) {
  let left = run.length;
  const isBoth = run.opens && run.closes;
  // Runs of three lengths could pair in two ways; CommonMark's rule of three says in which.
  const matches = (frame) => frame.character === run.character && !((isBoth || frame.isBoth) && (frame.length + run.length) % 3 === 0 && (frame.length % 3 || run.length % 3));
  while (run.closes && left > 0) {
    let opener = frames.length - 1;
    while (opener > 0 && !matches(frames[opener])) opener -= 1;
    if (opener === 0) break;
    while (frames.length - 1 > opener) drop();
    const frame = frames[opener], used = Math.min(left, frame.left, 2);
    const node = { kind: run.character === "~" ? "struck" : used === 2 ? "strong" : "emphasis", content: frame.content };
    frame.left -= used;
    left -= used;
    if (frame.left === 0) { frames.pop(); add(node); }
    else frame.content = [node];
  }
  if (left === 0) return;
  if (run.opens && frames.length <= MOST_EMPHASIS) frames.push({ character: run.character, length: run.length, left, isBoth, content: [] });
  else add(run.character.repeat(left));
}

const TAGS = { strong: "strong", emphasis: "em", struck: "s", code: "code" };

const make = (name, className, ...children) => {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
};

function inlineNodes(content) {
  return content.map((node) => {
    if (typeof node === "string") return document.createTextNode(node);
    if (node.kind === "break") return make("br");
    if (node.kind === "code") return make("code", "", node.text);
    if (node.kind !== "link") return make(TAGS[node.kind], "", ...inlineNodes(node.content));
    const link = make("a", "", ...inlineNodes(node.content));
    // The title shows where a link leads, whatever its text says.
    Object.assign(link, { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer nofollow" });
    return link;
  });
}

function blockNode(block) {
  if (block.kind === "paragraph") return make("p", "", ...inlineNodes(block.content));
  // The page has headings of its own above these.
  if (block.kind === "heading") return make("h" + Math.min(block.level + 2, 6), "level" + block.level, ...inlineNodes(block.content));
  if (block.kind === "rule") return make("hr");
  if (block.kind === "quote") return make("blockquote", "", ...block.blocks.map(blockNode));
  if (block.kind === "code") return codeNode(block);
  if (block.kind === "table") return tableNode(block);
  const list = make(block.start === null ? "ul" : "ol", "", ...block.items.map((item) => itemNode(item, block.isLoose)));
  if (block.start !== null) list.start = block.start;
  return list;
}

function itemNode({ blocks: content, done }, isLoose) {
  const item = make("li");
  if (done !== null) item.append(make("span", "task", done ? "☑ " : "☐ "));
  for (const block of content) item.append(...(block.kind === "paragraph" && !isLoose ? inlineNodes(block.content) : [blockNode(block)]));
  return item;
}

function codeNode(block) {
  const copy = make("button", "copy", "Copy");
  copy.type = "button";
  const text = make("pre", "", make("code", "", block.text));
  // Keys can scroll it.
  text.tabIndex = 0;
  return make("div", "code", make("div", "bar", make("span", "language", block.language), copy), text);
}

function tableNode({ align, head, rows }) {
  const row = (name, cellsOf) => make("tr", "", ...cellsOf.map((cell, at) => make(name, align[at], ...inlineNodes(cell))));
  const scroll = make("div", "scroll", make("table", "", make("thead", "", row("th", head)), make("tbody", "", ...rows.map((cellsOf) => row("td", cellsOf)))));
  scroll.tabIndex = 0;
  return scroll;
}

/// Shows a text that grows. Blocks that have not changed keep their nodes, so that what a reader has selected stays selected.
export class Shown {
  constructor(container) {
    this.container = container;
    this.blocks = [];
  }

  set(text) {
    const next = parse(text);
    let same = 0;
    while (same < next.length && this.blocks[same]?.raw === next[same].raw) same += 1;
    const [old, fresh] = [this.blocks[same], next[same]];
    if (old?.kind === "code" && fresh?.kind === "code") {
      const node = this.container.children[same];
      node.querySelector("code").textContent = fresh.text;
      node.querySelector(".language").textContent = fresh.language;
      same += 1;
    }
    while (this.container.children.length > same) this.container.lastElementChild.remove();
    this.container.append(...next.slice(same).map(blockNode));
    this.blocks = next;
  }
}
