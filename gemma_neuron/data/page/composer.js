// Where a message is written: the field that grows with it, send or stop, and the message that is being edited.

import { $ } from "./dom.js";

export class Composer {
  #ready = () => false;

  /** The place of the message that is edited, or null. */
  editing = null;

  /** `ready` says whether a message can be sent now. */
  constructor({ send, stop, ready }) {
    this.#ready = ready;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    $("stop").onclick = stop;
    $("edit-cancel").onclick = () => this.edit(null);
    $("prompt").addEventListener("input", () => this.fit());
  }

  get text() {
    return $("prompt").value.trim();
  }

  clear() {
    $("prompt").value = "";
    this.edit(null);
  }

  /** Take the message at a place to be written anew; null leaves it as it was. */
  edit(place, text = "") {
    const had = this.editing !== null;
    this.editing = place;
    $("editing").hidden = place === null;
    if (place !== null || had) {
      $("prompt").value = text;
      $("prompt").focus();
    }
    this.fit();
  }

  /** Stop in place of send while an answer grows. The focus stays where the button was. */
  answering(busy) {
    const focused = [$("send"), $("stop")].includes(document.activeElement);
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    if (focused) (busy ? $("stop") : $("prompt")).focus();
    this.fit();
  }

  /** As high as its text, and a button that is on when it would do something. */
  fit() {
    const box = $("prompt");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
    $("send").disabled = !this.text || !this.#ready();
  }
}
