// A strip of a sequence's positions: how many KV pairs of each window are left.

import { element, svg } from "./dom.js";
import { count, percent, whole } from "./format.js";
import { patterns } from "./pattern.js";

const WIDTH = 1000, HEIGHT = 52;

// spans: [start, end, kept], in order.
export function makeStrip(spans, promptTokens) {
  const length = spans.at(-1)?.[1] ?? 0;
  const kept = spans.reduce((sum, span) => sum + span[2], 0);
  const prompt = promptTokens < length ? `, the prompt ends at ${whole(promptTokens)}` : "";
  const label = `${whole(kept)} of ${count(length, "KV pair")} kept (${length ? percent(kept / length) : "–"})${prompt}`;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, patterns());
  const x = position => WIDTH * position / length;
  for (const span of spans) picture.append(...bars(span, promptTokens, x));
  // Beside the picture, whose text would shrink with it on a phone.
  const ends = element("div", { class: "ends" }, element("span", {}, "0"), element("span", {}, whole(length)));
  return element("div", { class: "strip" }, element("p", {}, label), picture, ends, list(spans));
}

// A span's bar: as high as the share that is left. Its colour is that of the pool's chart.
function bars([start, end, kept], promptTokens, x) {
  const share = kept / (end - start);
  const parts = share < 1 ? [[start, end, "compressed"]]
    : [[start, Math.min(end, promptTokens), "prompt"], [Math.max(start, promptTokens), end, "tail"]];
  return parts.filter(([from, to]) => to > from).flatMap(([from, to, tone]) => {
    const width = Math.max(1, x(to) - x(from) - 1.5);
    const title = svg("title", {}, `positions ${from} to ${to - 1}: ${percent(share)} kept`);
    return [svg("rect", { class: "back", x: x(from), y: 0, width, height: HEIGHT }),
      svg("rect", { x: x(from), y: HEIGHT * (1 - share), width, height: HEIGHT * share, fill: `url(#p-${tone})` }, title)];
  });
}

function list(spans) {
  const items = spans.map(([start, end, kept]) =>
    element("li", {}, `${whole(start)} to ${whole(end - 1)}: ${whole(kept)} of ${whole(end - start)} kept`));
  return element("details", {}, element("summary", {}, `${count(spans.length, "span")} as text`), element("ol", {}, ...items));
}
