// The settings panel: what a request carries beyond its messages.

import { $ } from "./dom.js";
import * as store from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export class Settings {
  value = store.settings();

  /** `onSystem` gets the system prompt as it is typed. */
  constructor(onSystem) {
    this.#apply();
    for (const name of NUMBERS) $(name).addEventListener("input", () => this.#number(name));
    $("system").addEventListener("input", () => onSystem($("system").value));
    $("thinking").addEventListener("change", () => this.#set({ thinking: $("thinking").checked }));
    $("theme").addEventListener("change", () => this.#set({ theme: $("theme").value }));
    $("settings-form").addEventListener("submit", (event) => event.preventDefault());
    $("settings-reset").addEventListener("click", () => {
      this.#set({ sampling: {} });
      this.#apply();
    });
  }

  /** The served model's own settings, shown where a field is empty. */
  know(model) {
    for (const [name, value] of Object.entries(model.defaults)) $(name).placeholder = String(value);
    $("max_tokens").placeholder = model.max_context ? `up to ${model.max_context}` : "";
    $("seed").placeholder = "random";
    $("thinking-field").hidden = !model.thinking;
    if (!model.thinking) this.value.thinking = false;
  }

  showSystem(text) {
    $("system").value = text;
  }

  #set(change) {
    Object.assign(this.value, change);
    store.keepSettings(this.value);
    this.#theme();
  }

  /** A field that says what the server would refuse is named and left out. */
  #number(name) {
    const field = $(name);
    const good = field.validity.valid;
    field.setAttribute("aria-invalid", String(!good));
    const sampling = { ...this.value.sampling };
    if (good && field.value !== "") sampling[name] = Number(field.value);
    else delete sampling[name];
    this.#set({ sampling });
    this.#trouble();
  }

  #trouble() {
    const wrong = NUMBERS.map($).find((field) => !field.validity.valid);
    $("settings-trouble").hidden = !wrong;
    if (wrong) $("settings-trouble").textContent = `${wrong.labels[0].textContent}: ${wrong.validationMessage} It is not sent.`;
  }

  #apply() {
    for (const name of NUMBERS) {
      const value = this.value.sampling[name];
      $(name).value = typeof value === "number" ? String(value) : "";
      $(name).setAttribute("aria-invalid", "false");
    }
    this.#trouble();
    $("thinking").checked = Boolean(this.value.thinking);
    $("theme").value = ["light", "dark"].includes(this.value.theme) ? this.value.theme : "";
    this.#theme();
  }

  #theme() {
    document.documentElement.dataset.theme = $("theme").value;
  }
}
