// Creates elements. A string always becomes a text node: nothing on this page parses HTML, and the server's
// policy (trusted types) forbids the calls that would.

export const $ = (id) => document.getElementById(id);

/** h("p", { class: "note", onclick: f }, "text", node, null): attributes, listeners and children. */
export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick, more = {}) {
  return h(
    "button",
    { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...more },
    icon(name),
  );
}

/** Writes to the clipboard, also on pages without HTTPS, where browsers do not offer its API. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const held = h("textarea", { class: "unseen", "aria-hidden": "true" });
    held.value = text;
    const before = document.activeElement;
    (before?.closest("dialog") ?? document.body).append(held);
    held.select();
    document.execCommand("copy");
    held.remove();
    before?.focus();
  }
}

/** Copies the text, and shows a check mark for a moment. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("done"));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
