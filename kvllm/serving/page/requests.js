// The table of unfinished requests, those with most blocks first. Each can be opened and cancelled.

import { byId, element, setText } from "./dom.js";
import { count, percent, seconds, whole } from "./format.js";
import { headers, problem } from "./key.js";

const FEW = 8;
const LABELS = ["Request", "Key", "State", "Age", "Prompt", "Output", "Blocks", "KV kept", "Windows", "Preempted", "Cached", ""];
const rows = new Map();
let showsAll = false, last = [], openRequest = () => {}, ownKey = "";

export function setUpRequests(onOpen) {
  openRequest = onOpen;
  byId("all-requests").addEventListener("click", () => { showsAll = !showsAll; showRequests(last, total, ownKey); });
}

let total = 0;

export function showRequests(requests, unfinished, key) {
  [last, total, ownKey] = [requests, unfinished, key];
  const table = byId("requests"), body = table.tBodies[0];
  const shown = showsAll ? requests : requests.slice(0, FEW);
  const names = new Set(shown.map(name));
  for (const [known, row] of rows) {
    if (!names.has(known)) { row.remove(); rows.delete(known); }
  }
  const elements = shown.map(request => showRow(request));
  // A row that is moved would lose the focus.
  if (!body.contains(document.activeElement)) elements.forEach((row, i) => { if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null); });
  else body.append(...elements.filter(row => !row.isConnected));
  table.hidden = !requests.length;
  const unlisted = unfinished > requests.length ? `, of which ${requests.length} are listed` : "";
  setText(byId("requests-summary"), unfinished ? `${count(unfinished, "sequence")} unfinished${unlisted}.` : "No requests.");
  const button = byId("all-requests");
  button.hidden = requests.length <= FEW;
  setText(button, showsAll ? "Show fewer" : `Show all ${requests.length}`);
}

const name = request => `${request.id} ${request.index}`;

function showRow(request) {
  const row = rows.get(name(request)) ?? addRow(request);
  const kept = request.blocks && request.tokens ? percent(request.kept / request.tokens) : "–";
  const state = request.state === "waiting" && request.preemptions ? "waiting (preempted)" : request.state;
  const texts = [request.tenant || "–", state, seconds(request.age), whole(request.prompt_tokens), whole(request.output_tokens),
    whole(request.blocks), kept, whole(request.windows), whole(request.preemptions), whole(request.cached_tokens)];
  texts.forEach((text, i) => setText(row.cells[i + 1], text));
  return row;
}

function addRow(request) {
  const row = element("tr");
  LABELS.forEach(label => row.append(element("td", { "data-label": label })));
  const title = request.index ? `${request.id} #${request.index}` : request.id;
  const open = element("button", { type: "button", class: "link" }, title);
  open.addEventListener("click", () => openRequest(request.id));
  row.cells[0].append(open);
  if (request.tenant === ownKey) {
    const cancel = element("button", { type: "button", "aria-label": `Cancel ${title}` }, "Cancel");
    cancel.addEventListener("click", async () => {
      cancel.disabled = true;
      const failure = await cancelRequest(request.id);
      if (failure) { cancel.disabled = false; cancel.title = failure; }
    });
    row.cells[LABELS.length - 1].append(cancel);
  }
  rows.set(name(request), row);
  return row;
}

// Returns what went wrong, "" if nothing did.
export async function cancelRequest(id) {
  try {
    const response = await fetch(`live/requests/${encodeURIComponent(id)}`, { method: "DELETE", headers: headers() });
    return response.ok ? "" : await problem(response);
  } catch (error) {
    return error.message;
  }
}
