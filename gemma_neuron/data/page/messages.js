// Messages as they are shown.

import { copyText, el, flash, iconButton } from "./dom.js";
import { markup } from "./markdown.js";

const ENDS = { length: "cut at the token limit", stopped: "stopped", interrupted: "broken off" };

/** A user's message. `edit` is called to change it. */
export function userView(message, edit) {
  return el("li", { class: "message user" },
    el("h2", { class: "unseen" }, "You"),
    el("div", { class: "bubble" }, message.content),
    el("div", { class: "tools" },
      iconButton("copy", "Copy message", (event) => copied(event, message.content)),
      iconButton("edit", "Edit message", edit)));
}

async function copied(event, text) {
  const button = event.currentTarget;
  flash(button, (await copyText(text)) ? "Copied" : "Not copied");
}

/** An answer that may grow: `update` shows the chosen variant as it is now. */
export class AnswerView {
  #thought = el("div", { class: "thought-text" });
  #summary = el("summary", {}, "Thinking");
  #details = el("details", { class: "thought", hidden: true }, this.#summary, this.#thought);
  #text = el("div", { class: "text" });
  #trouble = el("p", { class: "trouble", hidden: true });
  #stats = el("span", { class: "stats" });
  #tools = el("div", { class: "tools" });
  #cost = 0;
  #next = 0;
  #timer = 0;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = el("li", { class: "message answer" },
      el("h2", { class: "unseen" }, "Answer"), this.#details, this.#text, this.#trouble,
      el("div", { class: "under" }, this.#stats, this.#tools));
    this.update();
  }

  get variant() {
    return this.message.variants[this.message.chosen];
  }

  /** Show it soon: as often as the parsing of a text of this length allows, and a frame at most. */
  grow(shown) {
    if (this.variant.finish !== null) {
      clearTimeout(this.#timer);
      this.#timer = 0;
      this.update();
      shown();
      return;
    }
    this.#timer ||= setTimeout(() => {
      this.#timer = 0;
      this.update();
      shown();
    }, Math.max(this.#next - performance.now(), 16));
  }

  update() {
    const began = performance.now();
    const { variant } = this;
    const busy = variant.finish === null;
    this.node.classList.toggle("busy", busy);
    this.node.setAttribute("aria-busy", String(busy));
    this.#details.hidden = !variant.reasoning;
    this.#thought.textContent = variant.reasoning;
    this.#summary.textContent = busy && !variant.content ? "Thinking…" : `Thought for ${seconds(variant.stats.thought ?? 0)}`;
    this.#text.replaceChildren(markup(variant.content));
    this.#trouble.hidden = !variant.error;
    this.#trouble.textContent = variant.error;
    this.#stats.textContent = statsText(variant);
    this.#tools.replaceChildren(...(busy ? [] : this.#buttons()));
    this.#cost = performance.now() - began;
    this.#next = performance.now() + Math.max(33, 4 * this.#cost);
  }

  #buttons() {
    const { variants, chosen } = this.message;
    const buttons = [iconButton("copy", "Copy answer", (event) => copied(event, this.variant.content))];
    if (this.actions.again) buttons.push(iconButton("again", "Answer again", this.actions.again));
    if (variants.length > 1) {
      const step = (by) => () => this.actions.choose(chosen + by);
      buttons.push(el("span", { class: "variants" },
        iconButton("back", "Previous answer", step(-1), { disabled: chosen === 0 }),
        el("span", {}, `${chosen + 1}/${variants.length}`),
        iconButton("next", "Next answer", step(1), { disabled: chosen === variants.length - 1 })));
    }
    return buttons;
  }
}

export function seconds(value) {
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(0)} h`;
  return `${(value / 86400).toFixed(0)} days`;
}

/** Tokens, speed, time to the first one. What the server has not counted is "about". */
export function statsText({ stats, finish }) {
  if (stats.tokens === 0) return finish === null ? "Reading…" : (ENDS[finish] ?? "");
  const about = stats.exact || finish === null ? "" : "about ";
  const parts = [`${about}${stats.tokens} ${stats.tokens === 1 ? "token" : "tokens"}`];
  if (stats.rate !== null) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats.first !== null) parts.push(`first after ${seconds(stats.first)}`);
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return parts.join(" · ");
}
