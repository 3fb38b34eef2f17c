// One request, opened: its strips, and its text for the owner of the key.

import { byId, element, setText } from "./dom.js";
import { whole } from "./format.js";
import { headers, problem } from "./key.js";
import { cancelRequest } from "./requests.js";
import { makeStrip } from "./strip.js";

const PERIOD = 1000;
let shown = null, timer = 0, views = new Map();

export function setUpDetail() {
  const dialog = byId("detail");
  byId("detail-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { shown = null; clearTimeout(timer); });
  byId("detail-cancel").addEventListener("click", async () => {
    setText(byId("detail-note"), await cancelRequest(shown) || "The request is cancelled.");
  });
}

export function openDetail(id) {
  shown = id;
  views = new Map();
  byId("detail-title").textContent = id;
  byId("detail-body").replaceChildren();
  byId("detail-cancel").hidden = true;
  setText(byId("detail-note"), "");
  byId("detail").showModal();
  refresh(id);
}

async function refresh(id) {
  try {
    const response = await fetch(`live/requests/${encodeURIComponent(id)}`, { headers: headers() });
    if (id !== shown) return;
    if (!response.ok) throw new Error(await problem(response));
    const detail = await response.json();
    if (!detail.sequences.length) {
      byId("detail-cancel").hidden = true;
      setText(byId("detail-note"), "The request has ended.");
      return;
    }
    show(detail);
  } catch (error) {
    setText(byId("detail-note"), error.message);
  }
  if (id === shown) timer = setTimeout(refresh, PERIOD, id);
}

function show(detail) {
  byId("detail-cancel").hidden = !detail.is_own;
  if (!detail.is_own) setText(byId("detail-note"), "The text is shown to the request's own key alone.");
  for (const sequence of detail.sequences) {
    if (!views.has(sequence.index)) views.set(sequence.index, addView(sequence));
    update(views.get(sequence.index), sequence);
  }
}

function addView(sequence) {
  const view = { title: element("h3"), strip: element("div"), prompt: element("pre", { tabindex: 0 }), output: element("pre", { tabindex: 0 }) };
  const body = element("div", {}, view.title, view.strip);
  if (sequence.prompt !== null) {
    body.append(element("details", {}, element("summary", {}, "Prompt"), view.prompt), element("p", {}, "Output so far"), view.output);
  }
  byId("detail-body").append(body);
  return view;
}

function update(view, sequence) {
  setText(view.title, `Completion ${sequence.index}: ${whole(sequence.prompt_tokens)} prompt tokens, ${whole(sequence.output_tokens)} output tokens`);
  const wasOpen = view.strip.querySelector("details")?.open;
  // A list that is being read stays; the picture goes on.
  if (!wasOpen) view.strip.replaceChildren(makeStrip(sequence.spans, sequence.prompt_tokens));
  setText(view.prompt, sequence.prompt ?? "");
  setText(view.output, sequence.output ?? "");
}
