// A message of the conversation, or two answers side by side.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { changes, isRunning } from "./answers";
import { percent, seconds, shortName } from "./format";
import { MemoryStrip, measured, taken } from "./memory";
import { type Call, type Message, alternatives, asText } from "./model";
import { Copy } from "./parts";
import { Prose } from "./prose";
import { info } from "./server";
import { again, current, giveResult, removeMessage, retry, send, switchTo, version } from "./store";

export function MessageView({ message }: { message: Message }) {
  version.value;
  if (message.role === "user") return <Question message={message} />;
  if (message.role === "tool") return <ToolResult message={message} />;
  const other = message.pair ? current.value.messages[message.pair] : undefined;
  if (other) return <Pair first={other} second={message} />;
  return <article class="message answer" aria-label="Answer"><Answer message={message} /><AnswerActions message={message} /></article>;
}

function Question({ message }: { message: Message }) {
  version.value;
  const [edits, setEdits] = useState(false);
  if (edits) return <article class="message question" aria-label="You"><Editor message={message} onEnd={() => setEdits(false)} /></article>;
  return (
    <article class="message question" aria-label="You">
      {message.files?.map(file => (
        <details class="file"><summary>{file.name}</summary><pre tabindex={0} dir="auto">{file.text}</pre></details>
      ))}
      <div class="plain" dir="auto">{message.content}</div>
      <div class="actions">
        <Branches message={message} />
        <button type="button" class="quiet" onClick={() => setEdits(true)}>Edit</button>
        <Copy text={() => asText(message)} />
        <button type="button" class="quiet" onClick={() => removeMessage(message)}>Delete</button>
      </div>
    </article>
  );
}

function Editor({ message, onEnd }: { message: Message; onEnd: () => void }) {
  const field = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => { field.current!.focus(); field.current!.setSelectionRange(message.content.length, message.content.length); }, []);
  const save = () => {
    const text = field.current!.value.trim();
    onEnd();
    if (text || message.files) send(text, message.files ?? [], message.parent);
    document.getElementById("composer")?.focus();
  };
  const key = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    if (event.key === "Escape") { event.stopPropagation(); onEnd(); document.getElementById("composer")?.focus(); }
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); save(); }
  };
  return (
    <>
      <textarea ref={field} class="editor" dir="auto" aria-label="Edit your message" rows={3} onKeyDown={key}>{message.content}</textarea>
      <div class="actions">
        <button type="button" class="primary" onClick={save}>Send</button>
        <button type="button" onClick={onEnd}>Cancel</button>
      </div>
    </>
  );
}

function Branches({ message }: { message: Message }) {
  version.value;
  const all = alternatives(current.value, message), at = all.indexOf(message);
  if (all.length < 2 || at < 0) return null;
  return (
    <span class="branches" role="group" aria-label="Versions">
      <button type="button" class="quiet" aria-label="Earlier version" disabled={at === 0} onClick={() => switchTo(all[at - 1])}>‹</button>
      {at + 1}/{all.length}
      <button type="button" class="quiet" aria-label="Later version" disabled={at === all.length - 1} onClick={() => switchTo(all[at + 1])}>›</button>
    </span>
  );
}

// The parts of an answer, without what can be done to it.
function Answer({ message }: { message: Message }) {
  changes(message.id).value;
  const runs = isRunning(message), isFull = message.usage && message.usage.total_tokens >= (info.value?.max_model_len ?? Infinity);
  return (
    <>
      {message.thought && <Thought message={message} runs={runs} />}
      {message.content && <Prose text={message.content} grows={runs} />}
      {message.calls?.map(call => <ToolCall message={message} call={call} runs={runs} />)}
      {runs && !message.content && !message.thought && <p class="waiting">Thinking…</p>}
      {message.error && <p class="problem" role="alert">{message.error} <button type="button" onClick={() => retry(message)}>Try again</button></p>}
      {message.finish === "length" && !runs && <p class="note">{isFull ? "The answer was cut off: the model's context is full. Start a new chat."
        : "The answer was cut off at the most tokens allowed: see Settings."}</p>}
      {(message.state === "stopped" || message.finish === "abort") && <p class="note">Stopped.</p>}
      <MemoryStrip message={message} />
    </>
  );
}

function Thought({ message, runs }: { message: Message; runs: boolean }) {
  changes(message.id).value;
  const isOver = !runs || message.thoughtEnd !== undefined;
  const end = message.thoughtEnd ?? message.ended;
  const took = message.first && end ? (end - message.first) / 1000 : null;
  const time = took === null ? "" : took < 1 ? " for less than a second" : ` for ${seconds(took)}`;
  return (
    <details class="thought">
      <summary>{isOver ? `Thought${time}` : "Thinking…"}</summary>
      <div class="plain" dir="auto">{message.thought}</div>
    </details>
  );
}

function pretty(text: string): string {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function ToolCall({ message, call, runs }: { message: Message; call: Call; runs: boolean }) {
  changes(message.id).value;
  version.value;
  const field = useRef<HTMLTextAreaElement>(null);
  const isAnswered = Object.values(current.value.messages).some(each => each.callId === call.id);
  return (
    <div class="call">
      <p>Calls the tool <b>{call.name}</b></p>
      <pre tabindex={0}>{pretty(call.arguments)}</pre>
      {!runs && !isAnswered && (
        <form onSubmit={event => { event.preventDefault(); giveResult(message, call.id, field.current!.value); }}>
          <label class="block">Its result<textarea ref={field} rows={2} dir="auto" /></label>
          <button type="submit">Give the result</button>
        </form>
      )}
    </div>
  );
}

function ToolResult({ message }: { message: Message }) {
  return (
    <article class="message tool" aria-label="Result of a tool">
      <details><summary>Result of the tool</summary><pre tabindex={0} dir="auto">{message.content}</pre></details>
    </article>
  );
}

function AnswerActions({ message, isPair }: { message: Message; isPair?: boolean }) {
  changes(message.id).value;
  if (isRunning(message)) return null;
  const model = message.model && message.model !== info.value?.model ? shortName(message.model) : "";
  return (
    <div class="actions">
      <Branches message={message} />
      <Copy text={() => message.content} />
      <button type="button" class="quiet" onClick={() => again(message)}>Answer again</button>
      <button type="button" class="quiet" onClick={() => removeMessage(message)}>Delete</button>
      {!isPair && <span class="measured">{[model, measured(message)].filter(Boolean).join(" · ")}</span>}
    </div>
  );
}

function Pair({ first, second }: { first: Message; second: Message }) {
  version.value;
  const name = (message: Message) => message.share === 1 ? "Everything kept" : message.share == null ? "Compressed" : `${percent(message.share)} kept`;
  return (
    <article class="message pair" aria-label="Two answers">
      <Parting first={first} second={second} />
      <Untouched message={first} />
      <Untouched message={second} />
      <div class="sides">
        {[first, second].map(message => (
          <section class="side" aria-label={name(message)}>
            <h3>{name(message)}</h3>
            <Answer message={message} />
            <Figures message={message} />
          </section>
        ))}
      </div>
      <AnswerActions message={second} isPair />
    </article>
  );
}

// Why an answer that might have been compressed was not.
function Untouched({ message }: { message: Message }) {
  changes(message.id).value;
  if (isRunning(message) || message.share === 1 || !message.usage || message.memory?.events.length) return null;
  return <p class="parting">Nothing was compressed: the answer is short, or memory was not.</p>;
}

function Figures({ message }: { message: Message }) {
  changes(message.id).value;
  return <p class="measured">{[measured(message), taken(message)].filter(Boolean).join(" · ")}</p>;
}

// Where two texts part.
function Parting({ first, second }: { first: Message; second: Message }) {
  changes(first.id).value;
  changes(second.id).value;
  const [a, b] = [[...first.content], [...second.content]];
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at++;
  if (isRunning(first) || isRunning(second)) {
    if (at === Math.min(a.length, b.length)) return <p class="parting">The same so far.</p>;
  } else if (at === a.length && at === b.length) {
    return <p class="parting">Both answers are the same.</p>;
  }
  if (!at) return <p class="parting">The answers differ from the first word on.</p>;
  const piece = (text: string[]) => text.slice(at, at + 24).join("").replace(/\s+/g, " ") || "the end";
  return (
    <p class="parting">
      The same for {at.toLocaleString("en")} characters: <q dir="auto">…{a.slice(Math.max(0, at - 24), at).join("").replace(/\s+/g, " ")}</q>,
      then <q dir="auto">{piece(a)}</q> and <q dir="auto">{piece(b)}</q>.
    </p>
  );
}
