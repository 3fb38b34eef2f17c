// A chart over time: stacked areas or lines, drawn as SVG. Arrow keys or a pointer read values off.

import { seconds, whole } from "../format";
import { element, setText, svg } from "./elements";
import { patterns, sample as legendSample } from "./pattern";
import type { Point } from "./samples";

const TALL = 150, LOW = 84, NARROW = 380;  // pixels
const SHORTEST = 20;  // seconds that a chart covers at least
const LEFT = 22, RIGHT = 6, TOP = 18, BOTTOM = 18, GAP = 5;  // LEFT grows with the labels of the axis

// series: {name, tone, value(point), stacked, dash}. marks(point): text above a point. format: of values.
export interface Series { name: string; tone: string; value: (point: Point) => number | null; stacked?: boolean; dash?: string }
export interface Options { label: string; series: Series[]; format: (value: number) => string; marks?: (point: Point) => string }

export class Chart {
  private points: Point[] = [];
  private cursor: number | null = null;
  private range = 60;
  private width = 0;
  private height = TALL;
  private left = LEFT;
  private end = 0;
  private label: string;
  private series: Series[];
  private format: (value: number) => string;
  private marks: (point: Point) => string;
  private svg: SVGElement;
  private legend: HTMLElement;
  private values: { item: HTMLElement; value: HTMLElement }[];
  private when: HTMLElement;
  private box: HTMLElement;

  constructor(parent: Element, { label, series, format, marks = () => "" }: Options) {
    [this.label, this.series, this.format, this.marks] = [label, series, format, marks];
    this.svg = svg("svg", { role: "img", tabindex: 0 });
    this.legend = element("ul", { class: "legend" });
    this.values = series.map(each => this.addLegend(each));
    this.when = element("li", { class: "when" });
    this.legend.append(this.when);
    this.box = element("div", { class: "chart" }, this.svg, this.legend);
    parent.append(this.box);
    this.svg.addEventListener("pointermove", event => this.point(event as PointerEvent));
    this.svg.addEventListener("pointerleave", () => this.moveTo(null));
    this.svg.addEventListener("blur", () => this.moveTo(null));
    this.svg.addEventListener("keydown", event => this.key(event as KeyboardEvent));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  private addLegend(series: Series) {
    const value = element("b");
    const item = element("li", {}, legendSample(series), `${series.name} `, value);
    this.legend.append(item);
    return { item, value };
  }

  update(points: Point[], range: number) {
    // A cursor stays at its time while the chart moves on.
    const time = this.cursor === null ? null : this.points[this.cursor]?.time;
    this.points = points;
    this.range = points.length ? Math.min(range, Math.max(SHORTEST, points.at(-1)!.time - points[0].time)) : range;
    this.cursor = time == null ? null : Math.max(0, points.findIndex(point => point.time >= time));
    this.draw();
  }

  private draw() {
    const width = this.box.clientWidth;
    if (!width || !this.points.length || document.hidden) return;
    this.width = width;
    this.height = width < NARROW ? LOW : TALL;
    this.svg.setAttribute("height", String(this.height));
    this.end = this.points.at(-1)!.time;
    const { top, ticks } = axis(this.highest(), this.format === whole);
    const HEIGHT = this.height;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const y = (value: number) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * Math.min(1, value / top);
    const labels = ticks.map(tick => svg("text", { y: y(tick) + 4, "text-anchor": "end" }, this.format(tick)) as SVGTextElement);
    this.svg.append(...labels);  // only what is in the document has a width
    this.left = Math.max(LEFT, GAP + Math.ceil(Math.max(...labels.map(label => label.getComputedTextLength()))));
    for (const label of labels) label.setAttribute("x", String(this.left - GAP));
    this.svg.replaceChildren(patterns(), ...this.axes(ticks, y), ...labels, ...this.areas(y),
      ...this.lines(y), ...this.markTexts(), ...this.cursorLine());
    this.svg.setAttribute("aria-label", this.describe());
    this.showValues();
  }

  private highest(): number {
    return Math.max(...this.points.map(point => height(this.series, point)));
  }

  private x(time: number): number {
    return this.left + (this.width - this.left - RIGHT) * Math.max(0, 1 - (this.end - time) / this.range);
  }

  private axes(ticks: number[], y: (value: number) => number) {
    const parts = ticks.map(y).map(at =>
      svg("line", { class: "grid", x1: this.left, x2: this.width - RIGHT, y1: at, y2: at }));
    const bottom = this.height - 3;
    parts.push(svg("text", { x: this.left, y: bottom }, `${this.range < 90 ? `${Math.round(this.range)} s` : `${Math.round(this.range / 60)} min`} ago`));
    parts.push(svg("text", { x: this.width - RIGHT, y: bottom, "text-anchor": "end" }, "now"));
    return parts;
  }

  private areas(y: (value: number) => number) {
    const floor = this.points.map(() => 0);
    return this.series.filter(each => each.stacked).flatMap(series => {
      const below = floor.map((value, i): Pair => [this.x(this.points[i].time), y(value)]);
      this.points.forEach((point, i) => { floor[i] += series.value(point) ?? 0; });
      const above = floor.map((value, i): Pair => [below[i][0], y(value)]);
      const edge = `M${above.map(pair).join("L")}`;
      return [svg("path", { d: `${edge}L${below.reverse().map(pair).join("L")}Z`, fill: `url(#p-${series.tone})` }),
        svg("path", { d: edge, class: "edge" })];
    });
  }

  private lines(y: (value: number) => number) {
    return this.series.filter(each => !each.stacked).map(series => {
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

  private markTexts() {
    const marked = this.points.map(point => [point, this.marks(point)] as const).filter(([, text]) => text);
    return marked.map(([point, text]) => svg("text", { class: "mark", x: this.x(point.time), y: TOP - 6 }, text));
  }

  private cursorLine() {
    const point = this.cursor === null ? undefined : this.points[this.cursor];
    if (!point) return [];
    const x = this.x(point.time);
    return [svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM })];
  }

  private showValues() {
    const point = this.points[this.cursor ?? this.points.length - 1];
    this.series.forEach((series, i) => {
      const value = series.value(point);
      setText(this.values[i].value, value === null ? "–" : this.format(value));
    });
    setText(this.when, this.cursor === null ? "now" : `${seconds(this.end - point.time)} ago`);
  }

  private describe() {
    const point = this.points[this.cursor ?? this.points.length - 1];
    const values = this.series.map(series => {
      const value = series.value(point);
      return `${series.name} ${value === null ? "none" : this.format(value)}`;
    });
    return `${this.label}: ${values.join(", ")}. Arrow keys move through time.`;
  }

  private point(event: PointerEvent) {
    const box = this.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * this.width / box.width;
    const distances = this.points.map(point => Math.abs(this.x(point.time) - x));
    this.moveTo(distances.indexOf(Math.min(...distances)));
  }

  private key(event: KeyboardEvent) {
    const last = this.points.length - 1, at = this.cursor ?? last;
    const moves: Record<string, number> = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 20, PageDown: at + 20, Home: 0, End: last };
    if (event.key === "Escape") return this.moveTo(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.moveTo(Math.min(last, Math.max(0, moves[event.key])));
  }

  private moveTo(cursor: number | null) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.draw();
  }
}

type Pair = [x: number, y: number];
const pair = ([x, y]: Pair) => `${x.toFixed(1)},${y.toFixed(1)}`;

function height(series: Series[], point: Point): number {
  const stack = series.filter(each => each.stacked).reduce((sum, each) => sum + (each.value(point) ?? 0), 0);
  return Math.max(stack, ...series.filter(each => !each.stacked).map(each => each.value(point) ?? 0));
}

// The end of an axis, and where its labels stand. Of what is counted, only whole numbers have labels.
export function axis(highest: number, isWhole: boolean): { top: number; ticks: number[] } {
  if (isWhole && highest <= 4) {
    const top = Math.max(1, Math.ceil(highest));
    return { top, ticks: Array.from({ length: top + 1 }, (_, i) => i) };
  }
  if (!(highest > 0)) return { top: 1, ticks: [0, 1] };
  const power = 10 ** Math.floor(Math.log10(highest));
  const steps = isWhole ? [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10] : [1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10];
  const top = steps.map(step => step * power).find(step => step >= highest * 0.9999 && (!isWhole || step % 2 === 0))!;
  return { top, ticks: [0, top / 2, top] };
}
