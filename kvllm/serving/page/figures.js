// The few figures on top.

import { byId, element, setText } from "./dom.js";
import { count, percent, whole } from "./format.js";
import { speed } from "./timing.js";

const cells = new Map();

export function showFigures(points) {
  const now = points.at(-1);
  const total = now.prompt + now.compressed + now.tail + now.reusable + now.free;
  const used = total - now.reusable - now.free;
  const recent = points.filter(point => point.time > now.time - 5);
  const mean = recent.reduce((sum, point) => sum + speed(point), 0) / recent.length;
  show("Output tokens/s", whole(mean), "over 5 seconds");
  show("Running", whole(now.running), `${whole(now.waiting)} waiting`);
  show("Pool in use", percent(used / total), `${whole(used)} of ${count(total, "block")}`);
  const saved = now.without_compression - used;
  const share = used ? `, ${percent(saved / now.without_compression)} of the need` : "";
  show("Saved by compression", whole(saved), `blocks${share}`);
  show("Preemptions", whole(now.preemptions), `${count(now.windows, "window")} compressed`);
}

function show(name, value, note) {
  if (!cells.has(name)) {
    const cell = { value: element("span"), note: element("small") };
    cells.set(name, cell);
    byId("figures").append(element("div", {}, element("dt", {}, name), element("dd", {}, cell.value, cell.note)));
  }
  setText(cells.get(name).value, value);
  setText(cells.get(name).note, note);
}
