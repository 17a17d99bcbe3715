// Elements, by script: text is always text, never markup.

export const $ = (id) => document.getElementById(id);

/** An element. Properties whose names begin with "on" are listeners; null and false ones are left out. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A small button that shows an icon and is named for those who do not see it. */
export function iconButton(name, label, onclick, properties = {}) {
  return el("button", { type: "button", class: "small", "aria-label": label, title: label, onclick, ...properties }, icon(name));
}

/** Told to screen readers, shown to nobody. */
export function announce(text) {
  $("announcer").textContent = text;
}

/** Copy text; the clipboard's own interface is missing where the address is no secure one (plain http to another host). */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed here: the older way may be
    }
  }
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  const good = document.execCommand("copy");
  area.remove();
  before?.focus();
  return good;
}

/** Show on a button, for a moment, what it did. Its name stays; screen readers are told. */
export function flash(button, text) {
  announce(text);
  button.classList.add("done");
  const words = button.querySelector("svg") ? null : button.textContent;
  if (words !== null) button.textContent = text;
  setTimeout(() => {
    button.classList.remove("done");
    if (words !== null) button.textContent = words;
  }, 1200);
}
