// Exports a conversation: as Markdown, or as JSON in the format of chat data, which `nanorun train sft` can train on.

import { titleOf } from "./store.js";

export function toMarkdown(conversation) {
  const messages = conversation.messages.map(({ role, content, parts }) => {
    const text = (parts ?? [{ type: "text", text: content }])
      .map((part) =>
        part.type === "text"
          ? part.text
          : `\n\n${fenced(part.text, part.type === "python" ? "python" : "")}\n\n`,
      )
      .join("");
    return `**${role === "user" ? "You" : "Model"}**\n\n${text.trim()}\n`;
  });
  return `# ${titleOf(conversation)}\n\n${messages.join("\n")}`;
}

export function toJson(conversation, system) {
  const messages = conversation.messages
    .filter(({ content, parts }) => content || parts)
    .map(({ role, content, parts }) => ({ role, content: parts?.map(plain) ?? content }));
  if (system) messages.unshift({ role: "system", content: system });
  return `${JSON.stringify({ messages })}\n`;
}

export const fileName = (conversation) =>
  titleOf(conversation)
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "")
    .toLowerCase()
    .slice(0, 60) || "conversation";

const plain = ({ type, text }) => ({ type: type === "guess" ? "output" : type, text });

function fenced(text, language) {
  const longest = [...text.matchAll(/`+/g)].reduce((most, [run]) => Math.max(most, run.length), 2);
  const ticks = "`".repeat(longest + 1);
  return `${ticks}${language}\n${text}\n${ticks}`;
}
