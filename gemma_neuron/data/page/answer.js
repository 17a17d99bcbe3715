// One answer: asked for, read as it streams, timed as the user sees it.

import { streamChat } from "./api.js";

/** A new, empty variant of an answer. `finish` is null while it grows. */
export function newVariant() {
  return { content: "", reasoning: "", finish: null, error: "", stats: { tokens: 0, exact: false, first: null, rate: null, thought: null } };
}

/** What is sent: the system prompt, then the turns before `end`, each answer as its chosen variant. Thoughts stay here. */
export function history(chat, end) {
  const system = chat.system.trim() ? [{ role: "system", content: chat.system.trim() }] : [];
  const turns = chat.messages.slice(0, end).map((message) =>
    message.role === "user"
      ? { role: "user", content: message.content }
      : { role: "assistant", content: message.variants[message.chosen].content },
  );
  return [...system, ...turns];
}

/** Ask for an answer into `variant`; `onChange` is called whenever it grew, and once at its end. Returns {stop, done}. */
export function ask({ model, messages, settings, variant, onChange }) {
  const controller = new AbortController();
  const sampling = Object.fromEntries(Object.entries(settings.sampling).filter(([, value]) => value !== null && value !== undefined));
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...sampling };
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: true };
  return { stop: () => controller.abort(), done: run(body, controller.signal, variant, onChange) };
}

async function run(body, signal, variant, onChange) {
  const clock = new Clock(variant.stats);
  try {
    await streamChat(body, { signal, onChunk: (chunk) => take(chunk, variant, clock) && onChange() });
    variant.finish ??= "stop";
  } catch (error) {
    if (signal.aborted) variant.finish = "stopped";
    else {
      variant.finish = "error";
      variant.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
    }
  }
  clock.end();
  onChange();
}

/** Add a chunk to the variant; whether there is something new to show. */
function take(chunk, variant, clock) {
  if (chunk.usage) clock.exact(chunk.usage.completion_tokens);
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) variant.finish = choice.finish_reason;
  const { content = "", reasoning_content: reasoning = "" } = choice.delta ?? {};
  if (!content && !reasoning) return false;
  variant.content += content ?? "";
  variant.reasoning += reasoning ?? "";
  clock.tick(Boolean(content));
  return true;
}

/** Time to the first token and tokens a second. Chunks are counted until the server tells the tokens. */
class Clock {
  #began = performance.now();
  #first = 0;
  #last = 0;

  constructor(stats) {
    this.stats = stats;
  }

  tick(isContent) {
    this.#last = performance.now();
    this.#first ||= this.#last;
    const { stats } = this;
    stats.tokens += 1;
    stats.first = (this.#first - this.#began) / 1000;
    if (isContent) stats.thought ??= (this.#last - this.#first) / 1000;
    this.#rate();
  }

  exact(tokens) {
    Object.assign(this.stats, { tokens, exact: true });
    this.#rate();
  }

  end() {
    if (this.#first) this.stats.thought ??= (this.#last - this.#first) / 1000;
  }

  // The first token's time is the prompt's: it counts for neither side.
  #rate() {
    const seconds = (this.#last - this.#first) / 1000;
    if (this.stats.tokens > 1 && seconds > 0) this.stats.rate = (this.stats.tokens - 1) / seconds;
  }
}
