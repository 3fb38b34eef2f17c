// Server-sent events over fetch, which can send a key: EventSource cannot.

import { askForKey, headers, problem } from "./key.js";

const LONGEST_PAUSE = 10_000;

// The JSON events of an answer, until it ends.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Keeps a stream open for ever. Returns a function that opens it anew.
export function keepOpen(path, onEvent, onStatus) {
  let controller = new AbortController();
  run();
  return () => controller.abort();

  async function run() {
    let pause = 500;
    for (;;) {
      controller = new AbortController();
      try {
        const response = await fetch(path, { headers: headers(), signal: controller.signal });
        if (response.status === 401) {
          onStatus("a key is needed");
          await askForKey("This server needs an API key.");
          continue;
        }
        if (!response.ok) throw new Error(await problem(response));
        onStatus("live");
        pause = 500;
        for await (const event of events(response)) onEvent(event);
        onStatus("the server has closed the stream");
      } catch (error) {
        if (controller.signal.aborted) continue;
        onStatus(`not connected: ${error.message}`);
      }
      await new Promise(resolve => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }
}
