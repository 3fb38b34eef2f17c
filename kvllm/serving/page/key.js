// The API key of this tab, and requests that carry it.

import { byId } from "./dom.js";

const NAME = "kvllm-key";
let asked = null;

export function headers(others = {}) {
  const key = sessionStorage.getItem(NAME);
  return key ? { ...others, Authorization: `Bearer ${key}` } : others;
}

// Lets the user type a key; resolves when one was given.
export function askForKey(note) {
  asked ??= new Promise(resolve => {
    const dialog = byId("key-dialog");
    byId("key-note").textContent = note;
    byId("key").value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => { asked = null; resolve(); }, { once: true });
  });
  return asked;
}

export function setUpKey(onChange) {
  byId("key-form").addEventListener("submit", event => {
    event.preventDefault();
    sessionStorage.setItem(NAME, byId("key").value.trim());
    byId("key-dialog").close();
  });
  byId("change-key").addEventListener("click", async () => {
    await askForKey("The key stays in this tab until it is closed.");
    onChange();
  });
}

// The message of an answer that is an error.
export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}
