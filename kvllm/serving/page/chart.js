// A chart over time: stacked areas or lines, drawn as SVG. Arrow keys or a pointer read values off.

import { element, setText, svg } from "./dom.js";
import { seconds } from "./format.js";
import { patterns, sample as legendSample } from "./pattern.js";

const HEIGHT = 190;
const TICKS = [0, 0.5, 1];
const SHORTEST = 20;  // seconds that a chart covers at least
const LEFT = 52, RIGHT = 8, TOP = 20, BOTTOM = 20, GAP = 6;  // LEFT grows with the labels of the axis

// series: {name, tone, value(point), stacked, dash}. marks(point): text above a point. format: of values.
// cutsPeaks: the highest 3% of the points may leave the chart, so that one long step does not flatten all others.
export class Chart {
  constructor(parent, { label, series, format, marks = () => "", cutsPeaks = false }) {
    Object.assign(this, { label, series, format, marks, cutsPeaks, points: [], cursor: null, range: 60 });
    this.svg = svg("svg", { role: "img", tabindex: 0, height: HEIGHT });
    this.legend = element("ul", { class: "legend" });
    this.values = series.map(each => this.addLegend(each));
    this.when = element("li", { class: "when" });
    this.legend.append(this.when);
    this.box = element("div", { class: "chart" }, this.svg, this.legend);
    parent.append(this.box);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.moveTo(null));
    this.svg.addEventListener("blur", () => this.moveTo(null));
    this.svg.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  addLegend(series) {
    const value = element("b");
    const item = element("li", {}, legendSample(series), `${series.name} `, value);
    this.legend.append(item);
    return { item, value };
  }

  update(points, range) {
    // A cursor stays at its time while the chart moves on.
    const time = this.cursor === null ? null : this.points[this.cursor]?.time;
    this.points = points;
    this.range = points.length ? Math.min(range, Math.max(SHORTEST, points.at(-1).time - points[0].time)) : range;
    this.cursor = time == null ? null : Math.max(0, points.findIndex(point => point.time >= time));
    this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width || !this.points.length || document.hidden) return;
    this.width = width;
    this.end = this.points.at(-1).time;
    const shown = this.series;
    const top = niceTop(this.highest(shown));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const y = value => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * Math.min(1, value / top);
    const labels = this.labels(top, y);
    this.svg.append(...labels);  // only what is in the document has a width
    this.left = Math.max(LEFT, GAP + Math.ceil(Math.max(...labels.map(label => label.getComputedTextLength()))));
    for (const label of labels) label.setAttribute("x", this.left - GAP);
    this.svg.replaceChildren(patterns(), ...this.axes(top, y), ...labels, ...this.areas(shown, y),
      ...this.lines(shown, y), ...this.markTexts(), ...this.cursorLine());
    this.svg.setAttribute("aria-label", this.describe());
    this.showValues(shown);
  }

  highest(shown) {
    const heights = this.points.map(point => height(shown, point)).sort((a, b) => a - b);
    return heights[Math.floor((heights.length - 1) * (this.cutsPeaks ? 0.97 : 1))] || heights.at(-1);
  }

  x(time) {
    return this.left + (this.width - this.left - RIGHT) * Math.max(0, 1 - (this.end - time) / this.range);
  }

  labels(top, y) {
    return TICKS.map(share => svg("text", { y: y(top * share) + 4, "text-anchor": "end" }, this.format(top * share)));
  }

  axes(top, y) {
    const parts = TICKS.map(share => y(top * share)).map(at =>
      svg("line", { class: "grid", x1: this.left, x2: this.width - RIGHT, y1: at, y2: at }));
    const bottom = HEIGHT - 4;
    parts.push(svg("text", { x: this.left, y: bottom }, `${this.range < 90 ? `${Math.round(this.range)} s` : `${Math.round(this.range / 60)} min`} ago`));
    parts.push(svg("text", { x: this.width - RIGHT, y: bottom, "text-anchor": "end" }, "now"));
    return parts;
  }

  areas(shown, y) {
    const floor = this.points.map(() => 0);
    return shown.filter(each => each.stacked).flatMap(series => {
      const below = floor.map((value, i) => [this.x(this.points[i].time), y(value)]);
      this.points.forEach((point, i) => { floor[i] += series.value(point); });
      const above = floor.map((value, i) => [below[i][0], y(value)]);
      const edge = `M${above.map(pair).join("L")}`;
      return [svg("path", { d: `${edge}L${below.reverse().map(pair).join("L")}Z`, fill: `url(#p-${series.tone})` }),
        svg("path", { d: edge, class: "edge" })];
    });
  }

  lines(shown, y) {
    return shown.filter(each => !each.stacked).map(series => {
      let d = "", pen = "M";
      for (const point of this.points) {
        const value = series.value(point);
        if (value === null) { pen = "M"; continue; }
        d += `${pen}${pair([this.x(point.time), y(value)])}`;
        pen = "L";
      }
      return svg("path", { d, class: `line ${series.dash ?? ""} t-${series.tone}` });
    });
  }

  markTexts() {
    const marked = this.points.map(point => [point, this.marks(point)]).filter(([, text]) => text);
    return marked.map(([point, text]) => svg("text", { class: "mark", x: this.x(point.time), y: TOP - 6 }, text));
  }

  cursorLine() {
    const point = this.points[this.cursor];
    if (this.cursor === null || !point) return [];
    const x = this.x(point.time);
    return [svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM })];
  }

  showValues(shown) {
    const point = this.points[this.cursor ?? this.points.length - 1];
    this.series.forEach((series, i) => {
      this.values[i].item.hidden = !shown.includes(series);
      const value = series.value(point);
      setText(this.values[i].value, value === null ? "–" : this.format(value));
    });
    setText(this.when, this.cursor === null ? "now" : `${seconds(this.end - point.time)} ago`);
  }

  describe() {
    const point = this.points[this.cursor ?? this.points.length - 1];
    const values = this.series.map(series => {
      const value = series.value(point);
      return `${series.name} ${value === null ? "none" : this.format(value)}`;
    });
    return `${this.label}: ${values.join(", ")}. Arrow keys move through time.`;
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * this.width / box.width;
    const distances = this.points.map(point => Math.abs(this.x(point.time) - x));
    this.moveTo(distances.indexOf(Math.min(...distances)));
  }

  key(event) {
    const last = this.points.length - 1, at = this.cursor ?? last;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 20, PageDown: at + 20, Home: 0, End: last };
    if (event.key === "Escape") return this.moveTo(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.moveTo(Math.min(last, Math.max(0, moves[event.key])));
  }

  moveTo(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.draw();
  }
}

const pair = ([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`;

function height(series, point) {
  const stack = series.filter(each => each.stacked).reduce((sum, each) => sum + each.value(point), 0);
  return Math.max(stack, ...series.filter(each => !each.stacked).map(each => each.value(point) ?? 0));
}

// The next of 1, 1.2, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten.
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10].find(step => step * power >= value * 0.9999);
}
