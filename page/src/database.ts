// The history of conversations, in the browser's own database; other tabs hear of changes.

import type { Conversation } from "./model";

const STORE = "conversations";
const channel = new BroadcastChannel("kvllm");
// An answer that is stopped because its conversation goes is not to bring that back.
const forgotten = new Set<string>();
let opened: Promise<IDBDatabase> | null = null;

function open(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("kvllm", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function run<T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const transaction = (await open()).transaction(STORE, mode);
  const request = work(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

// What this tab remembers until it is closed. A browser that keeps nothing raises an error at the mere name.
export function recall(name: string): string | null {
  try { return sessionStorage.getItem(name); } catch { return null; }
}

export function note(name: string, text: string) {
  try { sessionStorage.setItem(name, text); } catch { /* it lasts until the page is left */ }
}

export const loadAll = () => run<Conversation[]>("readonly", store => store.getAll());
export const load = (id: string) => run<Conversation | undefined>("readonly", store => store.get(id));

export async function save(conversation: Conversation) {
  if (forgotten.has(conversation.id)) return;
  await run("readwrite", store => store.put(conversation));
  channel.postMessage({ id: conversation.id, isGone: false });
}

export const remember = (id: string) => forgotten.delete(id);

export async function forget(id: string) {
  channel.postMessage({ id, isGone: true });
  await erase(id);
}

async function erase(id: string) {
  forgotten.add(id);
  await run("readwrite", store => store.delete(id));
}

// Calls back with the id of a conversation that another tab has changed or deleted.
export function onForeignChange(react: (id: string, isGone: boolean) => void) {
  channel.onmessage = ({ data: { id, isGone } }) => {
    if (isGone) erase(id).catch(() => {});  // once more: this tab may just have saved it
    else remember(id);
    react(id, isGone);
  };
}
