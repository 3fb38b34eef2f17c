// What is left of an answer's KV cache: a strip, and what happened to it.

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { changes } from "./answers";
import { bytes, count, percent, whole } from "./format";
import { type Held, held } from "./held";
import type { Memory, Message, Span } from "./model";
import { info } from "./server";

const WIDTH = 1000, HEIGHT = 14;
const LONGEST_WORD = 20;  // characters by which an excerpt grows to whole words

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
  const { content } = message;
  let from = at(start), to = at(end);
  for (let i = 0; i < LONGEST_WORD && /\S/.test(content[from - 1] ?? " "); i++) from--;
  for (let i = 0; i < LONGEST_WORD && /\S/.test(content[to] ?? " "); i++) to++;
  const text = content.slice(from, to).replace(/\s+/g, " ").trim();
  return text.length > most ? `${text.slice(0, most / 2)} … ${text.slice(-most / 2)}` : text;
}

interface Pointed { message: Message; at: number; x: number; y: number }

// The token that is pointed at, in the strip of one of the answers.
const pointed = signal<Pointed | null>(null);

export function MemoryStrip({ message }: { message: Message }) {
  const [isOpen, setOpen] = useState(false);
  changes(message.id).value;
  const { usage, memory } = message;
  if (!usage || !memory) return null;
  const length = usage.total_tokens, spans = upTo(memory, length), summary = `Memory: ${percent(usage.kvllm.kept_share)} kept`;
  return (
    <div class="memory">
      <Tokens message={message} length={length}>
        <Strip spans={spans} prompt={usage.prompt_tokens} length={length} label={`${summary} of ${count(length, "token")}`} />
      </Tokens>
      <p class="under">{summary}{memory.events.length ? `, compressed ${memory.events.length === 1 ? "once" : `${memory.events.length} times`}` : ""}</p>
      <details onToggle={event => setOpen(event.currentTarget.open)}>
        <summary>Details</summary>
        {isOpen && <Details message={message} spans={spans} />}
      </details>
    </div>
  );
}

// What a pointer or the arrow keys go through, token by token.
function Tokens({ message, length, children }: { message: Message; length: number; children: ComponentChildren }) {
  const now = () => pointed.value?.message.id === message.id ? pointed.value.at : 0;  // a key may come before the next frame
  const show = (box: HTMLElement, token: number) => {
    const { left, top, width } = box.getBoundingClientRect(), found = Math.max(0, Math.min(length - 1, Math.floor(token)));
    pointed.value = { message, at: found, x: left + width * (found + 0.5) / length, y: top };
  };
  const point = (event: PointerEvent) => {
    const box = event.currentTarget as HTMLElement, { left, width } = box.getBoundingClientRect();
    show(box, length * (event.clientX - left) / width);
  };
  const key = (event: KeyboardEvent) => {
    const at = now(), page = Math.max(1, Math.round(length / 20));
    const moves: Record<string, number> = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1, PageDown: at - page, PageUp: at + page, Home: 0, End: length - 1 };
    if (event.key === "Escape") pointed.value = null;
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(event.currentTarget as HTMLElement, moves[event.key]);
  };
  const leave = () => { pointed.value = null; };
  return (
    <div class="tokens" role="slider" tabindex={0} aria-label="Tokens of this answer in memory" aria-valuemin={0} aria-valuemax={length - 1} aria-valuenow={now()}
      aria-valuetext={`token ${now()}`} onPointerMove={point} onPointerDown={point} onPointerLeave={leave}
      onFocus={event => { if (event.currentTarget.matches(":focus-visible")) show(event.currentTarget, now()); }} onBlur={leave} onKeyDown={key}>
      {children}
    </div>
  );
}

// What the token pointed at says, where it does, and which layers and heads hold it.
export function TokenTip() {
  const shown = pointed.value, box = useRef<HTMLDivElement>(null), [found, setFound] = useState<Held | null>(null);
  useEffect(() => {
    if (!shown) return;
    const { message, at } = shown, spans = upTo(message.memory!, message.usage!.total_tokens);
    let isShown = true;
    held(message.memory!, spans.find(span => at < span[1]) ?? spans.at(-1)!, at).then(each => { if (isShown) setFound(each); });
    return () => { isShown = false; };
  }, [shown]);
  useLayoutEffect(() => {
    if (!shown || !box.current) return;
    const { width, height } = box.current.getBoundingClientRect();
    box.current.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, shown.x - width / 2))}px`;
    box.current.style.top = `${shown.y > height + 16 ? shown.y - height - 8 : shown.y + HEIGHT + 8}px`;
  });
  if (!shown || !found) return null;
  const { message, at } = shown, text = excerpt(message, [at - 2, at + 3, 0], 40);
  return (
    <div class="tip" ref={box} role="status">
      <p><b>Token {whole(at)}</b> {at < message.usage!.prompt_tokens ? "of what was asked" : <q dir="auto">{text}</q>}</p>
      <p>{inWords(found)}{found.event ? ` Compressed at token ${whole(found.event)}.` : ""}</p>
      {found.layers.length > 0 && <HolderGrid held={found} />}
    </div>
  );
}

function inWords({ share, layers }: Held): string {
  const facts = info.value!, elsewhere = facts.dropped_to ? `, the rest in ${facts.dropped_to}` : "";
  const all = layers.flatMap(each => each.heads), number = all.filter(Boolean).length;
  if (share === 1) return `Held by all layers and heads, in the pool: ${facts.stored}.`;
  if (!all.length) return `${percent(share)} of what is around it is held, in the pool: ${facts.stored}${elsewhere}.`;
  if (!number) return facts.dropped_to ? `Held in ${facts.dropped_to} alone.` : "Held nowhere any more.";
  return `Held by ${number} of ${all.length} heads, in the pool: ${facts.stored}${elsewhere}.`;
}

// A column for each layer, a row for each of its heads.
function HolderGrid({ held: { layers } }: { held: Held }) {
  const heads = layers[0].heads.length, size = Math.max(3, Math.min(10, Math.floor(280 / layers.length)));
  return (
    <>
      <svg class="holders" width={size * layers.length} height={size * heads} aria-hidden="true">
        {layers.flatMap(({ heads: holds }, x) => holds.map((isHeld, y) =>
          <rect class={isHeld ? "is-held" : "is-gone"} x={size * x} y={size * y} width={size - 1} height={size - 1} />))}
      </svg>
      <small>{count(layers.length, "layer")} across, {count(heads, "head")} down</small>
    </>
  );
}

// A bar for each span, as high as the share that is left.
export function Strip({ spans, prompt, length, label }: { spans: Span[]; prompt: number; length: number; label: string }) {
  return (
    <svg class="strip" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={label}>
      {spans.map(span => <Bar span={span} prompt={prompt} length={length} />)}
    </svg>
  );
}

function Bar({ span, prompt, length }: { span: Span; prompt: number; length: number }) {
  const [start, end, kept] = span, share = kept / (end - start), x = (position: number) => WIDTH * position / length;
  const parts: [number, number, string][] = share < 1 ? [[start, end, "compressed"]]
    : [[start, Math.min(end, prompt), "prompt"], [Math.max(start, prompt), end, "tail"]];
  return <>{parts.filter(([from, to]) => to > from).map(([from, to, tone]) => {
    const width = Math.max(1, x(to) - x(from) - 1);
    return (
      <g>
        <rect class="back" x={x(from)} y={0} width={width} height={HEIGHT} />
        <rect class={`fill t-${tone}`} x={x(from)} y={HEIGHT * (1 - share)} width={width} height={HEIGHT * share} />
      </g>
    );
  })}</>;
}

function Details({ message, spans }: { message: Message; spans: Span[] }) {
  changes(message.id).value;
  const { usage, memory } = message, facts = info.value, held = usage!.total_tokens * usage!.kvllm.kept_share;
  return (
    <>
      <p>
        {count(usage!.total_tokens, "token")}, {count(Math.round(held), "KV pair")} of them left in the mean over layers
        {facts ? `: ${bytes(held * facts.pair_bytes)} of ${bytes(usage!.total_tokens * facts.pair_bytes)}, ${facts.stored}` : ""}.
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
  if (!begun) return count(tokens, "token");  // the page was away
  const speed = tokens > 1 && passed > 0 ? ` · ${whole((tokens - 1) / passed)} tokens/s` : "";
  return `${count(tokens, "token")}${speed} · first after ${((first - begun) / 1000).toFixed(2)} s`;
}

// What an answer's KV cache takes.
export function taken(message: Message): string {
  const facts = info.value, { usage } = message;
  return facts && usage ? bytes(usage.total_tokens * usage.kvllm.kept_share * facts.pair_bytes) : "";
}
