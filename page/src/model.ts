// A conversation: a tree of messages, of which one branch is shown.

export type Span = [start: number, end: number, kept: number];

// Which pairs of some positions are left after the compression at so many tokens; bits: see the server's PairsLeft.
export interface PairsLeft { first: number; end: number; layers: number[]; heads: number; bits: string; at?: number }

// What became of the KV pairs of an answer. events: at so many tokens, so many pairs were dropped. pairs: later ones
// take the place of earlier ones.
export interface Memory { spans: Span[]; pairs?: PairsLeft[]; events: { tokens: number; windows: number; dropped: number }[] }

export interface Usage {
  prompt_tokens: number; completion_tokens: number; total_tokens: number;
  kvllm: { kept_share: number; windows: number; evicted_pairs: number; preemptions: number; kv_spans?: Span[]; kv_pairs?: PairsLeft[] };
}

export interface Call { id: string; name: string; arguments: string }
export interface Attachment { name: string; text: string }

// state: of an answer. kept: the server's name of the answer while it runs. last: number of its last event here.
// key: the name of the key that it was asked for with.
// share: what compression was to keep, null for the server's own setting, 1 for all. pair: the answer beside this one.
// marks: at so many tokens, so many characters had come. times: milliseconds since 1970.
export interface Message {
  id: string; parent: string | null; role: "user" | "assistant" | "tool"; content: string; at: number;
  files?: Attachment[]; callId?: string;
  thought?: string; calls?: Call[]; model?: string;
  state?: "running" | "done" | "stopped" | "failed"; error?: string; finish?: string;
  kept?: string; last?: number; key?: string; seed?: number; share?: number | null; pair?: string; second?: boolean;
  usage?: Usage; memory?: Memory; marks?: [tokens: number, characters: number][];
  begun?: number; first?: number; thoughtEnd?: number; ended?: number;
}

export interface Settings { temperature?: number; top_p?: number; max_tokens?: number; seed?: number; tools?: string }

export interface Conversation {
  id: string; title: string; created: number; updated: number; model: string; system: string; settings: Settings;
  messages: Record<string, Message>; leaf: string | null;
}

export const newId = () => {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return [...random].map(value => value.toString(16).padStart(2, "0")).join("");
};

export function newConversation(from?: Conversation): Conversation {
  const now = Date.now();
  return {
    id: newId(), title: "", created: now, updated: now, model: from?.model ?? "", system: from?.system ?? "",
    settings: { ...from?.settings }, messages: {}, leaf: null,
  };
}

// The messages from the first one to `leaf`.
export function path(conversation: Conversation, leaf = conversation.leaf): Message[] {
  const found = new Set<Message>();
  for (let id = leaf; id !== null && conversation.messages[id]; id = conversation.messages[id].parent) {
    if (found.has(conversation.messages[id])) break;  // an imported file may go in circles
    found.add(conversation.messages[id]);
  }
  return [...found].reverse();
}

// The message and its alternatives, oldest first. Of two answers side by side, the second stands for both.
export function alternatives(conversation: Conversation, message: Message): Message[] {
  return Object.values(conversation.messages)
    .filter(each => each.parent === message.parent && !(each.pair && !each.second && conversation.messages[each.pair]))
    .sort((a, b) => a.at - b.at || (a.id < b.id ? -1 : 1));
}

// The end of the newest branch behind a message.
export function newestLeaf(conversation: Conversation, id: string): string {
  for (;;) {
    const next = Object.values(conversation.messages)
      .filter(each => each.parent === id && !(each.pair && !each.second)).sort((a, b) => b.at - a.at)[0];
    if (!next) return id;
    id = next.id;
  }
}

export function add(conversation: Conversation, message: Omit<Message, "id" | "at">): Message {
  const added = { ...message, id: newId(), at: Date.now() };
  conversation.messages[added.id] = added;
  return added;
}

// Takes a message and all behind it away, and the answer beside it.
export function remove(conversation: Conversation, message: Message) {
  const gone = new Set([message.id, ...(message.pair ? [message.pair] : [])]);
  for (let grown = true; grown;) {
    grown = false;
    for (const each of Object.values(conversation.messages)) {
      if (each.parent && gone.has(each.parent) && !gone.has(each.id)) { gone.add(each.id); grown = true; }
    }
  }
  for (const id of gone) delete conversation.messages[id];
  const parent = message.parent && conversation.messages[message.parent] ? message.parent : null;
  const sibling = Object.values(conversation.messages).filter(each => each.parent === message.parent).at(-1);
  conversation.leaf = sibling ? newestLeaf(conversation, sibling.id) : parent;
}

export function titleOf(conversation: Conversation): string {
  if (conversation.title.trim()) return conversation.title.trim();
  const first = path(conversation).find(message => message.role === "user");
  const text = (first?.content || first?.files?.[0]?.name || "").replace(/\s+/g, " ").trim();
  return text ? [...text].slice(0, 60).join("") : "New chat";
}

export function asText(message: Message): string {
  const files = (message.files ?? []).map(file => `${file.name}:\n\`\`\`\n${file.text}\n\`\`\``);
  return [...files, message.content].filter(Boolean).join("\n\n");
}
