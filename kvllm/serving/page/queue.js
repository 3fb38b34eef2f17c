// Running and waiting sequences, with marks for compressions and preemptions.

import { Chart } from "./chart.js";
import { byId, setText } from "./dom.js";
import { count, whole } from "./format.js";

const MARKS = "Marks above the lines: ▾ windows compressed, × preemptions.";

export function makeQueueChart() {
  const series = [
    { name: "running", tone: "prompt", value: point => point.running },
    { name: "waiting", tone: "tail", dash: "dashed", value: point => point.waiting },
  ];
  const marks = ({ change }) => change.preemptions ? "×" : change.windows ? "▾" : "";
  return new Chart(byId("queue"), { label: "Sequences", series, format: whole, marks });
}

export function showReason(waiting, waitingFor) {
  const reason = waiting ? ` ${count(waiting, "sequence")} waiting: the first for ${waitingFor}.` : "";
  setText(byId("waiting-for"), MARKS + reason);
}
