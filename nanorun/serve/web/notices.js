// Notifications: a notice above the messages, a toast with an undo button, announcements for screen readers.

import { $, h, icon } from "./dom.js";

const UNDO_MS = 8_000;
const notices = new Map();

/** Shows one sentence above the messages, with a button; null removes it. */
export function notice(text, from, action = null) {
  if (text) notices.set(from, { text, action });
  else notices.delete(from);
  const [first] = notices.values();
  $("notice").hidden = !first;
  if (!first) return;
  const button =
    first.action &&
    h("button", { type: "button", class: "plain", onclick: first.action.act }, first.action.label);
  $("notice").replaceChildren(icon("alert"), h("p", null, first.text), ...(button ? [button] : []));
}

let toasting = 0;

export function toast(text, undo) {
  clearTimeout(toasting);
  const box = $("toast");
  const close = () => {
    box.hidden = true;
  };
  const button = h(
    "button",
    {
      type: "button",
      onclick: () => {
        close();
        undo();
      },
    },
    "Undo",
  );
  box.replaceChildren(h("span", null, text), button);
  box.hidden = false;
  const later = () => {
    clearTimeout(toasting);
    toasting = setTimeout(close, UNDO_MS);
  };
  box.onpointerenter = box.onfocusin = () => clearTimeout(toasting);
  box.onpointerleave = box.onfocusout = later;
  later();
}

export const say = (text) => {
  $("announce").textContent = text;
};
