// The charts of the monitor, in the order in which they are shown.

import { seconds, whole } from "../format";
import { Chart, type Series } from "./chart";
import type { Point } from "./samples";

const KINDS = [
  ["prompts", "prompt"], ["compressed", "compressed"], ["not yet compressed", "tail"], ["reusable", "reusable"], ["free", "free"],
];
const PHASES = [["model", "prompt"], ["recompute", "reusable"], ["score", "tail"], ["compact", "compressed"]];

export const TITLES: [id: string, title: string][] = [
  ["pool", "KV pool, blocks"], ["queue", "Sequences"], ["speed", "Output tokens/s"],
  ["gap", "Time between tokens"], ["first", "Time to the first token"], ["step", "Time of a step"],
];

export const speed = ({ change }: Point) => change.seconds ? change.output_tokens / change.seconds : 0;

const ofStep = (point: Point, phase: string) => point.change.steps ? point.change[`${phase}_seconds`] / point.change.steps : 0;

export function makeCharts(box: (id: string) => Element): Chart[] {
  const pool: Series[] = KINDS.map(([name, tone]) => ({ name, tone, stacked: true, value: point => point[tone] }));
  pool.push({ name: "without compression", tone: "ink", dash: "dashed", value: point => point.without_compression });
  const queue: Series[] = [
    { name: "running", tone: "prompt", value: point => point.running },
    { name: "waiting", tone: "tail", dash: "dashed", value: point => point.waiting },
  ];
  const marks = ({ change }: Point) => change.preemptions ? "×" : change.windows ? "▾" : "";
  const phases: Series[] = PHASES.map(([name, tone]) => ({ name, tone, stacked: true, value: point => ofStep(point, name) }));
  return [
    new Chart(box("pool"), { label: "Blocks of the KV pool", series: pool, format: whole }),
    new Chart(box("queue"), { label: "Sequences", series: queue, format: whole, marks }),
    new Chart(box("speed"), { label: "Output tokens per second", series: [{ name: "all requests", tone: "prompt", value: speed }], format: whole }),
    new Chart(box("step"), { label: "Mean time of a step", series: phases, format: seconds }),
    percentiles(box("gap"), "gap", "Time between tokens"),
    percentiles(box("first"), "first", "Time to the first token"),
  ];
}

function percentiles(box: Element, name: string, label: string): Chart {
  const series: Series[] = [
    { name: "median", tone: "prompt", value: point => point[`${name}_p50`] },
    { name: "99th percentile", tone: "tail", dash: "dashed", value: point => point[`${name}_p99`] },
  ];
  return new Chart(box, { label, series, format: seconds });
}
