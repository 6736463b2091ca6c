// The page: its state, and the actions of its buttons and keys. Conversations are stored by store.js, answers come
// from talk.js.

import { fetchModel } from "./api.js";
import { $, copy, icon, save } from "./dom.js";
import { fileName, toJson, toMarkdown } from "./export.js";
import {
  closeDrawer,
  isDrawerOpen,
  keepUp,
  narrow,
  openDrawer,
  scrollPage,
  showDrawer,
  toEnd,
  toggleDrawer,
} from "./frame.js";
import { showList } from "./list.js";
import { fit, messageView } from "./message.js";
import { notice, say, toast } from "./notices.js";
import { MOD, openKeys, openSettings } from "./settings.js";
import * as store from "./store.js";
import { Talk } from "./talk.js";
import { showWelcome } from "./welcome.js";

const SAVE_MS = 400;
const RETRY_MS = 5_000; // while the server is unreachable
const PAUSE_RATIO = 3; // the pause after a paint, in times of its duration

const settings = store.loadSettings();
const loaded = store.load();
let conversations = loaded.conversations;
let shown = conversations.find(({ id }) => id === store.current()) ?? store.newConversation();
let views = new Map(); // message -> view
let renaming = null;

const talk = new Talk(settings, {
  changed(conversation, message) {
    keepSoon(conversation);
    if (conversation === shown) paintSoon(message);
  },
  ended(conversation, message) {
    conversation.updated = Date.now();
    keepNow(conversation);
    if (conversation === shown) {
      paint(message);
      showSend();
      const how = message.finish === "stopped" ? "stopped" : "complete";
      say(message.error ? "" : `The answer is ${how}. ${message.content}`);
    }
    refreshList();
  },
});

// -- the model ------------------------------------------------------------------------------------------

let lookingAgain = 0;

async function loadModel() {
  clearTimeout(lookingAgain);
  try {
    talk.model = await fetchModel(store.loadKey());
    showModel("ready", talk.model.id, sizeOf(talk.model));
    notice(null, "model");
  } catch (error) {
    talk.model = null;
    const wantsKey = error.status === 401;
    showModel(wantsKey ? "key" : "away", wantsKey ? "API key needed" : "offline");
    const settle = { label: "Settings", act: () => showSettings("set-key") };
    notice(error.message, "model", wantsKey ? settle : { label: "Try again", act: loadModel });
    if (!wantsKey) lookingAgain = setTimeout(loadModel, RETRY_MS);
  }
  showEmpty();
  for (const message of views.keys()) paint(message);
}

function showModel(state, name, size = "") {
  $("model").dataset.state = state;
  $("model-name").textContent = name;
  $("model-size").textContent = size;
  const base = talk.model?.kind === "base";
  $("text").placeholder = base ? "Type a text for the model to continue" : "Ask something";
  $("fine").textContent = base
    ? "A base model: it continues text and does not answer questions."
    : "Small models make mistakes: check important facts.";
  document.body.classList.toggle("base", base);
}

const sizeOf = ({ parameters }) => (parameters ? `${compact.format(parameters)} parameters` : "");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// -- the conversation -----------------------------------------------------------------------------------

function open(conversation) {
  store.keepDraft(draftId(), $("text").value);
  present(conversation);
}

function present(conversation) {
  shown = conversation;
  store.keepCurrent(shown.id);
  views = new Map();
  $("log").replaceChildren();
  for (const message of shown.messages) view(message);
  for (const message of shown.messages) paint(message);
  $("text").value = store.draft(draftId());
  fit($("text"));
  showSend();
  showEmpty();
  refreshList();
  notice(null, "keep");
  toEnd();
}

const isNew = () => !conversations.includes(shown);
const draftId = () => (isNew() ? "new" : shown.id);

function view(message) {
  const made = messageView(message, {
    edit,
    regenerate,
    goOn: (answer) => begin(() => talk.answer(shown, answer)),
    settings: () => showSettings("set-key"),
  });
  views.set(message, made);
  $("log").append(made.node);
}

/** Adds nodes for new messages and removes those of deleted ones. */
function showMessages() {
  for (const [message, { node }] of views) {
    if (shown.messages.includes(message)) continue;
    node.remove();
    views.delete(message);
  }
  for (const message of shown.messages) if (!views.has(message)) view(message);
  for (const message of shown.messages) paint(message);
  showEmpty();
}

function paint(message) {
  const busy = talk.running.get(shown.id)?.message === message;
  views.get(message)?.update({ busy, last: shown.messages.at(-1) === message, model: talk.model });
  keepUp();
}

let painting = null;
let pause = 0; // milliseconds between two paints of a growing answer, so that a long one does not take all of the time
function paintSoon(message) {
  if (!views.has(message)) {
    showMessages();
    return;
  }
  painting ??= setTimeout(() => requestAnimationFrame(paintRunning), pause);
}

function paintRunning() {
  painting = null;
  const running = talk.running.get(shown.id);
  if (!running || !views.has(running.message)) return;
  const start = performance.now();
  paint(running.message);
  pause = PAUSE_RATIO * (performance.now() - start);
}

async function begin(answering) {
  if (talk.running.has(shown.id)) return;
  const ended = answering();
  say("The model is answering.");
  showMessages();
  showSend();
  refreshList();
  toEnd();
  await ended;
}

function ask(text) {
  if (!text.trim() || talk.running.has(shown.id)) return;
  if (isNew()) {
    store.keepDraft("new", "");
    conversations.unshift(shown);
  }
  const last = shown.messages.at(-1);
  if (last?.error && !last.content) shown.messages.pop(); // the failed question is retried together with this one
  shown.messages.push({ role: "user", content: text });
  shown.updated = Date.now();
  $("text").value = "";
  fit($("text"));
  store.keepDraft(shown.id, "");
  store.keepCurrent(shown.id);
  keepNow(shown);
  begin(() => talk.answer(shown));
}

/** Continues the conversation from the edited question; the messages after it are replaced. */
function edit(message, text) {
  const before = shown.messages;
  const at = before.indexOf(message);
  shown.messages = [...before.slice(0, at), { role: "user", content: text }];
  replaced(before, before.length - at > 2 ? "The later messages were replaced." : null);
}

function regenerate(message) {
  const before = shown.messages;
  shown.messages = before.slice(0, before.indexOf(message));
  replaced(before, message.content ? "The answer was replaced." : null);
}

async function replaced(before, text) {
  const conversation = shown;
  const undo = async () => {
    await talk.stop(conversation.id);
    conversation.messages = before;
    keepNow(conversation);
    if (conversation === shown) present(conversation);
  };
  $("text").focus();
  if (text) toast(text, undo);
  await talk.stop(conversation.id);
  begin(() => talk.answer(conversation));
}

function stopAnswer() {
  talk.stop(shown.id);
}

// -- the list -------------------------------------------------------------------------------------------

function refreshList() {
  conversations.sort((a, b) => b.updated - a.updated);
  const state = { current: shown.id, running: talk.running, search: $("search").value, renaming };
  showList(conversations, state, { open: openById, rename, remove });
  const title = isNew() ? "New conversation" : store.titleOf(shown);
  $("title").textContent = title;
  document.title = isNew() ? "nanorun" : `${title} · nanorun`;
  $("more").disabled = isNew();
}

function openById(id) {
  closeDrawer();
  if (id !== shown.id) open(conversations.find((conversation) => conversation.id === id));
  $("text").focus();
}

function openNew() {
  closeDrawer();
  if (!isNew()) open(store.newConversation());
  $("text").focus();
}

/** Without a name: shows an input in the list. */
function rename(id, name) {
  if (name === undefined) {
    renaming = id;
    openDrawer();
    refreshList();
    return;
  }
  renaming = null;
  const conversation = conversations.find((one) => one.id === id);
  if (name?.trim() && name.trim() !== store.titleOf(conversation)) {
    conversation.title = name.trim();
    keepNow(conversation);
  }
  refreshList();
}

function remove(id) {
  forget([conversations.find((conversation) => conversation.id === id)]);
}

function forget(gone) {
  if (!gone.length) return;
  for (const { id } of gone) {
    talk.stop(id);
    store.forget(id);
  }
  conversations = conversations.filter((conversation) => !gone.includes(conversation));
  const back = gone.includes(shown) ? shown : null;
  if (back) open(store.newConversation());
  else refreshList();
  toast(
    gone.length === 1 ? "The conversation was deleted." : `${gone.length} conversations were deleted.`,
    () => {
      conversations.push(...gone);
      gone.forEach(keepNow);
      if (back) open(back);
      else refreshList();
    },
  );
}

// -- storage --------------------------------------------------------------------------------------------

const waiting = new Map();

function keepSoon(conversation) {
  if (waiting.has(conversation)) return;
  waiting.set(
    conversation,
    setTimeout(() => keepNow(conversation), SAVE_MS),
  );
}

function keepNow(conversation) {
  clearTimeout(waiting.get(conversation));
  waiting.delete(conversation);
  if (!conversations.includes(conversation)) return; // it was deleted while the answer was generated
  const problem = store.keep(conversation);
  if (problem || conversation === shown) notice(problem, "keep");
}

addEventListener("pagehide", () => {
  store.keepDraft(draftId(), $("text").value);
  talk.leave();
  for (const conversation of conversations) if (talk.running.has(conversation.id)) keepNow(conversation);
});

addEventListener("storage", ({ key }) => {
  if (!store.isConversation(key)) return;
  const elsewhere = store.load().conversations; // another tab may have changed it
  const busy = (one) => one.id === shown.id || talk.running.has(one.id);
  conversations = [
    ...conversations.filter(busy),
    ...elsewhere.filter((one) => !conversations.some((mine) => mine.id === one.id && busy(mine))),
  ];
  refreshList();
});

// -- around the messages ------------------------------------------------------------------------------------

function showEmpty() {
  const empty = shown.messages.length === 0;
  $("empty").hidden = !empty;
  document.body.classList.toggle("is-empty", empty);
  if (empty) showWelcome(talk.model, ask);
}

function showSend() {
  const busy = talk.running.has(shown.id);
  const button = $("send");
  if (button.dataset.busy !== String(busy)) {
    button.dataset.busy = String(busy);
    button.setAttribute("aria-label", busy ? "Stop" : "Send");
    button.title = busy ? "Stop (Esc)" : "Send (Enter)";
    button.replaceChildren(icon(busy ? "stop" : "send"));
  }
  button.disabled = !busy && !$("text").value.trim();
}

function showTheme() {
  if (settings.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
}

function showSettings(focus) {
  closeDrawer();
  const changed = (name) => {
    if (name === "theme") showTheme();
    if (name === "key") loadModel();
  };
  openSettings(settings, talk.model, { changed, forgetAll: () => forget([...conversations]) }, focus);
}

// -- buttons and keys -----------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (talk.running.has(shown.id)) stopAnswer();
  else ask($("text").value);
});

let drafting = 0;
$("text").addEventListener("input", () => {
  fit($("text"));
  showSend();
  clearTimeout(drafting);
  drafting = setTimeout(() => store.keepDraft(draftId(), $("text").value), SAVE_MS);
});

$("text").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    ask($("text").value);
  } else if (event.key === "ArrowUp" && !event.altKey && !$("text").value) {
    const last = shown.messages.findLast(({ role }) => role === "user");
    if (!last) return;
    event.preventDefault();
    views.get(last).edit();
  }
});

$("new").addEventListener("click", openNew);
$("menu").addEventListener("click", toggleDrawer);
$("veil").addEventListener("click", closeDrawer);
$("close-drawer").addEventListener("click", () => {
  closeDrawer();
  $("menu").focus();
});
$("search").addEventListener("input", refreshList);
$("open-settings").addEventListener("click", () => showSettings());
$("open-keys").addEventListener("click", openKeys);

const MENU = {
  "copy-markdown": () => copy(toMarkdown(shown)).then(() => say("Copied.")),
  "save-markdown": () => save(`${fileName(shown)}.md`, toMarkdown(shown), "text/markdown"),
  "save-json": () =>
    save(`${fileName(shown)}.jsonl`, toJson(shown, settings.system.trim()), "application/jsonl"),
  rename: () => rename(shown.id),
  delete: () => remove(shown.id),
};
$("more-menu").addEventListener("click", ({ target }) => {
  const chosen = target.closest("button");
  if (!chosen) return;
  $("more-menu").hidePopover();
  MENU[chosen.dataset.do]();
});

function step(by) {
  const at = conversations.indexOf(shown);
  const next = conversations[at < 0 ? 0 : at + by];
  if (next) openById(next.id);
}

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const command = (event.metaKey || event.ctrlKey) && !event.altKey && !event.shiftKey;
  const typing = event.target.closest("input, textarea");
  const act = (what) => {
    event.preventDefault();
    what();
  };
  if (event.key === "Escape") {
    if (talk.running.has(shown.id)) act(stopAnswer);
    else if (narrow.matches && isDrawerOpen()) act(() => $("close-drawer").click());
  } else if (command && event.key.toLowerCase() === "k") act(openNew);
  else if (command && event.key.toLowerCase() === "b") act(toggleDrawer);
  else if (command && event.key === ",") act(() => showSettings());
  else if (event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown"))
    act(() => step(event.key === "ArrowUp" ? -1 : 1));
  else if (event.key === "PageUp" || event.key === "PageDown")
    act(() => scrollPage(event.key === "PageUp" ? -1 : 1));
  else if (!typing && event.key === "?") act(openKeys);
  else if (!typing && event.key === "/" && !command) act(() => $("text").focus());
});

for (const key of document.querySelectorAll("kbd[data-key]")) key.textContent = `${MOD} ${key.dataset.key}`;
showTheme();
showDrawer();
present(shown);
notice(loaded.problem, "load");
if (!narrow.matches) $("text").focus();
loadModel();
addEventListener("online", loadModel);
