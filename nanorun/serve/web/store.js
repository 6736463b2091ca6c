// Browser storage: settings, drafts, and each conversation under its own key, so that saving one does not rewrite the
// others. Stored data is validated, never trusted.
//
//   conversation  { id, title, updated, messages }
//   message       { role, content, parts?, finish?, stats?, error? }

const PREFIX = "nanorun:";
const CHAT = `${PREFIX}chat:`;
const DRAFT = `${PREFIX}draft:`;
const KEY = `${PREFIX}key`;

export const DEFAULTS = {
  theme: "system",
  temperature: null,
  top_p: null,
  max_tokens: null,
  seed: null,
  system: "",
};
export const RANGES = {
  temperature: [0, 2],
  top_p: [0, 1],
  max_tokens: [1, 1_000_000],
  seed: [0, 2 ** 53 - 1],
};

/** All conversations, newest first, and an error message if some could not be read. */
export function load() {
  const conversations = [];
  let damaged = 0;
  try {
    for (const key of Object.keys(localStorage).filter((name) => name.startsWith(CHAT))) {
      const kept = localStorage.getItem(key);
      const conversation = whole(kept);
      if (conversation && key === CHAT + conversation.id) conversations.push(conversation);
      else {
        damaged += 1; // moved aside, so that it is reported once and can still be inspected
        localStorage.removeItem(key);
        localStorage.setItem(`${PREFIX}damaged:${key.slice(CHAT.length)}`, kept);
      }
    }
  } catch {
    return { conversations, problem: "This browser lets the page keep nothing: conversations end with it." };
  }
  conversations.sort((a, b) => b.updated - a.updated);
  const what = damaged === 1 ? "One conversation" : `${damaged} conversations`;
  return {
    conversations,
    problem: damaged ? `${what} in this browser could not be read and are ignored.` : null,
  };
}

/** Null, or the reason why it could not be stored. */
export function keep(conversation) {
  try {
    localStorage.setItem(CHAT + conversation.id, JSON.stringify(conversation));
    return null;
  } catch {
    return "This browser has no room left to keep this conversation: delete others, or export it.";
  }
}

export function forget(id) {
  quietly(() => localStorage.removeItem(CHAT + id));
  quietly(() => localStorage.removeItem(DRAFT + id));
}

export function newConversation() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  const id = Array.from(bytes, (byte) => byte.toString(36).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), messages: [] };
}

/** The first words of the first question. */
export function titleOf({ title, messages }) {
  if (title) return title;
  const line =
    messages
      .find(({ role }) => role === "user")
      ?.content.trim()
      .split("\n")[0] ?? "";
  if (!line) return "New conversation";
  return line.length <= 48 ? line : `${line.slice(0, 48).replace(/\s+\S{0,20}$/, "")}…`;
}

export const isConversation = (key) => key === null || key.startsWith(CHAT);

export const draft = (id) => quietly(() => localStorage.getItem(DRAFT + id)) ?? "";
export function keepDraft(id, text) {
  quietly(() => (text ? localStorage.setItem(DRAFT + id, text) : localStorage.removeItem(DRAFT + id)));
}

export const current = () =>
  quietly(() => sessionStorage.getItem(`${PREFIX}current`) ?? localStorage.getItem(`${PREFIX}current`));
export function keepCurrent(id) {
  quietly(() => sessionStorage.setItem(`${PREFIX}current`, id)); // each tab has its own
  quietly(() => localStorage.setItem(`${PREFIX}current`, id));
}

export function loadSettings() {
  const settings = { ...DEFAULTS };
  const kept = quietly(() => JSON.parse(localStorage.getItem(`${PREFIX}settings`))) ?? {};
  for (const [name, [least, most]] of Object.entries(RANGES)) {
    const value = kept[name];
    if (typeof value === "number" && value >= least && value <= most) settings[name] = value;
  }
  if (["light", "dark"].includes(kept.theme)) settings.theme = kept.theme;
  if (typeof kept.system === "string") settings.system = kept.system;
  return settings;
}

export const keepSettings = (settings) =>
  quietly(() => localStorage.setItem(`${PREFIX}settings`, JSON.stringify(settings)));

/** The API key: stored until the tab closes, or permanently if the user chooses so. */
export const loadKey = () => quietly(() => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY)) ?? "";
export const keyIsRemembered = () => Boolean(quietly(() => localStorage.getItem(KEY)));
export function keepKey(key, remember) {
  for (const storage of [() => sessionStorage, () => localStorage]) quietly(() => storage().removeItem(KEY));
  if (key) quietly(() => (remember ? localStorage : sessionStorage).setItem(KEY, key));
}

function quietly(attempt) {
  try {
    return attempt();
  } catch {
    return null;
  }
}

function whole(kept) {
  let found;
  try {
    found = JSON.parse(kept);
  } catch {
    return null;
  }
  const right =
    typeof found?.id === "string" &&
    typeof found.title === "string" &&
    Number.isFinite(found.updated) &&
    Array.isArray(found.messages) &&
    found.messages.every(isMessage);
  if (!right) return null;
  for (const message of found.messages) {
    if (message.role === "assistant" && !message.finish && !message.error) message.finish = "interrupted";
  }
  return found;
}

const isMessage = (message) =>
  ["user", "assistant"].includes(message?.role) &&
  typeof message.content === "string" &&
  (message.error === undefined || typeof message.error?.said === "string") &&
  (message.parts === undefined || (Array.isArray(message.parts) && message.parts.every(isPart)));

const isPart = (part) =>
  ["text", "python", "output", "guess"].includes(part?.type) && typeof part.text === "string";
