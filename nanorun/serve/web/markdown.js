// A subset of Markdown as DOM nodes: code fences, headings, lists, quotes, rules, bold, italics, inline code.
// Everything else, including HTML and links, stays plain text.
//
// A model may write any text, so the time is linear in its length. Expressions match the beginning of a line, with
// nothing after a repetition that could fail; those inside a line stop at the next delimiter of their own kind. While
// an answer grows, only its last block is parsed and built again.

import { copyButton, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}[-*_]/;
const ITEM = /^(\s*)(?:[-*+•]|(\d{1,9})[.)])\s+/;
const QUOTE = /^ {0,3}>\s?/;
const INLINE = new RegExp(
  [
    /(?<!`)(`+)([^`]+)\1(?!`)/, // code
    /\*\*(?=\S)([^*]*[^*\s])\*\*/, // bold
    /(?<![\w*])\*(?=[^\s*])([^*\n]*[^*\s])\*(?![\w*])/, // italics, with stars
    /(?<!\w)_(?=[^\s_])([^_\n]*[^_\s])_(?!\w)/, // and with underscores
  ]
    .map(({ source }) => source)
    .join("|"),
  "g",
);
const MAX_DEPTH = 16; // of lists; deeper items stay on the last level

export function showMarkdown(container, text) {
  const shown = (container.shown ??= { text: "", blocks: [] });
  const { blocks } = shown;
  const lastLine = shown.text.lastIndexOf("\n") + 1; // it may go on, and then belong to the block before it
  const kept = text.startsWith(shown.text) ? Math.max(blocks.findLastIndex(({ at }) => at < lastLine), 0) : 0;
  const old = blocks.splice(kept);
  const fresh = kept ? parse(text, old[0].at, old[0].blank, true) : parse(text, 0, 0, false);
  fresh.forEach((block, index) => {
    const before = old[index];
    block.source = JSON.stringify(block.content);
    block.node = before?.source === block.source ? before.node : build(block.content);
    if (!before) container.append(block.node);
    else if (before.node !== block.node) before.node.replaceWith(block.node);
    blocks.push(block);
  });
  for (const { node } of old.slice(fresh.length)) node.remove();
  shown.text = text;
}

class Lines {
  constructor(text, at) {
    this.at = at; // where the next line begins
    this.lines = text.slice(at).split("\n");
    this.taken = 0;
  }

  /** The next line; undefined at the end. */
  get next() {
    return this.lines[this.taken];
  }

  take() {
    const line = this.lines[this.taken++];
    this.at += line.length + 1;
    return line;
  }

  takeWhile(test) {
    const taken = [];
    while (this.next !== undefined && test(this.next)) taken.push(this.take());
    return taken;
  }
}

/** The blocks of the text from `at` on, after `blank` empty lines; `follows` another block, or is the first. */
function parse(text, at, blank, follows) {
  const lines = new Lines(text, at);
  const blocks = [];
  for (; lines.next !== undefined; blank = 0) {
    blank += lines.takeWhile(isBlank).length;
    if (lines.next === undefined) break;
    const block = { at: lines.at, blank };
    block.content = readBlock(lines, Math.max(follows ? blank - 1 : blank, 0));
    blocks.push(block);
    follows = true;
  }
  return blocks;
}

function readBlock(lines, gap) {
  const line = lines.next;
  const fence = fenceOf(line);
  if (fence) {
    const [, language] = /^\s*([\w+#.-]*)/.exec(lines.take().slice(fence.end));
    const code = lines.takeWhile((inside) => !closes(inside, fence));
    if (lines.next !== undefined) lines.take();
    return { kind: "code", language, text: code.join("\n") };
  }
  const heading = HEADING.exec(line);
  if (heading) {
    const text = withoutMarks(lines.take().slice(heading[0].length));
    return { kind: "heading", level: heading[1].length, text };
  }
  if (isRule(line)) {
    lines.take();
    return { kind: "rule" };
  }
  if (QUOTE.test(line)) {
    const quoted = lines.takeWhile((inside) => QUOTE.test(inside));
    return { kind: "quote", text: quoted.map((inside) => inside.replace(QUOTE, "")).join("\n") };
  }
  if (ITEM.test(line)) return { kind: "list", items: readItems(lines) };
  const paragraph = [lines.take(), ...lines.takeWhile((inside) => !isBlank(inside) && !begins(inside))];
  return { kind: "text", text: "\n".repeat(gap) + paragraph.join("\n") };
}

function readItems(lines) {
  const items = [];
  for (const line of lines.takeWhile((inside) => !isBlank(inside) && (ITEM.test(inside) || /^\s/.test(inside)))) {
    const found = ITEM.exec(line);
    if (found) items.push({ indent: found[1].length, number: found[2] ?? null, text: line.slice(found[0].length) });
    else items.at(-1).text += `\n${line.trim()}`;
  }
  return items;
}

const isBlank = (line) => !line.trim();
const begins = (line) =>
  Boolean(fenceOf(line)) || isRule(line) || [HEADING, QUOTE, ITEM].some((pattern) => pattern.test(line));
const isRule = (line) => RULE.test(line) && /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/\s+/g, ""));

function fenceOf(line) {
  const found = FENCE.exec(line);
  if (!found || line.includes("`", found[0].length)) return null;
  return { marks: found[1], end: found[0].length };
}

function closes(line, { marks }) {
  const found = FENCE.exec(line);
  return found?.[1].startsWith(marks) && isBlank(line.slice(found[0].length));
}

/** A title without the marks that may end it: "Title ##". */
function withoutMarks(text) {
  const title = text.trimEnd();
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return title.slice(0, end).trimEnd();
}

function build(block) {
  if (block.kind === "code") return codeBlock(block.text, block.language);
  if (block.kind === "heading") return h(`h${Math.min(block.level + 2, 6)}`, null, inline(block.text));
  if (block.kind === "rule") return h("hr");
  if (block.kind === "quote") return h("blockquote", null, inline(block.text));
  if (block.kind === "list") return list(block.items);
  return h("p", null, inline(block.text));
}

function list(items, depth = 1) {
  const [{ indent, number }] = items;
  const root = h(number === null ? "ul" : "ol", number === null ? null : { start: number });
  for (let at = 0; at < items.length;) {
    const item = h("li", null, inline(items[at].text));
    at += 1;
    const inner = [];
    while (depth < MAX_DEPTH && items[at]?.indent > indent + 1) inner.push(items[at++]);
    if (inner.length) item.append(list(inner, depth + 1));
    root.append(item);
  }
  return root;
}

function codeBlock(text, language) {
  return h(
    "div",
    { class: "code" },
    h(
      "div",
      { class: "code-head" },
      h("span", null, language || "code"),
      copyButton("Copy the code", () => text),
    ),
    h("pre", { tabindex: "0" }, h("code", null, text)),
  );
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    if (found[2] !== undefined) nodes.push(h("code", null, found[2]));
    else if (found[3] !== undefined) nodes.push(h("strong", null, inline(found[3])));
    else nodes.push(h("em", null, inline(found[4] ?? found[5])));
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}
