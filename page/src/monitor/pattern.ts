// One pattern for each kind of area: kinds differ without colour, too.

import { svg } from "./elements";

const HATCHES: Record<string, string> = {
  prompt: "", compressed: "M-2 2L2 -2M0 8L8 0M6 10L10 6", tail: "M0 4H8", reusable: "M4 0V8", free: "",
};

export function patterns(): SVGElement {
  return svg("defs", {}, ...Object.keys(HATCHES).map(tone =>
    svg("pattern", { id: `p-${tone}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 8, height: 8, class: `fill t-${tone}` }), svg("path", { d: HATCHES[tone], class: "hatch" }))));
}

// What a series looks like, for a legend. Areas stand on the definitions of the chart beside it.
export function sample(series: { tone: string; stacked?: boolean; dash?: string }): SVGElement {
  const picture = svg("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" });
  if (series.stacked) picture.append(svg("rect", { width: 18, height: 12, fill: `url(#p-${series.tone})` }));
  else picture.append(svg("path", { d: "M0 6H18", class: `line ${series.dash ?? ""} t-${series.tone}` }));
  return picture;
}
