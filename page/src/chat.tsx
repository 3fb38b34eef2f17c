// The chat: the conversation, what it is set to, and the field for the next message.

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { changes, hasRunning } from "./answers";
import { Composer, draft } from "./composer";
import { MessageView } from "./message";
import { type Settings, path, titleOf } from "./model";
import { Dialog } from "./parts";
import { info, status } from "./server";
import { Sidebar } from "./sidebar";
import { changed, current, version } from "./store";
import * as transfer from "./transfer";

const NEAR = 80;  // pixels from the end within which the view follows a growing answer
const INPUT = 300;  // milliseconds behind a key or a movement in which a scroll is the user's
const SETTLING = 30;  // frames in which what has come into view gets its true height
const settingsOpen = signal(false);

export function Chat() {
  return <><Sidebar /><main class="chat"><ChatBar /><Conversation /><Composer />{settingsOpen.value && <SettingsDialog />}</main></>;
}

function ChatBar() {
  version.value;
  const conversation = current.value;
  if (!conversation.leaf) return <div class="chat-bar"><span class="space" /><button type="button" class="quiet" onClick={() => { settingsOpen.value = true; }}>Settings</button></div>;
  const name = transfer.fileName(conversation);
  return (
    <div class="chat-bar">
      <h2 dir="auto">{titleOf(conversation)}</h2>
      <button type="button" class="quiet" onClick={() => { settingsOpen.value = true; }}>Settings</button>
      <button type="button" class="quiet" onClick={() => transfer.save(`${name}.md`, "text/markdown", transfer.asMarkdown(conversation))}>Save as text</button>
      <button type="button" class="quiet" onClick={() => transfer.save(`${name}.json`, "application/json", transfer.asJson([conversation]))}>Save as data</button>
    </div>
  );
}

function Conversation() {
  version.value;
  const conversation = current.value, box = useRef<HTMLDivElement>(null), follows = useRef(true), touched = useRef(0), height = useRef(0);
  const messages = path(conversation), last = messages.at(-1);
  const other = last?.pair ? changes(last.pair).value : 0;
  const grown = last ? changes(last.id).value + other : 0;
  const touch = () => { touched.current = performance.now(); };
  const isTouched = () => performance.now() - touched.current < INPUT;
  // What comes into view gets its true height then, so the view may move without anybody having scrolled.
  const scroll = () => {
    const at = box.current!, isAtEnd = at.scrollHeight - at.scrollTop - at.clientHeight < NEAR;
    if (isAtEnd || isTouched() || at.scrollHeight === height.current) follows.current = isAtEnd;
    height.current = at.scrollHeight;
  };
  useEffect(() => { follows.current = true; }, [conversation.id, messages.length]);
  useEffect(() => {
    let isOver = false;
    const toEnd = (frames: number) => {
      if (isOver || !follows.current || isTouched() || !box.current) return;
      box.current.scrollTop = height.current = box.current.scrollHeight;
      if (frames) requestAnimationFrame(() => toEnd(frames - 1));
    };
    toEnd(hasRunning(conversation) ? 0 : SETTLING);
    return () => { isOver = true; };
  }, [conversation.id, messages.length, grown]);
  return (
    <div class="conversation" ref={box} onScroll={scroll} onWheel={touch} onTouchMove={touch} onPointerDown={touch} onKeyDown={touch} tabindex={0} role="log" aria-label="Conversation" aria-busy={hasRunning(conversation)}>
      {messages.length ? messages.map(message => <MessageView key={message.id} message={message} />) : <Welcome />}
    </div>
  );
}

const EXAMPLES = ["Explain photosynthesis to a child of eight.", "Write a Python function that finds all prime numbers below n.", "Plan three days in Lisbon with a small budget."];
const REASONER = "words: d3,f9\n#>d+f=k\n";

function Welcome() {
  const server = info.value;
  if (!server) return <div class="welcome"><p role="status">{status.value === "connecting" ? "Connecting to the server…" : status.value}</p></div>;
  const examples = server.has_chat_template ? EXAMPLES : server.model === "reasoner" ? [REASONER] : ["Once upon a time"];
  return (
    <div class="welcome">
      <h2>What would you like to know?</h2>
      {!server.has_chat_template && <p>This model does not converse: it goes on with the text that you write.</p>}
      <ul>{examples.map(text => <li><button type="button" onClick={() => { draft.value = text; }}>{text}</button></li>)}</ul>
    </div>
  );
}

const FIELDS: [keyof Settings, string, string, Record<string, number | string>][] = [
  ["temperature", "Temperature", "0 gives the likeliest answer, higher ones vary more", { min: 0, max: 5, step: "any" }],
  ["top_p", "Top p", "choose among the likeliest words that make up this share", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Most tokens", "where an answer is cut off", { min: 1, step: 1 }],
  ["seed", "Seed", "the same one gives the same answer", { step: 1 }],
];

function SettingsDialog() {
  const conversation = current.value, { settings } = conversation;
  const set = (name: keyof Settings, text: string) => {
    if (name === "tools") settings.tools = text || undefined;
    else settings[name] = text === "" || !isFinite(Number(text)) ? undefined : Number(text);
    note();
  };
  const note = () => { if (conversation.leaf) changed(conversation); else version.value++; };
  let isJson = true;
  try { if (settings.tools?.trim()) isJson = Array.isArray(JSON.parse(settings.tools)); } catch { isJson = false; }
  version.value;
  return (
    <Dialog title="Settings of this chat" id="chat-settings" onClose={() => { settingsOpen.value = false; }}>
      <label class="block">Title<input dir="auto" value={conversation.title} placeholder={titleOf(conversation)} onInput={event => { conversation.title = event.currentTarget.value; note(); }} /></label>
      <label class="block">Instructions that every answer follows (system prompt)
        <textarea rows={4} dir="auto" value={conversation.system} onInput={event => { conversation.system = event.currentTarget.value; note(); }} /></label>
      <div class="fields">{FIELDS.map(([name, label, help, limits]) => (
        <label class="block">{label}<input type="number" {...limits} defaultValue={settings[name] ?? ""} placeholder="the model's own" onInput={event => set(name, event.currentTarget.value)} /><small>{help}</small></label>
      ))}</div>
      {info.value?.has_chat_template && <details><summary>Tools</summary>
        <label class="block">Functions that the model may call, a list in JSON<textarea rows={5} class="mono" value={settings.tools ?? ""} onInput={event => set("tools", event.currentTarget.value)} /></label>
        {!isJson && <p class="problem" role="alert">This is no list in JSON.</p>}
      </details>}
    </Dialog>
  );
}
