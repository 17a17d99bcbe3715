// The list of conversations, and the one that was deleted as long as it can be taken back.

import { $, announce, el, iconButton } from "./dom.js";

const UNDO_MS = 10000;

export class ChatList {
  #deleted = null; // {chat, at}
  #last = null;

  /** `remove` and `restore` get a conversation, `restore` its place too. */
  constructor({ remove, restore }) {
    this.remove = remove;
    this.restore = restore;
  }

  /** Show all of them; `busy` are those with an answer under way. */
  show(chats, current, busy) {
    this.#last = [chats, current, busy];
    const held = document.activeElement?.id === "undo";
    const rows = chats.map((chat) => this.#row(chat, chat === current, busy.has(chat)));
    if (this.#deleted) rows.splice(this.#deleted.at, 0, this.#undo(this.#deleted));
    $("chats").replaceChildren(...rows);
    if (held) ($("undo") ?? $("prompt")).focus();
  }

  /** Offer to take it back, for a while. */
  deleted(chat, at) {
    const deleted = (this.#deleted = { chat, at });
    setTimeout(() => this.#deleted === deleted && this.#forget(), UNDO_MS);
    this.show(...this.#last);
    announce("Conversation deleted");
    $("undo").focus();
  }

  #forget() {
    this.#deleted = null;
    this.show(...this.#last);
  }

  #row(chat, current, busy) {
    const link = el("a", { href: `#chat-${chat.id}`, "aria-current": current ? "page" : null, class: busy ? "busy" : "" }, chat.title);
    return el("li", {}, link, iconButton("bin", `Delete ${chat.title}`, () => this.remove(chat)));
  }

  #undo({ chat, at }) {
    const back = () => {
      this.#deleted = null;
      this.restore(chat, at);
    };
    return el("li", { class: "undo" }, el("span", {}, "Deleted"), el("button", { id: "undo", type: "button", class: "link", onclick: back }, "Undo"));
  }
}
