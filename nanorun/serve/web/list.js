// The list of conversations: grouped by day, searchable by their text, renamed in place.

import { $, h, iconButton } from "./dom.js";
import { titleOf } from "./store.js";

const DAY = 86_400_000;

/** `actions`: { open, rename, remove }. */
export function showList(conversations, { current, running, search, renaming }, actions) {
  const wanted = search.trim().toLowerCase();
  const found = wanted
    ? conversations.filter((conversation) => matches(conversation, wanted))
    : conversations;
  const groups = new Map();
  for (const conversation of found) {
    const age = ageOf(conversation.updated);
    groups.set(age, [...(groups.get(age) ?? []), conversation]);
  }
  const sections = [...groups].map(([age, members]) =>
    h("section", { "aria-label": age }, h("h2", null, age), h("ul", null, members.map(row))),
  );
  const none = wanted ? "Nothing found." : "Your conversations appear here. They stay in this browser.";
  $("list").replaceChildren(...(sections.length ? sections : [h("p", { class: "none" }, none)]));
  $("list").querySelector("input")?.select();

  function row(conversation) {
    const { id } = conversation;
    const title = titleOf(conversation);
    if (renaming === id) return h("li", { class: "item" }, nameField(conversation, title));
    const open = h(
      "button",
      {
        type: "button",
        class: "open",
        "aria-current": id === current ? "page" : null,
        title,
        onclick: () => actions.open(id),
      },
      h("span", { dir: "auto" }, title),
    );
    return h(
      "li",
      { class: running.has(id) ? "item running" : "item" },
      open,
      iconButton("edit", `Rename ${title}`, () => actions.rename(id)),
      iconButton("delete", `Delete ${title}`, () => actions.remove(id)),
    );
  }

  function nameField(conversation, title) {
    const field = h("input", {
      type: "text",
      value: title,
      maxlength: "120",
      "aria-label": "Name of the conversation",
    });
    let ended = false;
    const end = (name) => {
      if (ended) return;
      ended = true;
      actions.rename(conversation.id, name);
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(field.value);
      if (event.key === "Escape") end(null);
    });
    field.addEventListener("blur", () => end(field.value));
    return field;
  }
}

const matches = ({ title, messages }, wanted) =>
  title.toLowerCase().includes(wanted) ||
  messages.some(({ content }) => content.toLowerCase().includes(wanted));

function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  return time >= midnight - 7 * DAY ? "The last week" : "Earlier";
}
