// Running answers: at most one per conversation. An answer continues while another conversation is shown.

import { ApiError, answer } from "./api.js";
import { loadKey } from "./store.js";

const BASE_TOKENS = 200; // of a base model's text, which rarely ends by itself

export class Talk {
  /** `changed(conversation, message)` is called for every piece, and `ended` after the last. */
  constructor(settings, { changed, ended }) {
    this.settings = settings;
    this.changed = changed;
    this.ended = ended;
    this.running = new Map(); // by the conversation's id: { message, controller, ended }
    this.model = null;
  }

  /** Stops the answer and keeps its text so far. */
  async stop(id) {
    this.running.get(id)?.controller.abort();
    await this.running.get(id)?.ended;
  }

  /** The page is closing: keeps the text of each answer so far. */
  leave() {
    for (const { message, controller } of this.running.values()) {
      message.finish = "interrupted";
      controller.abort();
    }
  }

  /** Answers the last question, or continues `message`, the answer of a base model. */
  async answer(conversation, message = null) {
    const continues = message !== null;
    const request = this.request(conversation, message);
    message ??= { role: "assistant", content: "" };
    if (this.model?.kind === "base") message.plain = true;
    if (!continues) conversation.messages.push(message);
    for (const name of ["finish", "stats", "error", "leftOut"]) delete message[name];
    const controller = new AbortController();
    let end;
    const ended = new Promise((resolve) => (end = resolve));
    this.running.set(conversation.id, { message, controller, ended });
    this.changed(conversation, message);
    const start = performance.now();
    let first = null;
    let latest = null;
    let tokens = null;
    try {
      for await (const update of answer(request, loadKey(), controller.signal)) {
        if (update.finish) message.finish = update.finish;
        if (update.tokens) tokens = update.tokens;
        if (update.leftOut) message.leftOut = update.leftOut;
        if (!update.parts) continue;
        latest = performance.now();
        first ??= latest;
        add(message, update);
        this.changed(conversation, message);
      }
      message.finish ??= "stop";
    } catch (error) {
      if (controller.signal.aborted) message.finish ??= "stopped";
      else if (error instanceof ApiError) message.error = { said: error.message, status: error.status };
      else message.error = { said: "The server's response is malformed: try again.", status: 0 };
    }
    if (first !== null) message.stats = stats(start, first, latest, tokens);
    this.running.delete(conversation.id);
    this.ended(conversation, message);
    end();
  }

  request(conversation, continued) {
    const { settings, model } = this;
    const request = {};
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (settings[name] !== null) request[name] = settings[name];
    }
    if (model) request.model = model.id;
    if (model?.kind === "base") {
      const start = conversation.messages.findLast(({ role }) => role === "user").content;
      return { max_tokens: BASE_TOKENS, ...request, prompt: start + (continued?.content ?? "") };
    }
    const messages = conversation.messages.filter(({ content, parts }) => content || parts).map(plain);
    if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
    return { ...request, messages, truncation: "auto" };
  }
}

const plain = ({ role, content, parts }) =>
  parts ? { role, content, nanorun_parts: parts } : { role, content };

function add(message, { content, parts }) {
  if (parts.some(({ type }) => type !== "text"))
    message.parts ??= message.content ? [{ type: "text", text: message.content }] : [];
  message.content += content;
  if (!message.parts) return;
  for (const { type, text } of parts) {
    const last = message.parts.at(-1);
    if (last?.type === type) last.text += text;
    else message.parts.push({ type, text });
  }
}

/** `tokens` is the server's count, also of an answer that was stopped. */
function stats(start, first, latest, tokens) {
  const burst = latest - first < (first - start) / 2; // all pieces came at once: their timing says nothing about the speed
  const seconds = (latest - (burst ? start : first)) / 1000;
  const perSecond = tokens > 1 && seconds > 0 ? (burst ? tokens : tokens - 1) / seconds : null;
  return { tokens, perSecond, first: (first - start) / 1000 };
}
