// The conversations of this browser, which one is shown, and what is done to them.

import { effect, signal } from "@preact/signals";
import { ask, follow, hasRunning, isRunning, resumeAll, stop } from "./answers";
import { forget, load, loadAll, note, onForeignChange, recall, remember, save } from "./database";
import { type Attachment, type Conversation, type Message, add, newConversation, newestLeaf, path, remove } from "./model";
import { info } from "./server";

export const conversations = signal<Conversation[]>([]);
export const current = signal<Conversation>(newConversation());
// Counts changes of the conversation that is shown, but for those of a running answer.
export const version = signal(0);
export const storageProblem = signal("");
export const toast = signal<{ text: string; undo?: () => void } | null>(null);
// What compression is to keep in the next answer: null for the server's own setting, 1 for all.
export const share = signal<number | null>(null);
export const compares = signal(false);

const SHOWN = "kvllm-shown";

export async function start() {
  try {
    conversations.value = newestFirst(await loadAll());
  } catch {
    storageProblem.value = "This browser keeps no history here: conversations last until the page is left.";
  }
  const shown = recall(SHOWN);
  const found = conversations.value.find(each => each.id === shown);
  if (found) current.value = found;
  effect(() => note(SHOWN, current.value.id));
  effect(() => { if (info.value) resumeAll(conversations.value); });
  onForeignChange(takeForeign);
  addEventListener("pagehide", () => { if (hasRunning(current.value)) save(current.value).catch(() => {}); });
}

const newestFirst = (list: Conversation[]) => [...list].sort((a, b) => b.updated - a.updated);

async function takeForeign(id: string, isGone: boolean) {
  const known = conversations.value.find(each => each.id === id);
  if (isGone) { if (known) discard(known); return; }
  if (known && hasRunning(known)) return;
  const found = await load(id).catch(() => undefined);
  const others = conversations.value.filter(each => each.id !== id);
  conversations.value = found ? newestFirst([...others, found]) : others;
  if (current.value.id === id) show(found ?? newConversation());
}

export function show(conversation: Conversation) {
  current.value = conversation;
  version.value++;
}

export const startNew = () => show(newConversation(current.value));

export function changed(conversation = current.value) {
  conversation.updated = Date.now();
  const others = conversations.value.filter(each => each.id !== conversation.id);
  conversations.value = [conversation, ...others];
  version.value++;
  save(conversation).catch(() => { storageProblem.value = "The browser could not save the conversation: its storage may be full."; });
}

// Sends a message behind `parent`, which is the end of the conversation if none is given.
export function send(content: string, files: Attachment[], parent: string | null = current.value.leaf) {
  const conversation = current.value;
  const message = add(conversation, { parent, role: "user", content, ...(files.length ? { files } : {}) });
  answer(conversation, message.id);
}

export function answer(conversation: Conversation, parent: string) {
  if (compares.value && info.value?.kept_option) {
    const seed = crypto.getRandomValues(new Uint16Array(1))[0];  // the same dice for both
    const whole = ask(conversation, parent, 1, undefined, seed);
    ask(conversation, parent, share.value === 1 ? null : share.value, whole, seed);
  } else {
    ask(conversation, parent, share.value);
  }
  changed(conversation);
}

export const again = (message: Message) => answer(current.value, message.parent!);

export function giveResult(message: Message, callId: string, content: string) {
  const conversation = current.value, end = path(conversation).at(-1)!;
  const added = add(conversation, { parent: end.id, role: "tool", callId, content });
  conversation.leaf = added.id;
  const given = new Set(path(conversation).filter(each => each.role === "tool").map(each => each.callId));
  if (message.calls!.every(call => given.has(call.id))) answer(conversation, added.id);
  else changed(conversation);
}

export function switchTo(message: Message) {
  current.value.leaf = newestLeaf(current.value, message.id);
  changed();
}

export function removeMessage(message: Message) {
  const conversation = current.value;
  const before = structuredClone({ messages: conversation.messages, leaf: conversation.leaf });
  for (const each of Object.values(conversation.messages)) if (isRunning(each)) stop(each);
  remove(conversation, message);
  changed(conversation);
  toast.value = { text: "The message was deleted.", undo: () => { Object.assign(conversation, before); changed(conversation); } };
}

function discard(conversation: Conversation) {
  for (const each of Object.values(conversation.messages)) if (isRunning(each)) stop(each);
  conversations.value = conversations.value.filter(each => each.id !== conversation.id);
  if (current.value.id === conversation.id) show(newConversation());
}

export function removeConversation(conversation: Conversation) {
  discard(conversation);
  forget(conversation.id).catch(() => {});
  toast.value = { text: "The chat was deleted.", undo: () => { remember(conversation.id); changed(conversation); show(conversation); } };
}

export function stopAll() {
  for (const message of Object.values(current.value.messages)) if (isRunning(message)) stop(message);
}

// A failed answer: what the server still has of it is read, or it is asked for anew.
export function retry(message: Message) {
  if (message.kept) follow(current.value, message, true);
  else again(message);
}
