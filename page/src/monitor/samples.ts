// The samples that the server has sent, and the points of charts made from them.

const KEPT_SECONDS = 900;
const MOST_POINTS = 300;
const COUNTERS = ["steps", "output_tokens", "preemptions", "windows", "model_seconds", "recompute_seconds",
  "score_seconds", "compact_seconds"];

export type Sample = Record<string, number> & { time: number };
export type Point = Sample & { change: any };

let columns: string[] = [];
let samples: Sample[] = [];

export function start(names: string[], history: number[][]) {
  columns = names;
  samples = history.map(named);
}

export function add(sample: number[]) {
  samples.push(named(sample));
  while (samples[0].time < samples.at(-1)!.time - KEPT_SECONDS) samples.shift();
}

export const latest = () => samples.at(-1);

const named = (sample: number[]) => Object.fromEntries(columns.map((name, i) => [name, sample[i]])) as Sample;

// Points of the last `range` seconds: samples with `change`, what the counters have grown by since the point before.
export function points(range: number): Point[] {
  const end = latest();
  if (!end) return [];
  const begin = end.time - range;
  const first = Math.max(0, samples.findIndex(sample => sample.time >= begin) - 1);
  const stride = Math.max(1, Math.ceil((samples.length - first) / MOST_POINTS));
  // Counted from the end of all samples, points would change places with every new sample.
  const offset = Math.round(samples[first].time / 0.5) % stride;
  const chosen: Sample[] = [];
  for (let i = first + (stride - offset) % stride; i < samples.length; i += stride) chosen.push(samples[i]);
  if (chosen.at(-1) !== end) chosen.push(end);
  return chosen.slice(1).map((sample, i) => ({ ...sample, change: change(chosen[i], sample) }) as Point);
}

function change(before: Sample, sample: Sample) {
  const grown: Record<string, number> = { seconds: sample.time - before.time };
  // Counters fall when the engine starts again.
  for (const name of COUNTERS) grown[name] = Math.max(0, sample[name] - before[name]);
  return grown;
}

export interface Event { time: number; windows: number; evicted: number; preemptions: number }

// The last compressions and preemptions, the newest first, put together by samples.
export function events(most: number): Event[] {
  const found: Event[] = [];
  for (let i = samples.length - 1; i > 0 && found.length < most; i--) {
    const [before, now] = [samples[i - 1], samples[i]];
    const windows = now.windows - before.windows, preemptions = now.preemptions - before.preemptions;
    if (windows > 0 || preemptions > 0) found.push({ time: now.time, windows, evicted: now.evicted - before.evicted, preemptions });
  }
  return found;
}
