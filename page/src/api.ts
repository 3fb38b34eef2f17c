// Requests to the server: the key, streams of events, and errors in words.

import { signal } from "@preact/signals";
import { note, recall } from "./database";

const NAME = "kvllm-keys";

// name: the server's, "" until it has told it. remembers: until the tab is closed; else until the page is left.
export interface Key { name: string; value: string; remembers: boolean }

// Those that were given; requests carry the first one.
export const keys = signal<Key[]>(remembered());
// Why a key is asked for; null while none is.
export const keyWanted = signal<string | null>(null);
let waiting: (() => void)[] = [];

function remembered(): Key[] {
  try { return JSON.parse(recall(NAME) ?? "[]"); } catch { return []; }
}

function set(list: Key[]) {
  keys.value = list;
  note(NAME, JSON.stringify(list.filter(key => key.remembers)));
}

const others = (key: Key) => keys.value.filter(each => each.value !== key.value);

export function useKey(key: Key) {
  set([key, ...others(key)]);
  closeKey();
}

export const forgetKey = (key: Key) => set(others(key));

// The server has told the name of the key in use.
export function nameKey(name: string) {
  const [used] = keys.value;
  if (used && used.name !== name) set([{ ...used, name }, ...keys.value.slice(1)]);
}

export function closeKey() {
  keyWanted.value = null;
  waiting.forEach(resolve => resolve());
  waiting = [];
}

// Lets the user give or choose a key; resolves when that is done.
export function askForKey(note: string): Promise<void> {
  keyWanted.value = note;
  return new Promise(resolve => waiting.push(resolve));
}

// of: the name of a key other than the one in use, if it is known.
function headers(given: Record<string, string> = {}, of?: string): Record<string, string> {
  const key = (of && keys.value.find(each => each.name === of)) || keys.value[0];
  // A header takes bytes alone; the server knows no key with other characters, and says so.
  return key ? { ...given, Authorization: `Bearer ${key.value.replace(/[^\x20-\xff]/g, "?")}` } : given;
}

// What went wrong, in words with what to do. isPassing: whether the same request may succeed later.
export class Problem extends Error {
  constructor(message: string, readonly status: number, readonly isPassing: boolean) { super(message); }
}

const UNREACHABLE = "The server cannot be reached. See whether it is running, then try again.";

export interface Options extends RequestInit { headers?: Record<string, string>; key?: string }

// key: the name of the key that the request needs, if it is not the one in use.
export async function call(path: string, options: Options = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers, options.key) });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem(UNREACHABLE, 0, true);
  }
  if (response.ok) return response;
  throw await problem(response);
}

async function problem(response: Response): Promise<Problem> {
  let message = `The server answered with status ${response.status}.`;
  try { message = (await response.json()).error.message; } catch { /* not the server's own error */ }
  const wait = Number(response.headers.get("Retry-After"));
  return new Problem(inWords(response.status, message, wait), response.status, response.status >= 500);
}

export function inWords(status: number, message: string, wait = 0): string {
  if (status === 401) return "This server needs an API key, and got none that it knows: give one with “Key” above.";
  if (status === 503) return `The server takes no requests now. Try again ${wait ? `in ${wait} s` : "soon"}. (${message})`;
  if (status === 413) return `This is too much text for one request: attach less. (${message})`;
  if (status === 400 && /context|too long|max_model_len|at most \d+ tokens/i.test(message)) {
    return `This is too long for the model: start a new chat, attach less, or lower “Most tokens” in Settings. (${message})`;
  }
  return message;
}

export interface Event { id: number | null; data: any }

// The JSON events of an answer, until it ends.
export async function* events(response: Response): AsyncGenerator<Event> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop()!;
      for (const part of parts) {
        let data: any = null, id: number | null = null;
        for (const line of part.split("\n")) {
          if (line.startsWith("data: ")) data = line === "data: [DONE]" ? "done" : JSON.parse(line.slice(6));
          else if (line.startsWith("id: ")) id = Number(line.slice(4));
        }
        if (data !== null) yield { id, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
