// The page: conversations, one of them shown, answers that may grow in any of them.

import { ask, history, newVariant } from "./answer.js";
import { Composer } from "./composer.js";
import { $, announce, copyText } from "./dom.js";
import { listenToKeys } from "./keys.js";
import { ChatList } from "./list.js";
import { AnswerView, statsText, userView } from "./messages.js";
import { Panels } from "./panels.js";
import { Settings } from "./settings.js";
import { StatusView } from "./status.js";
import * as store from "./store.js";
import { Watch } from "./watch.js";

const SAVE_MS = 1000;
const touch = matchMedia("(pointer: coarse)").matches;

class Page {
  #chats = store.chats();
  #chat = store.newChat();
  #running = new Map(); // by conversation: {stop, done}
  #views = [];
  #follows = true;
  #unsaved = false;
  #list = new ChatList({ remove: (chat) => this.#remove(chat), restore: (chat, at) => this.#restore(chat, at) });
  #watch = new Watch(() => this.#looked(), () => this.onStatus);
  #composer = new Composer({ send: () => this.send(), stop: () => this.stop(), ready: () => this.#watch.ready });
  #status = new StatusView($("status"));
  #settings = new Settings((text) => this.#setSystem(text));
  panels = new Panels();

  start() {
    $("new-chat").onclick = () => this.newChat();
    $("to-end").onclick = () => this.#toEnd();
    $("log").addEventListener("scroll", () => this.#scrolled());
    document.querySelector(".skip").onclick = (event) => (event.preventDefault(), $("prompt").focus());
    addEventListener("hashchange", () => this.#route());
    addEventListener("pagehide", () => this.#running.forEach((_, chat) => store.keep(chat)));
    store.onOtherTab((id) => this.#reload(id));
    $("hint").textContent = touch ? "" : "Enter sends, Shift+Enter begins a line, ? lists the keys.";
    listenToKeys(this);
    this.#route();
    this.#watch.look();
  }

  // --- where one is ----------------------------------------------------------------------------------

  get onStatus() {
    return location.hash === "#status";
  }

  #route() {
    const { onStatus } = this;
    $("chat").hidden = onStatus;
    $("status").hidden = !onStatus;
    $("to-status").toggleAttribute("aria-current", onStatus);
    const id = location.hash.startsWith("#chat-") ? location.hash.slice(6) : null;
    const found = this.#chats.find((chat) => chat.id === id);
    if (found && found !== this.#chat) this.#chat = found;
    if (!onStatus) this.#show();
    else {
      this.#showList();
      this.#titles();
      this.#watch.look();
      $("status").focus();
    }
    this.panels.close("sidebar");
  }

  /** Show a conversation, from wherever one is. */
  open(chat) {
    this.#chat = chat;
    const hash = this.#chats.includes(chat) ? `#chat-${chat.id}` : "#";
    if (location.hash !== hash && `${location.hash}#` !== hash) location.hash = hash;
    else this.#route();
    if (!touch) $("prompt").focus();
  }

  newChat() {
    this.open(store.newChat(this.#chat.system));
  }

  toStatus() {
    if (this.onStatus) this.open(this.#chat);
    else location.hash = "#status";
  }

  /** The conversation `by` places further down the list. */
  step(by) {
    const at = this.#chats.indexOf(this.#chat);
    const next = at < 0 ? 0 : at + by;
    if (this.#chats[next]) this.open(this.#chats[next]);
  }

  // --- what is said ----------------------------------------------------------------------------------

  send() {
    const { text, editing } = this.#composer;
    if (!text || this.#running.has(this.#chat)) return;
    if (!this.#watch.ready) return announce(this.#watch.trouble);
    const chat = this.#chat;
    if (editing !== null) chat.messages.length = editing;
    chat.title ||= text.slice(0, 80);
    chat.messages.push({ role: "user", content: text }, { role: "assistant", variants: [], chosen: 0 });
    this.#composer.clear();
    this.#answer(chat);
  }

  /** Another answer to the last message; the ones before stay reachable. */
  again() {
    if (this.#running.has(this.#chat) || this.#chat.messages.at(-1)?.role !== "assistant" || this.onStatus) return;
    this.#answer(this.#chat);
  }

  stop() {
    this.#running.get(this.#chat)?.stop();
    return this.#running.has(this.#chat);
  }

  async copyLast() {
    const last = this.#chat.messages.at(-1);
    if (last?.variants) announce((await copyText(last.variants[last.chosen].content)) ? "Copied" : "Not copied");
  }

  #answer(chat) {
    const message = chat.messages.at(-1);
    const messages = history(chat, chat.messages.length - 1);
    const variant = newVariant();
    message.chosen = message.variants.push(variant) - 1;
    let kept = performance.now();
    const onChange = () => {
      this.#views.find((view) => view.message === message)?.grow(() => this.#grown(chat));
      if (performance.now() - kept > SAVE_MS) {
        kept = performance.now();
        this.#keep(chat);
      }
    };
    const running = ask({ model: this.#watch.found.model.id, messages, settings: this.#settings.value, variant, onChange });
    this.#running.set(chat, running);
    running.done.then(() => this.#ended(chat, variant));
    this.#touched(chat);
    this.#follows = true;
    if (chat === this.#chat) this.open(chat);
    announce("Answering");
  }

  #ended(chat, variant) {
    this.#running.delete(chat);
    this.#keep(chat);
    this.#showList();
    if (chat === this.#chat) this.#composer.answering(false);
    announce(variant.error || `Answer ended. ${statsText(variant)}`);
    if (variant.finish === "error") this.#watch.look();
  }

  /** Leave editing; whether there was something to leave. */
  cancelEdit() {
    const had = this.#composer.editing !== null;
    if (had) this.#composer.edit(null);
    return had;
  }

  #setSystem(text) {
    this.#chat.system = text;
    if (this.#chat.messages.length) this.#keep(this.#chat);
    this.#system();
  }

  // --- what is kept ----------------------------------------------------------------------------------

  #touched(chat) {
    chat.changed = Date.now();
    this.#chats = [chat, ...this.#chats.filter((other) => other !== chat)];
    this.#keep(chat);
  }

  #keep(chat) {
    this.#unsaved = this.#chats.includes(chat) && !store.keep(chat);
    this.#banner();
  }

  #remove(chat) {
    this.#running.get(chat)?.stop();
    const at = this.#chats.indexOf(chat);
    this.#chats = this.#chats.filter((other) => other !== chat);
    store.remove(chat);
    if (chat === this.#chat) this.newChat();
    this.#showList();
    this.#list.deleted(chat, at);
  }

  #restore(chat, at) {
    this.#chats.splice(at, 0, chat);
    this.#keep(chat);
    this.open(chat);
  }

  /** Another tab changed a conversation, or all: take over what this one is not answering in. */
  #reload(id) {
    const own = [...this.#running.keys()];
    const others = store.chats().filter((chat) => !own.some((mine) => mine.id === chat.id));
    this.#chats = [...own, ...others].sort((a, b) => b.changed - a.changed);
    if (this.#running.has(this.#chat) || (id !== null && id !== this.#chat.id)) return this.#showList();
    this.#chat = this.#chats.find((chat) => chat.id === this.#chat.id) ?? this.#chat;
    return this.onStatus ? this.#showList() : this.#show();
  }

  // --- what is shown ---------------------------------------------------------------------------------

  #show() {
    const { messages } = this.#chat;
    this.#composer.edit(null);
    const last = messages.length - 1;
    this.#views = [];
    $("messages").replaceChildren(...messages.map((message, index) => {
      if (message.role === "user") return userView(message, () => this.#running.has(this.#chat) || this.#composer.edit(index, message.content));
      const view = new AnswerView(message, {
        again: index === last ? () => this.again() : null,
        choose: (place) => {
          message.chosen = place;
          this.#keep(this.#chat);
          view.update();
        },
      });
      this.#views.push(view);
      return view.node;
    }));
    $("empty").hidden = messages.length > 0;
    this.#settings.showSystem(this.#chat.system);
    this.#system();
    this.#titles();
    this.#showList();
    this.#composer.answering(this.#running.has(this.#chat));
    this.#toEnd();
  }

  #system() {
    const text = this.#chat.system.trim();
    $("system-line").hidden = !text;
    $("system-line").textContent = `System: ${text}`;
  }

  #titles() {
    const title = this.onStatus ? "Status" : this.#chat.title || "New chat";
    $("title").textContent = title;
    document.title = `${title} – gemma-neuron`;
  }

  #grown(chat) {
    if (chat !== this.#chat) return;
    if (this.#follows) this.#toEnd();
    else this.#scrolled();
  }

  #toEnd() {
    $("log").scrollTop = $("log").scrollHeight;
    this.#scrolled();
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = $("log");
    this.#follows = scrollHeight - scrollTop - clientHeight < 40;
    $("to-end").hidden = this.#follows;
  }

  #showList() {
    this.#list.show(this.#chats, this.onStatus ? null : this.#chat, this.#running);
  }

  // --- the server ------------------------------------------------------------------------------------

  #looked() {
    const { found, reached } = this.#watch;
    if (found && reached) {
      this.#know(found.model);
      if (this.onStatus) this.#status.show(found);
    }
    this.#banner();
    this.#composer.fit();
  }

  #know(model) {
    const badge = $("badge");
    badge.hidden = false;
    badge.textContent = model.validated ? "works" : "unvalidated";
    badge.className = `badge ${model.validated ? "good" : "open"}`;
    badge.setAttribute("aria-label", `Verdict: ${badge.textContent}. Status`);
    $("model").textContent = model.id;
    const caution = model.validated ? "" : ", unvalidated: its answers have not been found to equal the reference model's";
    $("greeting-note").textContent = `${model.id} answers here${caution}. Conversations stay in this browser.`;
    this.#settings.know(model);
  }

  #banner() {
    const text = this.#watch.trouble || (this.#unsaved ? "The browser's storage is full or off: this conversation is not kept." : "");
    if ($("banner").textContent !== text) $("banner").textContent = text;
    $("banner").hidden = !text;
  }
}

new Page().start();
