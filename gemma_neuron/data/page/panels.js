// Side panels: beside the chat where there is room, over it where there is not.

import { $ } from "./dom.js";

const NARROW = { sidebar: matchMedia("(max-width: 52rem)"), settings: matchMedia("(max-width: 72rem)") };
const BUTTONS = { sidebar: "menu", settings: "to-settings" };

export class Panels {
  constructor() {
    $("menu").onclick = () => this.toggle("sidebar");
    $("to-settings").onclick = () => this.toggle("settings");
    $("settings-close").onclick = () => this.close("settings");
    $("scrim").onclick = () => this.closeOver();
    $("to-keys").onclick = () => this.keys();
    $("keys-close").onclick = () => $("keys-dialog").close();
    for (const query of Object.values(NARROW)) query.addEventListener("change", () => this.#cover());
  }

  isOpen(name) {
    return $("app").classList.contains(`with-${name}`);
  }

  toggle(name) {
    if (this.isOpen(name)) this.close(name);
    else this.#open(name);
  }

  #open(name) {
    $("app").classList.add(`with-${name}`);
    if (name === "settings") $(name).hidden = false;
    $(BUTTONS[name]).setAttribute("aria-expanded", "true");
    this.#cover();
    ($(name).querySelector("textarea") ?? $(name).querySelector("button")).focus();
  }

  close(name) {
    if (!this.isOpen(name)) return false;
    const inside = $(name).contains(document.activeElement);
    $("app").classList.remove(`with-${name}`);
    if (name === "settings") $(name).hidden = true;
    $(BUTTONS[name]).setAttribute("aria-expanded", "false");
    this.#cover();
    if (inside) $(BUTTONS[name]).focus();
    return true;
  }

  /** Close what lies over the chat; whether there was something. */
  closeOver() {
    const over = Object.keys(NARROW).filter((name) => NARROW[name].matches && this.isOpen(name));
    over.forEach((name) => this.close(name));
    return over.length > 0;
  }

  keys() {
    $("keys-dialog").showModal();
  }

  /** What lies under a panel is out of reach. */
  #cover() {
    const over = Object.keys(NARROW).filter((name) => NARROW[name].matches && this.isOpen(name));
    $("main").inert = over.length > 0;
    $("app").classList.toggle("covered", over.length > 0);
  }
}
