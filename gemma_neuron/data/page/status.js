// The status view: the port's verdict, what serves it, what happened.

import { getJson } from "./api.js";
import { copyText, el, flash } from "./dom.js";
import { seconds } from "./messages.js";

const TONES = { works: "good", pass: "good", ready: "good", fail: "bad", differs: "bad", "matches-but-broken": "bad", down: "bad", failed: "bad" };
const BAD_EVENTS = new Set(["worker_died", "worker_hung", "poisoned", "notice", "mirror_stalled", "owner_lost"]);
const tone = (word) => TONES[word] ?? "open";

export class StatusView {
  #verdict = el("div");
  #live = el("div");
  #port = el("div");
  #events = el("div");
  #shown = new Map();

  constructor(root) {
    root.append(el("div", { class: "sheet" }, this.#verdict, this.#live, this.#port, this.#events, licences()));
  }

  show(found) {
    const { model, port, versions, events, ...live } = found;
    this.#part(this.#verdict, [model, port?.validation], () => verdict(model, port));
    this.#part(this.#live, live, () => [figures(live), replicas(live.replicas)]);
    this.#part(this.#port, [port, versions, model], () => [...portFacts(port, model), versionTable(port?.versions ?? {}, versions)]);
    this.#part(this.#events, events, () => eventList(events));
  }

  /** Build a part anew only when what it shows has changed, so that a selection or the focus in it stays. */
  #part(node, facts, build) {
    const text = JSON.stringify(facts);
    if (this.#shown.get(node) === text) return;
    this.#shown.set(node, text);
    node.replaceChildren(...[build()].flat());
  }
}

function verdict(model, port) {
  const levels = port?.validation?.levels ?? [];
  const failed = levels.find((level) => level.status === "fail");
  const word = model.verdict ?? "unvalidated";
  let text = "This port's answers have not been compared with the reference model's.";
  if (failed) text = `Level ${failed.level}, ${failed.name}: ${failed.reason}`;
  else if (model.validated) text = "The port answers as the reference model does.";
  else if (model.verdict) text = "Validation did not come to a verdict that stands for the port.";
  return el("section", { class: `card verdict ${tone(word)}` },
    el("p", { class: "over" }, "Verdict"), el("h2", {}, word), el("p", {}, text),
    levels.length ? el("ul", { class: "strip" }, levels.map(levelPill)) : null);
}

function levelPill(level) {
  return el("li", { class: tone(level.status), title: level.reason ?? "" }, el("b", {}, String(level.level)), `${level.name} `, el("span", {}, level.status));
}

function figures({ phase, uptime_seconds: uptime, queue, replicas: list }) {
  const sum = (name) => list.reduce((total, replica) => total + replica[name], 0);
  const slots = list.filter((replica) => replica.phase === "ready").reduce((total, replica) => total + replica.slots, 0);
  const figure = (name, value, of = "", mark = "") => el("div", {}, el("dt", {}, name), el("dd", { class: mark }, value, of ? el("small", {}, ` ${of}`) : null));
  return el("dl", { class: "figures" },
    figure("State", phase, "", tone(phase)), figure("Slots busy", String(sum("running")), `of ${slots}`),
    figure("Waiting", String(queue)), figure("Restarts", String(sum("restarts"))), figure("Up for", seconds(Math.round(uptime))));
}

function replicas(list) {
  const head = ["Replica", "State", "Slots", "KV memory", "Restarts", "Process"];
  const rows = list.map((r) => el("tr", {},
    el("th", { scope: "row" }, String(r.index)),
    el("td", {}, el("span", { class: `state ${tone(r.phase)}` }, r.phase), el("small", {}, ` ${seconds(Math.round(r.seconds))}`)),
    el("td", {}, pips(r.running, r.slots)),
    el("td", {}, share(r.kv_tokens, r.kv_capacity)),
    el("td", {}, String(r.restarts)), el("td", {}, r.pid ? String(r.pid) : "none")));
  return section("Replicas", table("Replicas", head, rows));
}

function pips(running, slots) {
  if (slots > 32) return `${running} of ${slots}`;
  const dots = Array.from({ length: slots }, (_, i) => el("i", { class: i < running ? "on" : "" }));
  return el("span", { class: "pips", role: "img", "aria-label": `${running} of ${slots} slots busy` }, dots);
}

function share(used, all) {
  if (!all) return "none";
  const part = used / all;
  const meter = el("meter", { min: 0, max: 1, value: part, "aria-label": `${used} of ${all} positions` });
  return el("span", { class: "share" }, meter, `${(100 * part).toFixed(0)} %`);
}

function portFacts(port, model) {
  if (!port) return [];
  const { source, shape } = port;
  const rows = [
    ["Model", model.id], ["Source", `${source.uri}${source.revision ? ` at ${source.revision}` : ""} (${source.kind})`],
    ["Port digest", digest(port.digest)],
    ...Object.entries(shape).map(([name, value]) => [words(name), plain(value)]),
  ];
  const prints = Object.entries(port.fingerprints).map(([name, value]) => [`Digest of ${name}`, value ? digest(value) : "none"]);
  const warnings = [...port.warnings, ...(port.validation?.warnings ?? [])].map((text) => el("p", { class: "warning" }, text));
  return [section("Port", ...warnings, facts(rows), el("details", {}, el("summary", {}, "Fingerprints"), facts(prints)))];
}

const words = (name) => ({ tp: "Tensor parallel", dtype: "Data type", max_context: "Context" })[name] ?? name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");
const plain = (value) => (Array.isArray(value) ? value.join(", ") : typeof value === "boolean" ? (value ? "yes" : "no") : String(value));

function digest(value) {
  const button = el("button", { type: "button", class: "link", "aria-label": `Copy ${value}`, onclick: async () => flash(button, (await copyText(value)) ? "Copied" : "Not copied") }, "Copy");
  return el("span", { class: "digest" }, el("code", {}, value), button);
}

function facts(rows) {
  return el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function versionTable(made, running) {
  const names = [...new Set([...Object.keys(running), ...Object.keys(made)])];
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, made[name] ?? "–"), el("td", {}, running[name] ?? "–")));
  return section("Versions", table("Versions", ["", "Port made with", "Server runs"], rows));
}

function eventList(events) {
  if (!events.length) return section("Events", el("p", { class: "soft" }, "Nothing has happened to this port."));
  const item = ({ time, event, ...rest }) => el("li", { class: BAD_EVENTS.has(event) ? "bad" : "" },
    el("time", {}, typeof time === "number" ? new Date(time * 1000).toLocaleString() : ""), el("b", {}, words(String(event ?? "event"))),
    el("span", {}, Object.entries(rest).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ")));
  return section("Events", el("ol", { class: "events" }, events.map(item)));
}

function section(title, ...children) {
  return el("section", { class: "card" }, el("h3", {}, title), children);
}

function table(name, head, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": name },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((text) => (text ? el("th", { scope: "col" }, text) : el("td"))))), el("tbody", {}, rows)));
}

function licences() {
  const note = el("p", { class: "soft licences" });
  const link = ({ name, version }) => el("a", { href: `page/vendor/${name}.LICENSE.txt`, target: "_blank", rel: "noopener" }, `${name} ${version}`);
  getJson("page/vendor/versions.json").then(
    ({ packages }) => note.append("This page uses ", ...packages.flatMap((one, i) => [i ? " and " : "", link(one)]), "."),
    () => {}, // the page's own file: gone with the server, which the banner says
  );
  return note;
}
