// The two dialogs: settings, which take effect immediately, and keyboard shortcuts.

import { $, h, iconButton } from "./dom.js";
import { DEFAULTS, RANGES, keepKey, keepSettings, keyIsRemembered, loadKey } from "./store.js";

/** Changes `settings` in place and calls `changed` with the name of each changed setting ("key" for the API key). */
export function openSettings(settings, model, { changed, forgetAll }, focus) {
  const dialog = $("settings");
  const set = (name, value) => {
    settings[name] = value;
    keepSettings(settings);
    changed(name);
  };
  const defaults = model?.sampling ?? {};
  const sections = [
    h("section", null, h("h3", null, "Look"), themeField(settings, set)),
    h(
      "section",
      null,
      h("h3", null, "Answers"),
      slider(
        "temperature",
        "Temperature",
        "0 always takes the most likely token; higher values vary more.",
        defaults.temperature ?? 1,
        0.05,
      ),
      slider("top_p", "Top-p", "Sample from the most likely tokens with this total probability.", defaults.top_p ?? 1, 0.01),
      numberField("max_tokens", "Maximum tokens", "per answer", "no limit"),
      numberField("seed", "Seed", "the same seed gives the same answer", "random"),
      model?.kind === "base" ? null : systemField(),
    ),
    h("section", null, h("h3", null, "Connection"), keyField()),
    h(
      "section",
      null,
      h("h3", null, "Conversations"),
      h("p", { class: "help" }, "They are stored in this browser only."),
      h(
        "button",
        {
          type: "button",
          class: "plain danger",
          onclick: () => {
            dialog.close();
            forgetAll();
          },
        },
        "Delete all",
      ),
    ),
  ];
  const reset = () => {
    for (const name of Object.keys(RANGES)) settings[name] = DEFAULTS[name];
    settings.system = DEFAULTS.system;
    set("theme", DEFAULTS.theme);
    openSettings(settings, model, { changed, forgetAll });
  };
  dialog.replaceChildren(
    sheetHead(dialog, "settings-title", "Settings"),
    h("div", { class: "sheet" }, sections),
    h(
      "footer",
      null,
      h("button", { type: "button", class: "plain", onclick: reset }, "Reset"),
      closeButton(dialog),
    ),
  );
  show(dialog);
  if (focus) $(focus)?.focus();

  function slider(name, label, help, standard, step) {
    const [least, most] = RANGES[name];
    const range = h("input", {
      id: `set-${name}`,
      type: "range",
      min: least,
      max: most,
      step,
      "aria-describedby": `help-${name}`,
    });
    const shown = h("output", { for: `set-${name}` });
    const tell = () => {
      range.value = String(settings[name] ?? standard);
      shown.textContent = settings[name] === null ? `${standard} (default)` : String(settings[name]);
    };
    range.addEventListener("input", () => {
      set(name, Number(range.value));
      tell();
    });
    tell();
    const top = h("div", { class: "label" }, h("label", { for: `set-${name}` }, label), shown);
    return h("div", { class: "field" }, top, range, h("p", { class: "help", id: `help-${name}` }, help));
  }

  function numberField(name, label, help, none) {
    const [least, most] = RANGES[name];
    const input = h("input", {
      id: `set-${name}`,
      type: "number",
      inputmode: "numeric",
      min: least,
      max: most,
      step: 1,
      placeholder: none,
      "aria-describedby": `help-${name}`,
    });
    input.value = settings[name] ?? "";
    input.addEventListener("input", () => {
      const value = input.value.trim() === "" ? null : Number(input.value);
      const right =
        value === null
          ? !input.validity.badInput
          : Number.isInteger(value) && value >= least && value <= most;
      input.setAttribute("aria-invalid", String(!right));
      if (right) set(name, value);
    });
    const text = h(
      "div",
      null,
      h("label", { for: `set-${name}` }, label),
      h("p", { class: "help", id: `help-${name}` }, help),
    );
    return h("div", { class: "field beside" }, text, input);
  }

  function systemField() {
    const text = h("textarea", {
      id: "set-system",
      rows: "3",
      placeholder: "You are brief and kind.",
      "aria-describedby": "help-system",
    });
    text.value = settings.system;
    text.addEventListener("input", () => set("system", text.value));
    const help = h("p", { class: "help", id: "help-system" }, "Instructions at the beginning of each conversation.");
    return h("div", { class: "field" }, h("label", { for: "set-system" }, "System prompt"), text, help);
  }

  function keyField() {
    const key = h("input", {
      id: "set-key",
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      placeholder: "none",
      "aria-describedby": "help-key",
    });
    key.value = loadKey();
    const remember = h("input", { id: "set-remember", type: "checkbox" });
    remember.checked = keyIsRemembered();
    const save = () => {
      keepKey(key.value.trim(), remember.checked);
      changed("key");
    };
    key.addEventListener("change", save);
    remember.addEventListener("change", save);
    const box = h("label", { class: "check" }, remember, "Remember it in this browser");
    const help = h(
      "p",
      { class: "help", id: "help-key" },
      "Only if the server requires one. It is deleted when this tab closes, unless:",
    );
    return h("div", { class: "field" }, h("label", { for: "set-key" }, "API key"), key, help, box);
  }
}

function themeField(settings, set) {
  const options = ["system", "light", "dark"].map((theme) => {
    const radio = h("input", {
      type: "radio",
      name: "theme",
      value: theme,
      onchange: () => set("theme", theme),
    });
    radio.checked = settings.theme === theme;
    return h("label", null, radio, h("span", null, theme[0].toUpperCase() + theme.slice(1)));
  });
  return h("fieldset", { class: "segments" }, h("legend", { class: "unseen" }, "Theme"), options);
}

export const MOD = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";

const KEYS = [
  ["Send the message", ["Enter"]],
  ["New line", ["Shift", "Enter"]],
  ["Stop the answer", ["Esc"]],
  ["Edit your last message", ["↑"]],
  ["New conversation", [MOD, "K"]],
  ["Previous or next conversation", ["Alt", "↑ ↓"]],
  ["Show or hide the list", [MOD, "B"]],
  ["Settings", [MOD, ","]],
  ["Scroll the messages", ["PgUp", "PgDn"]],
  ["Go to the message", ["/"]],
  ["This sheet", ["?"]],
];

export function openKeys() {
  const dialog = $("keys");
  const rows = KEYS.map(([what, keys]) =>
    h(
      "div",
      null,
      h("dt", null, what),
      h(
        "dd",
        null,
        keys.map((key) => h("kbd", null, key)),
      ),
    ),
  );
  dialog.replaceChildren(
    sheetHead(dialog, "keys-title", "Keyboard shortcuts"),
    h("div", { class: "sheet" }, h("dl", { class: "shortcuts" }, rows)),
  );
  show(dialog);
}

function show(dialog) {
  if (!dialog.open) dialog.showModal();
  dialog.onclick = (event) => {
    if (event.target === dialog) dialog.close(); // outside of it
  };
}

const sheetHead = (dialog, id, title) =>
  h(
    "header",
    null,
    h("h2", { id }, title),
    iconButton("close", "Close", () => dialog.close()),
  );

const closeButton = (dialog) =>
  h("button", { type: "button", class: "primary", onclick: () => dialog.close() }, "Done");
