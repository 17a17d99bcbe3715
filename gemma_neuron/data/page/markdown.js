// A model's text as markup. markdown-it parses it with HTML switched off, DOMPurify keeps a short list of elements of what
// that made, and the policy the page is served with stands behind both. No images: one from elsewhere would tell
// whoever the text names that it was read.

import { copyText, el, flash } from "./dom.js";

const TAGS = "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s strong table tbody td th thead tr ul".split(" ");
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const CLEAN = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "class", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: SAFE_LINK,
  RETURN_DOM_FRAGMENT: true,
};
const SIDES = ["left", "center", "right"];

const md = window.markdownit({ html: false, linkify: true, breaks: true });
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
md.validateLink = (url) => SAFE_LINK.test(url.trim());

md.renderer.rules.image = (tokens, index) => {
  const { escapeHtml } = md.utils;
  const address = tokens[index].attrGet("src") ?? "";
  return `<a href="${escapeHtml(address)}">Image: ${escapeHtml(tokens[index].content || address)}</a>`;
};
// The parser writes a column's side as a style, which the policy forbids.
md.renderer.rules.th_open = md.renderer.rules.td_open = (tokens, index, options, env, self) => {
  const token = tokens[index];
  const style = token.attrGet("style") ?? "";
  token.attrs = (token.attrs ?? []).filter(([name]) => name !== "style");
  const side = SIDES.find((name) => style.endsWith(name));
  if (side) token.attrJoin("class", side);
  return self.renderToken(tokens, index, options);
};

/** The text as elements that run nothing and load nothing. */
export function markup(text) {
  const clean = window.DOMPurify.sanitize(md.render(text), CLEAN);
  for (const link of clean.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.href;
  }
  for (const table of clean.querySelectorAll("table")) {
    const frame = el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of clean.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const node of clean.querySelectorAll("[class]")) {
    if (!node.closest(".code") && !SIDES.includes(node.className)) node.removeAttribute("class");
  }
  return clean;
}

function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /^language-(\S{1,30})/.exec(code.className)?.[1] ?? "";
  const text = code.textContent.replace(/\n$/, "");
  const copy = el("button", { type: "button", class: "link", onclick: async () => flash(copy, (await copyText(text)) ? "Copied" : "Not copied") }, "Copy");
  copy.setAttribute("aria-label", language ? `Copy ${language} code` : "Copy code");
  const body = el("pre", { tabindex: "0", role: "group", "aria-label": language ? `${language} code` : "Code" }, el("code", {}, text));
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, language || "code"), copy), body);
}
