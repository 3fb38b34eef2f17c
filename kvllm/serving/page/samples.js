// The samples that the server has sent, and the points of charts made from them.

const KEPT_SECONDS = 900;
const MOST_POINTS = 300;
const COUNTERS = ["steps", "output_tokens", "preemptions", "windows", "model_seconds", "recompute_seconds",
  "score_seconds", "compact_seconds"];

let columns = [];
let samples = [];

export function start(names, history) {
  columns = names;
  samples = history.map(named);
}

export function add(sample) {
  samples.push(named(sample));
  while (samples[0].time < samples.at(-1).time - KEPT_SECONDS) samples.shift();
}

export const latest = () => samples.at(-1);

const named = sample => Object.fromEntries(columns.map((name, i) => [name, sample[i]]));

// Points of the last `range` seconds: samples with `change`, what the counters have grown by since the point before.
export function points(range) {
  if (!samples.length) return [];
  const begin = latest().time - range;
  const first = Math.max(0, samples.findIndex(sample => sample.time >= begin) - 1);
  const stride = Math.max(1, Math.ceil((samples.length - first) / MOST_POINTS));
  // Counted from the end of all samples, points would change places with every new sample.
  const offset = Math.round(samples[first].time / 0.5) % stride;
  const chosen = [];
  for (let i = first + (stride - offset) % stride; i < samples.length; i += stride) chosen.push(samples[i]);
  if (chosen.at(-1) !== latest()) chosen.push(latest());
  return chosen.slice(1).map((sample, i) => ({ ...sample, change: change(chosen[i], sample) }));
}

function change(before, sample) {
  const grown = { seconds: sample.time - before.time };
  // Counters fall when the engine starts again.
  for (const name of COUNTERS) grown[name] = Math.max(0, sample[name] - before[name]);
  return grown;
}
