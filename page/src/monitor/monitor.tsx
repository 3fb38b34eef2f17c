// What the server does: figures, charts and unfinished requests.

import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { count, percent, whole } from "../format";
import { info, status, wantTicks } from "../server";
import type { Chart } from "./chart";
import { TITLES, makeCharts, speed } from "./charts";
import { Detail, opened } from "./detail";
import { type Row, Requests } from "./requests";
import * as samples from "./samples";

interface Refusal { time: number; tenant: string; path: string; status: number; reason: string }
interface Tick { requests: Row[]; waiting_for: string; warnings: string[]; refused: Refusal[] }
const MOST_EVENTS = 8;
const tick = signal<Tick | null>(null);
const drawn = signal(0);

// Takes what the server sends.
export function receive(event: any) {
  if (event.type === "start") samples.start(event.columns, event.history);
  else {
    samples.add(event.sample);
    tick.value = event;
  }
  drawn.value++;
}

export function Monitor() {
  const [range, setRange] = useState(300), [isPaused, setPaused] = useState(false);
  const charts = useRef<Chart[]>([]), box = useRef<HTMLElement>(null);
  useEffect(() => {
    charts.current = makeCharts(id => box.current!.querySelector(`#${id}`)!);
    const watch = () => wantTicks(!document.hidden);
    watch();
    document.addEventListener("visibilitychange", watch);
    return () => { document.removeEventListener("visibilitychange", watch); wantTicks(false); };
  }, []);
  const changes = drawn.value;
  useEffect(() => {
    const points = samples.points(range);
    if (!isPaused && points.length) for (const chart of charts.current) chart.update(points, range);
  }, [changes, range, isPaused]);
  const shown = useRef(tick.value);
  if (!isPaused) shown.current = tick.value;
  const now = shown.current, server = info.value;
  return (
    <main class="monitor" ref={box}>
      <div class="monitor-bar">
        <h2 class="hidden">Monitor</h2>
        <p id="settings">{server && `${server.compression || "no compression"}; blocks of ${server.block_size} tokens; ${server.max_num_seqs} sequences at most${server.key ? `; key ${server.key}` : ""}`}</p>
        <span id="status" role="status">{status.value}</span>
        <label>Show <select id="range" value={range} onChange={event => setRange(Number(event.currentTarget.value))}>
          <option value={60}>1 minute</option><option value={300}>5 minutes</option><option value={900}>15 minutes</option>
        </select></label>
        <button type="button" id="pause" aria-pressed={isPaused} onClick={() => setPaused(!isPaused)}>{isPaused ? "Go on" : "Pause"}</button>
      </div>
      <div role="status"><ul id="warnings" aria-label="Warnings">{now?.warnings.map(warning => <li>{warning}</li>)}</ul></div>
      <Figures />
      <div class="charts">{TITLES.map(([id, title]) => (
        <section aria-labelledby={`${id}-title`}><h3 id={`${id}-title`}>{title}</h3><div id={id} /></section>
      ))}</div>
      <p id="waiting-for" class="note">
        Dashed in the KV pool: the need without compression. Above the sequences: ▾ compressed, × preempted.
        {now?.waiting_for && ` ${count(samples.latest()?.waiting ?? 0, "sequence")} waiting: the first for ${now.waiting_for}.`}
      </p>
      <Requests rows={now?.requests ?? []} total={(samples.latest()?.running ?? 0) + (samples.latest()?.waiting ?? 0)} ownKey={server?.key ?? ""} />
      <div class="logs">
        <Events list={samples.events(MOST_EVENTS)} />
        {now && server?.needs_key && <Keys rows={now.requests} />}
        {now && now.refused.length > 0 && <Refused list={now.refused} />}
      </div>
      {opened.value && <Detail key={opened.value} id={opened.value} />}
    </main>
  );
}

function Figures() {
  drawn.value;
  const points = samples.points(60), now = points.at(-1);
  if (!now) return <dl id="figures" class="figures" />;
  const total = now.prompt + now.compressed + now.tail + now.reusable + now.free, used = total - now.reusable - now.free;
  const recent = points.filter(point => point.time > now.time - 5);
  const mean = recent.reduce((sum, point) => sum + speed(point), 0) / recent.length;
  const saved = now.without_compression - used;
  const figures: [string, string, string][] = [
    ["Output tokens/s", whole(mean), "over 5 seconds"],
    ["Running", whole(now.running), `${whole(now.waiting)} waiting`],
    ["Pool in use", percent(used / total), `${whole(used)} of ${count(total, "block")}`],
    ["Saved", whole(saved), `blocks${used ? `, ${percent(saved / now.without_compression)} of the need` : ""}`],
    ["Preemptions", whole(now.preemptions), `${count(now.windows, "window")} compressed`],
  ];
  if (now.drafts) {
    const note = `${(1 + now.drafts_right / now.drafts).toFixed(1)} tokens a drafted step`;
    figures.push(["Drafts right", percent(now.drafts_right / now.drafted), note]);
  }
  return <dl id="figures" class="figures">{figures.map(([name, value, note]) => <div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>)}</dl>;
}

const clock = (time: number) => new Date(time * 1000).toLocaleTimeString();

function Events({ list }: { list: samples.Event[] }) {
  return (
    <section aria-labelledby="events-title">
      <h3 id="events-title">Events of late</h3>
      {list.length ? <ul id="events" class="log">{list.map(({ time, windows, evicted, preemptions }) => (
        <li key={time}>{clock(time)} · {[
          windows > 0 && `${count(windows, "window")} compressed, ${count(evicted, "pair")} dropped`,
          preemptions > 0 && `${count(preemptions, "sequence")} preempted`,
        ].filter(Boolean).join("; ")}</li>
      ))}</ul> : <p class="note">Nothing was compressed or preempted.</p>}
    </section>
  );
}

// What the unfinished requests of each key have.
function Keys({ rows }: { rows: Row[] }) {
  const names = [...new Set(rows.map(row => row.tenant))].sort();
  const sum = (list: Row[], value: (row: Row) => number) => whole(list.reduce((total, row) => total + value(row), 0));
  return (
    <section aria-labelledby="keys-title">
      <h3 id="keys-title">Keys</h3>
      {names.length ? <table id="keys">
        <thead><tr>{["Key", "Running", "Waiting", "Blocks"].map(label => <th scope="col">{label}</th>)}</tr></thead>
        <tbody>{names.map(name => {
          const own = rows.filter(row => row.tenant === name), running = own.filter(row => row.state !== "waiting");
          return <tr key={name}><td>{name}</td><td>{running.length}</td><td>{own.length - running.length}</td><td>{sum(own, row => row.blocks)}</td></tr>;
        })}</tbody>
      </table> : <p class="note">No key has a request.</p>}
    </section>
  );
}

function Refused({ list }: { list: Refusal[] }) {
  return (
    <section aria-labelledby="refused-title">
      <h3 id="refused-title">Refused of late</h3>
      <ul id="refused" class="log">{list.map(each => (
        <li>{clock(each.time)} · {each.status} {each.reason} · {each.path}{each.tenant ? ` · ${each.tenant}` : ""}</li>
      ))}</ul>
    </section>
  );
}
