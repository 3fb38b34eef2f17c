// Conversations as files: JSON with all branches, Markdown with what is shown; and back.

import { type Conversation, type Message, add, asText, newConversation, newId, path, titleOf } from "./model";

export function save(name: string, type: string, text: string) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const fileName = (conversation: Conversation) => titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat";

export const asJson = (list: Conversation[]) => JSON.stringify({ kvllm: 1, conversations: list }, null, 1);

const HEADS = { system: "System", user: "You", assistant: "Answer", tool: "Result of a tool" };

// Comments tell where messages begin: answers have headings of their own.
export function asMarkdown(conversation: Conversation): string {
  const part = (role: keyof typeof HEADS, text: string) => `<!-- kvllm: ${role} -->\n## ${HEADS[role]}\n\n${text.trim()}\n`;
  const parts = path(conversation).map(message => part(message.role, asText(message)));
  if (conversation.system) parts.unshift(part("system", conversation.system));
  return [`# ${titleOf(conversation)}\n`, ...parts].join("\n");
}

// Raises Error for what is no conversation.
export function read(name: string, text: string): Conversation[] {
  return /\.json$/i.test(name) || text.trimStart().startsWith("{") ? fromJson(text) : [fromMarkdown(text)];
}

function fromMarkdown(text: string): Conversation {
  const conversation = newConversation();
  conversation.title = /^# (.+)$/m.exec(text)?.[1].slice(0, 200) ?? "";
  const parts = text.split(/^<!-- kvllm: (system|user|assistant|tool) -->\n##[^\n]*\n/m);
  if (parts.length < 3) throw new Error("This file has no conversation: choose one that was saved here.");
  for (let i = 1; i < parts.length; i += 2) {
    const [role, content] = [parts[i], parts[i + 1].trim()];
    if (role === "system") conversation.system = content;
    else conversation.leaf = add(conversation, { parent: conversation.leaf, role: role as Message["role"], content }).id;
  }
  return conversation;
}

function fromJson(text: string): Conversation[] {
  let data: any;
  try { data = JSON.parse(text); } catch { data = null; }
  const list = Array.isArray(data?.conversations) ? data.conversations : null;
  if (!list) throw new Error("This file has no conversations: choose one that was saved here.");
  return list.map(conversation);
}

const string = (value: unknown) => typeof value === "string" ? value : "";
const number = (value: unknown) => typeof value === "number" && isFinite(value) ? value : undefined;

// Only what is known is taken over, under new names: a file may come from anybody.
function conversation(given: any): Conversation {
  const made = newConversation();
  made.title = string(given?.title).slice(0, 200);
  made.system = string(given?.system);
  made.model = string(given?.model);
  made.created = number(given?.created) ?? made.created;
  for (const name of ["temperature", "top_p", "max_tokens", "seed"] as const) made.settings[name] = number(given?.settings?.[name]);
  const tools = string(given?.settings?.tools);
  if (tools) made.settings.tools = tools;
  const names = new Map<string, string>(Object.keys(given?.messages ?? {}).map(name => [name, newId()]));
  for (const [name, each] of Object.entries<any>(given?.messages ?? {})) {
    if (!["user", "assistant", "tool"].includes(each?.role)) continue;
    const id = names.get(name)!;
    made.messages[id] = {
      id, parent: names.get(each.parent) ?? null, role: each.role, content: string(each.content), at: number(each.at) ?? Date.now(),
      ...(each.callId ? { callId: string(each.callId) } : {}), ...(each.thought ? { thought: string(each.thought) } : {}),
      ...(Array.isArray(each.files) ? { files: each.files.map((file: any) => ({ name: string(file?.name), text: string(file?.text) })) } : {}),
      ...(Array.isArray(each.calls) ? { calls: each.calls.map((call: any) => ({ id: string(call?.id), name: string(call?.name), arguments: string(call?.arguments) })) } : {}),
      ...(each.role === "assistant" ? { state: "done" as const, model: string(each.model) } : {}),
    };
  }
  for (const each of Object.values(made.messages)) {
    if (path(made, each.id)[0].parent !== null) each.parent = null;  // it goes in circles, or its parent is missing
  }
  made.leaf = names.get(given?.leaf) ?? null;
  if (made.leaf === null || !made.messages[made.leaf]) made.leaf = Object.keys(made.messages).at(-1) ?? null;
  return made;
}
