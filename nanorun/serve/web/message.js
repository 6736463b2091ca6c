// One message on the page. A question is shown as typed; an answer as Markdown, with its tool calls as blocks
// between. The actions on a message are passed in as functions.

import { copyButton, h, icon, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** { node, update(state) }: `state` is { busy, last, model } and may change at any time. */
export function messageView(message, actions) {
  return message.role === "user" ? questionView(message, actions) : answerView(message, actions);
}

function questionView(message, { edit }) {
  const bubble = h("div", { class: "bubble", dir: "auto" }, message.content);
  const tools = h(
    "div",
    { class: "tools" },
    copyButton("Copy the message", () => message.content),
    iconButton("edit", "Edit the message", () => open()),
  );
  const node = h("article", { class: "question", "aria-label": "You" }, bubble, tools);

  function open() {
    const text = h("textarea", { rows: "1", "aria-label": "Edit the message", dir: "auto" });
    text.value = message.content;
    const close = () => {
      node.classList.remove("editing");
      node.replaceChildren(bubble, tools);
      tools.lastChild.focus();
    };
    const done = () => (text.value.trim() ? edit(message, text.value) : close());
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done();
      }
    });
    const buttons = h(
      "div",
      { class: "buttons" },
      h("button", { type: "button", class: "plain", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: done }, "Send"),
    );
    node.classList.add("editing");
    node.replaceChildren(h("div", { class: "editor" }, text, buttons));
    fit(text);
    text.addEventListener("input", () => fit(text));
    text.focus();
    node.scrollIntoView({ block: "nearest" });
    text.setSelectionRange(text.value.length, text.value.length);
  }

  return { node, update() {}, edit: open };
}

function answerView(message, { regenerate, goOn, settings }) {
  const body = h("div", { class: "body", dir: "auto" });
  const trouble = h("div");
  const stats = h("span", { class: "stats" });
  const again = iconButton("again", "Regenerate the answer", () => regenerate(message));
  const more = h(
    "button",
    { type: "button", class: "plain small", onclick: () => goOn(message) },
    "Continue",
  );
  const tools = h(
    "div",
    { class: "tools" },
    copyButton("Copy the answer", () => message.content),
    again,
    more,
    stats,
  );
  const node = h("article", { class: "answer", "aria-label": "The model" }, body, trouble, tools);

  function update({ busy, last, model }) {
    node.classList.toggle("busy", busy);
    node.classList.toggle("last", last);
    showAnswer(body, message, model);
    const waiting = busy && !message.content && !message.parts;
    node.classList.toggle("waiting", waiting);
    body.setAttribute("aria-busy", String(busy));
    tools.hidden = busy || (Boolean(message.error) && !message.content);
    again.hidden = !last;
    more.hidden = !last || model?.kind !== "base" || message.finish === "stop";
    if (busy) return;
    stats.replaceChildren(...figures(message));
    trouble.replaceChildren(...(message.error ? [errorCard(message, { regenerate, settings, last })] : []));
  }
  return { node, update };
}

function showAnswer(body, message, model) {
  if (model?.kind === "base" || message.plain) {
    if (body.textContent !== message.content) body.replaceChildren(h("p", null, message.content));
    return;
  }
  const segments = segmentsOf(message);
  segments.forEach((segment, at) => {
    let node = body.children[at];
    if (node?.kind !== segment.kind) {
      const fresh = h("div", { class: segment.kind });
      fresh.kind = segment.kind;
      if (node) node.replaceWith(fresh);
      else body.append(fresh);
      node = fresh;
    }
    if (segment.kind === "markdown") showMarkdown(node, segment.text);
    else showCall(node, segment, model?.tool);
  });
  while (body.children.length > segments.length) body.lastChild.remove();
}

/** Splits an answer into text and tool calls; a call has its code and its output. */
function segmentsOf(message) {
  if (!message.parts) return message.content ? [{ kind: "markdown", text: message.content }] : [];
  const segments = [];
  for (const { type, text } of message.parts) {
    const before = segments.at(-1);
    if (type === "text") segments.push({ kind: "markdown", text: before ? text.replace(/^ +/, "") : text });
    else if (type === "python") segments.push({ kind: "call", code: text, output: null, guess: false });
    else if (before?.kind === "call" && before.output === null)
      Object.assign(before, { output: text, guess: type === "guess" });
    else segments.push({ kind: "call", code: "", output: text, guess: type === "guess" });
  }
  return segments.filter(({ kind, text }) => kind !== "markdown" || text.trim());
}

function showCall(node, { code, output, guess }, tool) {
  const shown = JSON.stringify([code, output, guess, tool]);
  if (node.shown === shown) return;
  node.shown = shown;
  const name = tool === "python" || code.includes("\n") ? "python" : "calculator";
  const note = guess ? h("span", { class: "guess" }, "made up by the model") : null;
  const head = h("span", { class: "call-name" }, icon("tool"), name);
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", `Tool: ${name}`);
  const long =
    code.includes("\n") || (output ?? "").includes("\n") || code.length + (output ?? "").length > 80;
  node.classList.toggle("long", long);
  if (long) {
    node.replaceChildren(
      h(
        "div",
        { class: "call-head" },
        head,
        note,
        copyButton("Copy the code", () => code),
      ),
      h("pre", { tabindex: "0" }, h("code", null, code)),
      ...(output === null ? [] : [h("pre", { class: "call-output", tabindex: "0" }, output)]),
    );
  } else {
    const result = output === null ? h("span", { class: "call-wait" }, "…") : h("output", null, output);
    node.replaceChildren(
      head,
      h("code", null, code),
      h("span", { class: "arrow", "aria-label": "gives" }, "→"),
      result,
      ...(note ? [note] : []),
    );
  }
}

function errorCard(message, { regenerate, settings, last }) {
  const { said, status } = message.error;
  const buttons = [];
  if (status === 401)
    buttons.push(h("button", { type: "button", class: "plain", onclick: settings }, "Settings"));
  if (last) {
    const retry = h(
      "button",
      { type: "button", class: "plain", onclick: () => regenerate(message) },
      icon("again"),
      "Retry",
    );
    buttons.push(retry);
  }
  return h(
    "div",
    { class: "trouble", role: "alert" },
    icon("alert"),
    h("p", null, said),
    h("div", { class: "buttons" }, buttons),
  );
}

function figures({ finish, stats, content, leftOut }) {
  const items = [];
  const add = (text, name = null) => items.push(h("span", { class: name }, text));
  if (finish === "stopped") add(content ? "stopped" : "stopped before the first word");
  if (finish === "interrupted") add("the page was closed before the end");
  if (finish === "length") add("cut off at the token limit");
  if (leftOut) add(leftOut === 1 ? "the oldest message is left out" : `the oldest ${leftOut} messages are left out`);
  if (!stats?.tokens) return items;
  add(`${stats.tokens} token${stats.tokens === 1 ? "" : "s"}`, "count");
  if (stats.perSecond) add(`${round(stats.perSecond)} tokens/s`);
  add(`first after ${stats.first < 1 ? `${round(stats.first * 1000)} ms` : `${round(stats.first)} s`}`);
  return items;
}

const round = (value) =>
  new Intl.NumberFormat("en", { maximumFractionDigits: value < 10 ? 1 : 0 }).format(value);

/** Fits the height of a text area to its content, for browsers without CSS field-sizing. */
export function fit(text) {
  if (CSS.supports("field-sizing", "content")) return;
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}
