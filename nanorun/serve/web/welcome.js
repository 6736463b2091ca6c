// The empty page of a new conversation: suggestions for this model.

import { $, h, icon } from "./dom.js";

export function showWelcome(model, ask) {
  const base = model?.kind === "base";
  const mark = icon("mark");
  mark.classList.add("mark");
  const what = base ? "a base model, which continues a text" : "your own model";
  const hello = h(
    "div",
    { class: "hello" },
    mark,
    h("h2", null, base ? "How should the text begin?" : "What would you like to know?"),
    h("p", null, model ? `You are chatting with ${model.id}, ${what}.` : ""),
  );
  const cards = (model?.suggestions ?? []).slice(0, 4).map(({ label, text }) => {
    const content = [h("small", null, label), h("span", null, text), icon("go")];
    return h("button", { type: "button", class: "card", onclick: () => ask(text) }, content);
  });
  const offered = h("div", { class: "cards", role: "group", "aria-label": "Suggestions" }, cards);
  $("empty").replaceChildren(hello, ...(cards.length ? [offered] : []));
}
