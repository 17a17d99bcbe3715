// The server: its API with the key it may ask for, and answers as they stream.

import { $ } from "./dom.js";

const KEY = "gemma-neuron.key";
let asking = null;

/** fetch of a path beside the page's own, with the key; asks for one where the server does. */
export async function request(path, init = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...init.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...init, headers });
    if (answer.status !== 401) return answer;
    // Another call may have brought a new key meanwhile.
    if (sessionStorage.getItem(KEY) === key) await askKey(key !== null);
  }
}

/** One dialog for all calls that wait for a key. */
function askKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-trouble").hidden = !wrong;
    const stay = (event) => event.preventDefault(); // nothing works without a key
    const take = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("key").value.trim());
      $("key").value = "";
      dialog.removeEventListener("cancel", stay);
      dialog.close();
      asking = null;
      resolve();
    };
    dialog.addEventListener("cancel", stay);
    $("key-form").addEventListener("submit", take, { once: true });
    dialog.showModal();
  });
  return asking;
}

export class ApiError extends Error {}

async function checked(answer) {
  if (answer.ok) return answer;
  let text = `The server answered ${answer.status}.`;
  try {
    text = (await answer.json()).error.message;
  } catch {
    // not ours: a proxy's page
  }
  throw new ApiError(text);
}

export async function getJson(path) {
  return (await checked(await request(path, { cache: "no-store" }))).json();
}

/**
 * Stream a chat. `onChunk` gets each chunk of OpenAI's form; resolves at the end of the answer.
 * Throws ApiError with the server's words, AbortError when stopped.
 */
export async function streamChat(body, { signal, onChunk }) {
  const init = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal };
  const answer = await checked(await request("v1/chat/completions", init));
  let ended = false;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    onChunk(chunk);
  }
  if (!ended) throw new ApiError("The connection ended before the answer did.");
}

/** The data of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (data.length) yield data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}
