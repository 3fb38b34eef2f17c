// Answers as they come: what is asked for, what is taken up, and answers that go on while the page was away.

import { type Signal, signal } from "@preact/signals";
import { type Event, Problem, askForKey, call, events, keys } from "./api";
import { save } from "./database";
import { type Conversation, type Message, add, asText, newId, path } from "./model";
import { info, offered, reconnect } from "./server";

const SAVE_PERIOD = 1000;
const MARK_TOKENS = 8;
const RETRIES = 4;
const FRAMES = 20;
const LOST = "The connection to the server was lost. See whether it is running, then try again.";
const GONE = "The server does not have this answer any more: it was restarted, or too much time has passed. What had come is above.";
const running = new Map<string, AbortController>();
const signals = new Map<string, Signal<number>>();

const timers = new Map<string, number>();

// Tells of changes of a message, FRAMES times a second at most.
function tell(id: string) {
  if (timers.has(id)) return;
  timers.set(id, setTimeout(() => { timers.delete(id); changes(id).value++; }, 1000 / FRAMES));
}

// Counts the changes of a message.
export function changes(id: string): Signal<number> {
  if (!signals.has(id)) signals.set(id, signal(0));
  return signals.get(id)!;
}

export const runningCount = signal(0);
export const isRunning = (message: Message) => running.has(message.id);

// The request for an answer, as the server takes it.
function body(conversation: Conversation, answer: Message) {
  const { settings } = conversation, server = info.value!;
  const request: Record<string, unknown> = {
    model: offered(conversation.model), stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true, include_kv_spans: true, include_kv_pairs: true },
    temperature: settings.temperature, top_p: settings.top_p, max_tokens: settings.max_tokens,
    seed: settings.seed ?? answer.seed,
  };
  if (answer.share === 1) request.compression = { compress: false };
  else if (answer.share != null) request.compression = { [server.kept_option]: Math.max(1, Math.round(answer.share * server.kept_of)) };
  const before = path(conversation, answer.parent);
  if (!server.has_chat_template) {
    request.max_tokens ??= 512;
    return { ...request, prompt: [conversation.system, ...before.map(asText)].filter(Boolean).join("\n") };
  }
  if (settings.tools?.trim()) {
    try { request.tools = JSON.parse(settings.tools); } catch { throw new Problem("The tools in the settings of this chat are no list in JSON.", 400, false); }
  }
  const messages = before.map(message => {
    if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
    const calls = message.calls?.map(each => ({ id: each.id, type: "function", function: { name: each.name, arguments: each.arguments } }));
    return { role: message.role, content: asText(message), ...(calls?.length ? { tool_calls: calls } : {}) };
  });
  return { ...request, messages: conversation.system ? [{ role: "system", content: conversation.system }, ...messages] : messages };
}

// Adds an answer behind a message, and lets it come.
export function ask(conversation: Conversation, parent: string, share: number | null, pair?: Message, seed?: number): Message {
  const answer = add(conversation, {
    parent, role: "assistant", content: "", model: offered(conversation.model) ?? info.value?.model, share, seed, state: "running",
    kept: newId(), last: 0, key: info.value?.key, begun: Date.now(),
  });
  if (pair) [answer.pair, answer.second, pair.pair] = [pair.id, true, answer.id];
  conversation.leaf = answer.id;
  follow(conversation, answer, false);
  return answer;
}

// Reads an answer to its end. resumes: it was asked for before.
export async function follow(conversation: Conversation, answer: Message, resumes: boolean) {
  if (running.has(answer.id)) return;
  const controller = new AbortController();
  running.set(answer.id, controller);
  Object.assign(answer, { state: "running", error: undefined, ended: undefined });
  if (resumes) answer.begun = undefined;  // when its words came is not known
  runningCount.value = running.size;
  const saver = setInterval(() => keep(conversation), SAVE_PERIOD);
  keep(conversation);
  try {
    await read(conversation, answer, resumes, controller);
    finish(answer, "done");
  } catch (error) {
    if (controller.signal.aborted) finish(answer, "stopped");
    else {
      const isLost = error instanceof Problem && error.status === 0;
      finish(answer, "failed", (error as Error).message, isLost);
      if (isLost || error instanceof Problem && error.status === 404) reconnect();  // it may be another server now
    }
  } finally {
    clearInterval(saver);
    running.delete(answer.id);
    runningCount.value = running.size;
    changes(answer.id).value++;
    keep(conversation);
  }
}

const keep = (conversation: Conversation) => { conversation.updated = Date.now(); save(conversation).catch(() => {}); };

// mayGoOn: whether the server may still have it.
function finish(answer: Message, state: Message["state"], error?: string, mayGoOn = false) {
  Object.assign(answer, { state, error, ended: answer.ended ?? Date.now() });
  if (!mayGoOn) answer.kept = undefined;
}

// Reads the events of an answer. A connection that breaks is taken up where it broke off.
async function read(conversation: Conversation, answer: Message, resumes: boolean, { signal }: AbortController) {
  let isAsked = resumes;
  for (let failures = 0; ;) {
    try {
      const response = isAsked ? await call(`live/answers/${answer.kept}?after=${answer.last}`, { signal, key: answer.key }) : await post(conversation, answer, signal);
      isAsked = true;
      for await (const event of events(response)) {
        if (event.data === "done") return;
        failures = 0;
        take(answer, event);
      }
      throw new Problem(LOST, 0, true);
    } catch (error) {
      if (signal.aborted) throw error;
      const status = error instanceof Problem ? error.status : error instanceof TypeError ? 0 : null;
      if (status === 401) {
        const [refused] = keys.value;
        await askForKey("This server needs an API key.");
        if (keys.value[0] === refused) throw error;
        continue;
      }
      if (status === 409) { isAsked = true; continue; }  // another tab has asked for it
      if (status === 404 && isAsked) {
        if (answer.last) throw new Problem(GONE, 404, false);
        isAsked = false;  // it had never arrived
        continue;
      }
      if (status !== 0 || ++failures > RETRIES) throw status === 0 && !(error instanceof Problem) ? new Problem(LOST, 0, true) : error;
      isAsked = true;  // it may have arrived: it is not asked twice
      await new Promise(resolve => setTimeout(resolve, Math.min(4000, 125 * 2 ** failures)));
    }
  }
}

function post(conversation: Conversation, answer: Message, signal: AbortSignal): Promise<Response> {
  return call(info.value!.has_chat_template ? "v1/chat/completions" : "v1/completions", {
    method: "POST", signal, key: answer.key, headers: { "Content-Type": "application/json", "X-Keep-Answer": answer.kept! },
    body: JSON.stringify(body(conversation, answer)),
  });
}

function take(answer: Message, { id, data }: Event) {
  if (id !== null) answer.last = id;
  if (data.error) throw new Error(data.error.message);
  if (data.usage) takeUsage(answer, data.usage);
  const choice = data.choices?.[0];
  if (choice) {
    const now = Date.now(), delta = choice.delta ?? {};
    const content = delta.content ?? choice.text ?? "", thought = delta.reasoning ?? delta.reasoning_content ?? "";
    if (content || thought || delta.tool_calls) answer.first ??= now;
    if (thought) answer.thought = (answer.thought ?? "") + thought;
    if (content) {
      if (answer.thought && !answer.content) answer.thoughtEnd ??= now;
      answer.content += content;
      splitThought(answer, now);
    }
    for (const part of delta.tool_calls ?? []) takeCall(answer, part);
    if (choice.finish_reason) [answer.finish, answer.ended] = [choice.finish_reason, now];
  }
  tell(answer.id);
}

// Where the server does not part thoughts from the answer, their tags do.
function splitThought(answer: Message, now: number) {
  const end = answer.content.indexOf("</think>");
  if (end < 0 || answer.thoughtEnd !== undefined) return;
  answer.thought = (answer.thought ?? "") + answer.content.slice(0, end).replace("<think>", "").trim();
  answer.content = answer.content.slice(end + "</think>".length).trimStart();
  answer.thoughtEnd = now;
}

function takeCall(answer: Message, part: any) {
  answer.calls ??= [];
  const known = answer.calls[part.index ?? answer.calls.length - 1];
  if (known) known.arguments += part.function?.arguments ?? "";
  else answer.calls.push({ id: part.id ?? newId(), name: part.function?.name ?? "", arguments: part.function?.arguments ?? "" });
}

function takeUsage(answer: Message, usage: NonNullable<Message["usage"]>) {
  const before = answer.usage?.kvllm, { kv_spans: spans, kv_pairs: pairs = [], ...now } = usage.kvllm;
  const memory = answer.memory ??= { spans: [], events: [] };
  if (spans) memory.spans = spans;
  if (now.preemptions > (before?.preemptions ?? 0)) memory.pairs = [];  // it was computed again
  for (const each of pairs) memory.pairs = [...(memory.pairs ?? []).filter(old => old.first < each.first || old.end > each.end), { ...each, at: usage.total_tokens }];
  const windows = now.windows - (before?.windows ?? 0), dropped = now.evicted_pairs - (before?.evicted_pairs ?? 0);
  if (windows > 0) memory.events.push({ tokens: usage.total_tokens, windows, dropped });
  answer.usage = { ...usage, kvllm: now };
  const marks = answer.marks ??= [];
  if (usage.total_tokens - (marks.at(-1)?.[0] ?? -MARK_TOKENS) >= MARK_TOKENS) marks.push([usage.total_tokens, answer.content.length]);
}

// Ends an answer, here and on the server.
export async function stop(answer: Message) {
  const { kept, key } = answer;
  running.get(answer.id)?.abort();
  if (kept) await call(`live/answers/${kept}`, { method: "DELETE", key }).catch(() => {});
}

// Takes up the answers that were running when the page was left, or when the server could not be reached any more.
const hasKey = ({ key }: Message) => !key || key === info.value!.key || keys.value.some(each => each.name === key);

export function resumeAll(conversations: Conversation[]) {
  for (const conversation of conversations) {
    for (const message of Object.values(conversation.messages)) {
      const isOpen = message.state === "running" || message.state === "failed";
      if (isOpen && message.kept && hasKey(message)) follow(conversation, message, true);
      else if (message.state === "running" && !message.kept) message.state = "stopped";
    }
  }
}

export const hasRunning = (conversation: Conversation) =>
  Object.values(conversation.messages).some(message => running.has(message.id));
