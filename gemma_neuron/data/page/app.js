// The page: conversations, one of them shown, answers that may grow in any of them.

import { ask, history, newVariant } from "./answer.js";
import { getJson } from "./api.js";
import { $, announce, copyText, el, iconButton } from "./dom.js";
import { listenToKeys } from "./keys.js";
import { AnswerView, statsText, userView } from "./messages.js";
import { Panels } from "./panels.js";
import { Settings } from "./settings.js";
import { StatusView } from "./status.js";
import * as store from "./store.js";

const SAVE_MS = 1000;
const UNDO_MS = 10000;
const WATCH_MS = { status: 2000, waiting: 1500, calm: 20000 };
const touch = matchMedia("(pointer: coarse)").matches;

class Page {
  #chats = store.chats();
  #chat = store.newChat();
  #running = new Map(); // by conversation: {stop, view}
  #views = [];
  #editing = null;
  #follows = true;
  #model = null;
  #trouble = "";
  #unsaved = false;
  #deleted = null; // {chat, at}: may be taken back for a while
  #watch = 0;
  #status = new StatusView($("status"));
  #settings = new Settings((text) => this.#setSystem(text));
  panels = new Panels();

  start() {
    $("new-chat").onclick = () => this.newChat();
    $("composer").addEventListener("submit", (event) => (event.preventDefault(), this.send()));
    $("stop").onclick = () => this.stop();
    $("edit-cancel").onclick = () => this.#edit(null);
    $("prompt").addEventListener("input", () => this.#fit());
    $("to-end").onclick = () => this.#toEnd();
    $("log").addEventListener("scroll", () => this.#scrolled());
    document.querySelector(".skip").onclick = (event) => (event.preventDefault(), $("prompt").focus());
    addEventListener("hashchange", () => this.#route());
    addEventListener("pagehide", () => this.#running.forEach((_, chat) => store.keep(chat)));
    document.addEventListener("visibilitychange", () => document.hidden || this.#look());
    store.onOtherTab(() => this.#reload());
    $("hint").textContent = touch ? "" : "Enter sends, Shift+Enter begins a line, ? lists the keys.";
    listenToKeys(this);
    this.#route();
    this.#look();
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
      this.#list();
      this.#titles();
      this.#look();
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
    const text = $("prompt").value.trim();
    if (!text || this.#running.has(this.#chat)) return;
    if (this.#model?.phase !== "ready") return announce($("banner").textContent || "The server is not ready.");
    const chat = this.#chat;
    if (this.#editing !== null) chat.messages.length = this.#editing;
    chat.title ||= text.slice(0, 80);
    chat.messages.push({ role: "user", content: text }, { role: "assistant", variants: [], chosen: 0 });
    $("prompt").value = "";
    this.#edit(null);
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
    const running = ask({ model: this.#model.id, messages, settings: this.#settings.value, variant, onChange });
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
    this.#list();
    if (chat === this.#chat) this.#composer();
    announce(variant.error || `Answer ended. ${statsText(variant)}`);
    if (variant.finish === "error") this.#look();
  }

  #edit(index) {
    const had = this.#editing !== null;
    this.#editing = index;
    $("editing").hidden = index === null;
    if (index !== null) $("prompt").value = this.#chat.messages[index].content;
    else if (had) $("prompt").value = "";
    this.#fit();
    if (index !== null || had) $("prompt").focus();
  }

  /** Leave editing; whether there was something to leave. */
  cancelEdit() {
    const had = this.#editing !== null;
    if (had) this.#edit(null);
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
    const deleted = (this.#deleted = { chat, at });
    setTimeout(() => this.#deleted === deleted && this.#forget(), UNDO_MS);
    if (chat === this.#chat) this.newChat();
    this.#list();
    announce("Conversation deleted");
    $("undo").focus();
  }

  #forget() {
    this.#deleted = null;
    this.#list();
  }

  #restore({ chat, at }) {
    this.#deleted = null;
    this.#chats.splice(at, 0, chat);
    this.#keep(chat);
    this.open(chat);
  }

  /** Another tab changed something: take over what this one is not answering in. */
  #reload() {
    const own = new Set([...this.#running.keys()].map((chat) => chat.id));
    const kept = [...this.#running.keys()];
    this.#chats = [...kept, ...store.chats().filter((chat) => !own.has(chat.id))].sort((a, b) => b.changed - a.changed);
    this.#chat = this.#chats.find((chat) => chat.id === this.#chat.id) ?? this.#chat;
    if (!this.onStatus && !this.#running.has(this.#chat)) this.#show();
    else this.#list();
  }

  // --- what is shown ---------------------------------------------------------------------------------

  #show() {
    const { messages } = this.#chat;
    this.#edit(null);
    const last = messages.length - 1;
    this.#views = [];
    $("messages").replaceChildren(...messages.map((message, index) => {
      if (message.role === "user") return userView(message, () => this.#running.has(this.#chat) || this.#edit(index));
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
    this.#list();
    this.#composer();
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

  #composer() {
    const busy = this.#running.has(this.#chat);
    const focused = [$("send"), $("stop")].includes(document.activeElement);
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    if (focused) (busy ? $("stop") : $("prompt")).focus();
    this.#fit();
  }

  #fit() {
    const box = $("prompt");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
    $("send").disabled = !box.value.trim() || this.#model?.phase !== "ready";
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

  #list() {
    const held = document.activeElement?.id === "undo";
    const rows = this.#chats.map((chat) => {
      const current = chat === this.#chat && !this.onStatus;
      const link = el("a", { href: `#chat-${chat.id}`, "aria-current": current ? "page" : null, class: this.#running.has(chat) ? "busy" : "" }, chat.title);
      return el("li", {}, link, iconButton("bin", `Delete ${chat.title}`, () => this.#remove(chat)));
    });
    const deleted = this.#deleted;
    if (deleted) {
      const back = el("button", { id: "undo", type: "button", class: "link", onclick: () => this.#restore(deleted) }, "Undo");
      rows.splice(deleted.at, 0, el("li", { class: "undo" }, el("span", {}, "Deleted"), back));
    }
    $("chats").replaceChildren(...rows);
    if (held) ($("undo") ?? $("prompt")).focus();
  }

  // --- the server ------------------------------------------------------------------------------------

  /** Ask how the server is, now and again after a while: soon where it is waited for or watched. */
  async #look() {
    clearTimeout(this.#watch);
    try {
      const found = await getJson("status");
      this.#trouble = found.phase === "ready" ? "" : `The model is not ready: ${found.phase}.`;
      this.#know({ ...found.model, phase: found.phase });
      if (this.onStatus) this.#status.show(found);
    } catch {
      this.#trouble = "The server cannot be reached.";
      if (this.#model) this.#model.phase = "unreachable";
    }
    this.#banner();
    this.#fit();
    const wait = this.#trouble ? WATCH_MS.waiting : this.onStatus ? WATCH_MS.status : WATCH_MS.calm;
    clearTimeout(this.#watch);
    if (!document.hidden) this.#watch = setTimeout(() => this.#look(), wait);
  }

  #know(model) {
    this.#model = model;
    const badge = $("badge");
    badge.hidden = false;
    badge.textContent = model.validated ? "works" : "unvalidated";
    badge.className = `badge ${model.validated ? "good" : "open"}`;
    badge.setAttribute("aria-label", `Verdict: ${badge.textContent}. Status`);
    $("model").textContent = model.id;
    $("greeting-note").textContent = model.validated
      ? `${model.id} answers here. Conversations stay in this browser.`
      : `${model.id} answers here, unvalidated: its answers have not been found to equal the reference model's. Conversations stay in this browser.`;
    this.#settings.know(model);
    if (!model.chat) this.#trouble ||= "This is a base model without a chat template: it completes text (/v1/completions), it does not chat.";
  }

  #banner() {
    const text = this.#trouble || (this.#unsaved ? "The browser's storage is full or off: this conversation is not kept." : "");
    if ($("banner").textContent !== text) $("banner").textContent = text;
    $("banner").hidden = !text;
  }
}

new Page().start();
