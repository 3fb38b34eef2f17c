// Plain warnings, as the server words them.

import { byId, element } from "./dom.js";

let shown = "";

export function showWarnings(warnings) {
  const text = warnings.join("\n");
  if (text === shown) return;
  shown = text;
  byId("warnings").replaceChildren(...warnings.map(warning => element("li", {}, warning)));
}
