// What the browser keeps: conversations and settings, in localStorage, one entry a conversation.

const PREFIX = "gemma-neuron.";
const CHAT = `${PREFIX}chat.`;
const SETTINGS = `${PREFIX}settings`;

function read(name) {
  try {
    const found = JSON.parse(localStorage.getItem(name));
    return found !== null && typeof found === "object" ? found : null;
  } catch {
    return null; // no JSON, or no storage at all: as if it were not there
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function newChat(system = "") {
  const random = crypto.getRandomValues(new Uint32Array(2));
  const id = Date.now().toString(36) + [...random].map((n) => n.toString(36)).join("");
  return { id, title: "", changed: Date.now(), system, messages: [] };
}

/** All conversations, the last changed first. */
export function chats() {
  const found = [];
  try {
    for (const name of Object.keys(localStorage)) {
      const chat = name.startsWith(CHAT) ? repaired(read(name)) : null;
      if (chat) found.push(chat);
    }
  } catch {
    // storage is switched off: this tab's conversations only
  }
  return found.sort((a, b) => b.changed - a.changed);
}

/** A conversation as this version of the page writes it, or null. An answer the last page left open is one that was broken off. */
function repaired(chat) {
  if (!chat || typeof chat.id !== "string" || !Array.isArray(chat.messages)) return null;
  const messages = chat.messages.filter((m) => (m?.role === "user" ? typeof m.content === "string" : m?.role === "assistant" && m.variants?.length > 0));
  for (const message of messages) {
    if (message.role === "user") continue;
    message.variants = message.variants.map((variant) => repairedVariant(variant ?? {}));
    message.chosen = Math.min(Math.max(message.chosen | 0, 0), message.variants.length - 1);
  }
  return { id: chat.id, title: String(chat.title ?? ""), changed: Number(chat.changed) || 0, system: String(chat.system ?? ""), messages };
}

function repairedVariant(variant) {
  const number = (value) => (typeof value === "number" ? value : null);
  const stats = variant.stats ?? {};
  return {
    content: String(variant.content ?? ""),
    reasoning: String(variant.reasoning ?? ""),
    finish: variant.finish ?? "interrupted",
    error: String(variant.error ?? ""),
    stats: { tokens: number(stats.tokens) ?? 0, exact: Boolean(stats.exact), first: number(stats.first), rate: number(stats.rate), thought: number(stats.thought) },
  };
}

/** Whether it could be kept. */
export function keep(chat) {
  return write(CHAT + chat.id, chat);
}

export function remove(chat) {
  try {
    localStorage.removeItem(CHAT + chat.id);
  } catch {
    // nothing was kept
  }
}

export function settings() {
  return { sampling: {}, thinking: false, theme: "", ...read(SETTINGS) };
}

export function keepSettings(value) {
  return write(SETTINGS, value);
}

/** Called when another tab changed a conversation. */
export function onOtherTab(call) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(CHAT)) call(event.key?.slice(CHAT.length) ?? null);
  });
}
