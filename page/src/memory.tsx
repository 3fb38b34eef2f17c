// What is left of an answer's KV cache: a strip, and what happened to it.

import { useState } from "preact/hooks";
import { changes } from "./answers";
import { bytes, count, percent, whole } from "./format";
import type { Memory, Message, Span } from "./model";
import { info } from "./server";

const WIDTH = 1000, HEIGHT = 14;

// The spans up to `length` tokens: what came behind the last compression is there as a whole.
function upTo(memory: Memory, length: number): Span[] {
  const spans = memory.spans.length ? memory.spans.map(span => [...span] as Span) : [[0, length, length] as Span];
  const last = spans.at(-1)!;
  if (last[1] < length) {
    if (last[2] === last[1] - last[0]) [last[1], last[2]] = [length, length - last[0]];
    else spans.push([last[1], length, length - last[1]]);
  }
  return spans.filter(span => span[1] > span[0]);
}

// The text of some tokens, as far as it belongs to the answer; "" for what was before it.
export function excerpt(message: Message, [start, end]: Span, most = 90): string {
  const marks = message.marks ?? [];
  const at = (tokens: number) => {
    const behind = marks.findIndex(mark => mark[0] >= tokens);
    if (behind < 0) return message.content.length;
    const [t1, c1] = marks[behind], [t0, c0] = marks[behind - 1] ?? [message.usage?.prompt_tokens ?? 0, 0];
    return t1 > t0 ? Math.max(0, Math.round(c0 + (c1 - c0) * (tokens - t0) / (t1 - t0))) : c1;
  };
  if (end <= (message.usage?.prompt_tokens ?? 0)) return "";
  const text = message.content.slice(at(start), at(end)).replace(/\s+/g, " ").trim();
  return text.length > most ? `${text.slice(0, most / 2)} … ${text.slice(-most / 2)}` : text;
}

export function MemoryStrip({ message }: { message: Message }) {
  const [shown, setShown] = useState<Span | null>(null), [isOpen, setOpen] = useState(false);
  changes(message.id).value;
  const { usage, memory } = message;
  if (!usage || !memory) return null;
  const length = usage.total_tokens, spans = upTo(memory, length), { kept_share: kept } = usage.kvllm;
  const describe = ([start, end, left]: Span) =>
    `words ${whole(start)} to ${whole(end - 1)}: ${left === end - start ? "all remembered" : `${percent(left / (end - start))} remembered`}`;
  const summary = `Memory: ${percent(kept)} kept`;
  return (
    <div class="memory">
      <Strip spans={spans} prompt={usage.prompt_tokens} length={length} label={`${summary} of ${count(length, "token")}`} onShow={setShown} />
      <p class="under" aria-live="off">
        {shown ? <><b>{describe(shown).replace("words", "tokens")}</b> <q dir="auto">{excerpt(message, shown) || "what was asked"}</q></>
          : <>{summary}{memory.events.length ? `, compressed ${memory.events.length === 1 ? "once" : `${memory.events.length} times`}` : ""}</>}
      </p>
      <details onToggle={event => setOpen(event.currentTarget.open)}>
        <summary>Details</summary>
        {isOpen && <Details message={message} spans={spans} />}
      </details>
    </div>
  );
}

// A bar for each span, as high as the share that is left.
export function Strip({ spans, prompt, length, label, onShow }: {
  spans: Span[]; prompt: number; length: number; label: string; onShow?: (span: Span | null) => void;
}) {
  return (
    <svg class="strip" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={label} onPointerLeave={() => onShow?.(null)}>
      {spans.map(span => <Bar span={span} prompt={prompt} length={length} onShow={() => onShow?.(span)} />)}
    </svg>
  );
}

function Bar({ span, prompt, length, onShow }: { span: Span; prompt: number; length: number; onShow: () => void }) {
  const [start, end, kept] = span, share = kept / (end - start), x = (position: number) => WIDTH * position / length;
  const parts: [number, number, string][] = share < 1 ? [[start, end, "compressed"]]
    : [[start, Math.min(end, prompt), "prompt"], [Math.max(start, prompt), end, "tail"]];
  return <>{parts.filter(([from, to]) => to > from).map(([from, to, tone]) => {
    const width = Math.max(1, x(to) - x(from) - 1);
    return (
      <g onPointerEnter={onShow}>
        <rect class="back" x={x(from)} y={0} width={width} height={HEIGHT} />
        <rect class={`fill t-${tone}`} x={x(from)} y={HEIGHT * (1 - share)} width={width} height={HEIGHT * share} />
      </g>
    );
  })}</>;
}

function Details({ message, spans }: { message: Message; spans: Span[] }) {
  changes(message.id).value;
  const { usage, memory } = message, facts = info.value, held = usage!.total_tokens * usage!.kvllm.kept_share;
  const stored = facts && facts.kv_dtype !== "auto" ? `, as ${facts.kv_dtype}` : "";
  return (
    <>
      <p>
        {count(usage!.total_tokens, "token")}, {count(Math.round(held), "KV pair")} of them left in the mean over layers
        {facts ? `: ${bytes(held * facts.pair_bytes)} of ${bytes(usage!.total_tokens * facts.pair_bytes)}${stored}` : ""}.
        {facts && !facts.compression ? " This server compresses nothing: kvllm serve --compression does." : ""}
        {usage!.kvllm.preemptions ? ` Computed again ${count(usage!.kvllm.preemptions, "time")}, as room was short.` : ""}
      </p>
      {memory!.events.length > 0 && (
        <ol class="events">{memory!.events.slice(-50).map(event => (
          <li>at token {whole(event.tokens)}: {count(event.windows, "window")} compressed, {count(event.dropped, "KV pair")} dropped</li>
        ))}</ol>
      )}
      <ol class="spans">{spans.slice(-200).map(span => (
        <li>{whole(span[0])} to {whole(span[1] - 1)}: {whole(span[2])} of {whole(span[1] - span[0])} kept <q dir="auto">{excerpt(message, span, 50)}</q></li>
      ))}</ol>
    </>
  );
}

// "24 tokens/s · first word after 0.30 s".
export function measured(message: Message): string {
  const { usage, begun, first, ended } = message;
  if (!usage || !first) return "";
  const tokens = usage.completion_tokens, passed = ((ended ?? Date.now()) - first) / 1000;
  const speed = tokens > 1 && passed > 0 ? ` · ${whole((tokens - 1) / passed)} tokens/s` : "";
  return `${count(tokens, "token")}${speed}${begun ? ` · first after ${((first - begun) / 1000).toFixed(2)} s` : ""}`;
}

// What an answer's KV cache takes.
export function taken(message: Message): string {
  const facts = info.value, { usage } = message;
  return facts && usage ? bytes(usage.total_tokens * usage.kvllm.kept_share * facts.pair_bytes) : "";
}
