// The time of steps by phase, tokens per second, and the latencies that clients see.

import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { seconds, whole } from "./format.js";

const PHASES = [["model", "prompt"], ["recompute", "reusable"], ["score", "tail"], ["compact", "compressed"]];

const ofStep = (point, phase) => point.change.steps ? point.change[`${phase}_seconds`] / point.change.steps : 0;

export function makeTimingCharts() {
  const phases = PHASES.map(([name, tone]) => ({ name, tone, stacked: true, value: point => ofStep(point, name) }));
  return [
    new Chart(byId("step"), { label: "Mean time of a step", series: phases, format: seconds, cutsPeaks: true }),
    new Chart(byId("speed"), { label: "Output tokens per second", series: [{ name: "tokens/s", tone: "prompt", value: speed }],
      format: whole }),
    percentiles("gap", "Time between tokens"),
    percentiles("first", "Time to the first token"),
  ];
}

export const speed = ({ change }) => change.seconds ? change.output_tokens / change.seconds : 0;

function percentiles(name, label) {
  const series = [
    { name: "median", tone: "prompt", value: point => point[`${name}_p50`] },
    { name: "99th percentile", tone: "tail", dash: "dashed", value: point => point[`${name}_p99`] },
  ];
  return new Chart(byId(name), { label, series, format: seconds, cutsPeaks: true });
}
