// The keyboard: every action without a pointer. Letters by their place on the keyboard, since Alt changes what they type.

import { $ } from "./dom.js";

const touch = matchMedia("(pointer: coarse)").matches;

export function listenToKeys(page) {
  const withAlt = {
    KeyN: () => page.newChat(),
    KeyR: () => page.again(),
    KeyC: () => page.copyLast(),
    KeyS: () => page.toStatus(),
    Comma: () => page.panels.toggle("settings"),
    ArrowUp: () => page.step(-1),
    ArrowDown: () => page.step(1),
  };
  $("prompt").addEventListener("keydown", (event) => {
    // On a touch keyboard Enter is the only way to begin a line; while an input method composes, it ends the word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch) return;
    event.preventDefault();
    page.send();
  });
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (event.altKey && !event.ctrlKey && !event.metaKey && withAlt[event.code]) {
      event.preventDefault();
      withAlt[event.code]();
    } else if (event.key === "Escape" && !event.isComposing) escape(page);
    else if (plain && !writing(event.target) && event.key === "/") {
      event.preventDefault();
      if (page.onStatus) page.toStatus();
      $("prompt").focus();
    } else if (plain && !writing(event.target) && event.key === "?") page.panels.keys();
  });
}

/** One thing at a time, the nearest first. */
function escape(page) {
  if (page.panels.closeOver() || page.cancelEdit() || page.stop()) return;
  if ($("settings").contains(document.activeElement)) page.panels.close("settings");
}

function writing(target) {
  return target.matches("textarea, input, select");
}
