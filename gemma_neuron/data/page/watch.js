// How the server is: asked now and then, often where it is waited for or looked at.

import { getJson } from "./api.js";

const EVERY_MS = { looked: 2000, waited: 1500, calm: 20000 };
const PHASES = {
  starting: "The server is starting.",
  loading: "The model is being loaded.",
  recovering: "The model went down and is being brought back.",
  draining: "The server is ending: answers under way are finished, none is begun.",
  failed: "The model went down for good. The server's log says why.",
};

export class Watch {
  #timer = 0;

  /** The document of `/status`, the last one while the server cannot be reached; null before the first. */
  found = null;
  reached = true;

  /** `onLook` is called after each look; `isLooked` says whether somebody looks at the status. */
  constructor(onLook, isLooked) {
    this.onLook = onLook;
    this.isLooked = isLooked;
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
  }

  get ready() {
    return this.reached && this.found?.phase === "ready";
  }

  /** Why nothing can be asked now, for people; empty when it can. */
  get trouble() {
    if (!this.reached) return "The server cannot be reached.";
    if (this.found && !this.ready) return PHASES[this.found.phase] ?? `The model is not ready: ${this.found.phase}.`;
    if (this.found && !this.found.model.chat) return "This is a base model without a chat template: it completes text (/v1/completions), it does not chat.";
    return "";
  }

  async look() {
    clearTimeout(this.#timer);
    try {
      this.found = await getJson("status");
      this.reached = true;
    } catch {
      this.reached = false;
    }
    this.onLook();
    clearTimeout(this.#timer);
    const wait = this.isLooked() ? EVERY_MS.looked : this.ready ? EVERY_MS.calm : EVERY_MS.waited;
    if (!document.hidden) this.#timer = setTimeout(() => this.look(), wait);
  }
}
