// The KV pool over time, by what blocks hold.

import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { whole } from "./format.js";

const KINDS = [
  ["prompts", "prompt"], ["compressed", "compressed"], ["not yet compressed", "tail"],
  ["reusable prefixes", "reusable"], ["free", "free"],
];

export function makePoolChart() {
  const series = KINDS.map(([name, tone]) =>
    ({ name, tone, stacked: true, value: point => point[tone] }));
  series.push({ name: "without compression", tone: "ink", dash: "dashed", value: point => point.without_compression });
  return new Chart(byId("pool"), { label: "Blocks of the KV pool", series, format: whole });
}
