// A subset of Markdown as DOM nodes: code fences, headings, lists, quotes, rules, bold, italics, inline code.
// Everything else, including HTML and links, stays plain text. While an answer grows, unchanged blocks keep
// their nodes.

import { copyButton, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)(?:([-*+•])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const INLINE = new RegExp(
  [
    /(`+)([^`]+)\1(?!`)/, // code
    /\*\*(?=\S)([^*]*[^*\s])\*\*/, // bold
    /(?<![\w*])\*(?=[^\s*])([^*\n]*[^*\s])\*(?![\w*])/, // italics, with stars
    /(?<!\w)_(?=[^\s_])([^_\n]*[^_\s])_(?!\w)/, // and with underscores
  ]
    .map(({ source }) => source)
    .join("|"),
  "g",
);

export function showMarkdown(container, text) {
  const blocks = parse(text);
  blocks.forEach((block, at) => {
    const source = JSON.stringify(block);
    const old = container.children[at];
    if (old?.source === source) return;
    const node = build(block);
    node.source = source;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
}

function parse(text) {
  const lines = text.split("\n");
  const blocks = [];
  let blank = 0;
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    if (!line.trim()) {
      blank += 1;
      at += 1;
      continue;
    }
    const gap = Math.max(blocks.length ? blank - 1 : blank, 0);
    blank = 0;
    const take = (pattern) => {
      const taken = [];
      while (at < lines.length && pattern.test(lines[at])) taken.push(lines[at++]);
      return taken;
    };
    const fence = FENCE.exec(line);
    if (fence) {
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      const code = [];
      for (at += 1; at < lines.length && !end.test(lines[at]); at += 1) code.push(lines[at]);
      at += 1;
      blocks.push({ kind: "code", language: fence[2], text: code.join("\n") });
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      blocks.push({ kind: "heading", level: marks.length, text: title });
      at += 1;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule" });
      at += 1;
    } else if (QUOTE.test(line)) {
      blocks.push({
        kind: "quote",
        text: take(QUOTE)
          .map((quoted) => QUOTE.exec(quoted)[1])
          .join("\n"),
      });
    } else if (ITEM.test(line)) {
      const items = [];
      while (at < lines.length && lines[at].trim()) {
        const found = ITEM.exec(lines[at]);
        if (found) items.push({ indent: found[1].length, number: found[3] ?? null, text: found[4] });
        else if (/^\s/.test(lines[at])) items.at(-1).text += `\n${lines[at].trim()}`;
        else break;
        at += 1;
      }
      blocks.push({ kind: "list", items });
    } else {
      const paragraph = [];
      while (at < lines.length && lines[at].trim() && !(paragraph.length && begins(lines[at])))
        paragraph.push(lines[at++]);
      blocks.push({ kind: "text", text: "\n".repeat(gap) + paragraph.join("\n") });
    }
  }
  return blocks;
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));

function build(block) {
  if (block.kind === "code") return codeBlock(block.text, block.language);
  if (block.kind === "heading") return h(`h${Math.min(block.level + 2, 6)}`, null, inline(block.text));
  if (block.kind === "rule") return h("hr");
  if (block.kind === "quote") return h("blockquote", null, inline(block.text));
  if (block.kind === "list") return list(block.items);
  return h("p", null, inline(block.text));
}

function list(items) {
  const [{ indent, number }] = items;
  const root = h(number === null ? "ul" : "ol", number === null ? null : { start: number });
  for (let at = 0; at < items.length;) {
    const item = h("li", null, inline(items[at].text));
    at += 1;
    const inner = [];
    while (at < items.length && items[at].indent > indent + 1) inner.push(items[at++]);
    if (inner.length) item.append(list(inner));
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
