// The live page: one stream of samples, shown by the parts.

import { setUpChat, showChat } from "./chat.js";
import { openDetail, setUpDetail } from "./detail.js";
import { byId, setText } from "./dom.js";
import { showFigures } from "./figures.js";
import { setUpKey } from "./key.js";
import { makePoolChart } from "./pool.js";
import { makeQueueChart, showReason } from "./queue.js";
import { setUpRequests, showRequests } from "./requests.js";
import * as samples from "./samples.js";
import { keepOpen } from "./stream.js";
import { makeTimingCharts } from "./timing.js";
import { showWarnings } from "./warnings.js";

const charts = [makePoolChart(), makeQueueChart(), ...makeTimingCharts()];
let info = null, isPaused = false;

setUpRequests(openDetail);
setUpDetail();
setUpChat();
const reopen = keepOpen("live/events", receive, status => setText(byId("status"), status));
setUpKey(reopen);
byId("range").addEventListener("change", draw);
document.addEventListener("visibilitychange", draw);
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", isPaused);
  setText(byId("pause"), isPaused ? "Go on" : "Pause");
  draw();
});

function receive(event) {
  if (event.type === "start") {
    samples.start(event.columns, event.history);
    showInfo(event.info);
    draw();
    return;
  }
  samples.add(event.sample);
  if (isPaused) return;
  const now = samples.latest();
  showWarnings(event.warnings);
  showReason(now.waiting, event.waiting_for);
  showRequests(event.requests, now.running + now.waiting, info.key);
  draw();
}

function showInfo(newInfo) {
  info = newInfo;
  setText(byId("model"), info.model);
  document.title = `${info.model} · KvLLM`;
  setText(byId("settings"), `${info.compression || "no compression"}; blocks of ${info.block_size} tokens; ` +
    `${info.max_num_seqs} sequences at most` + (info.key ? `; key ${info.key}` : ""));
  byId("change-key").hidden = !info.needs_key;
  showChat(info);
}

function draw() {
  if (isPaused) return;
  const range = Number(byId("range").value);
  const points = samples.points(range);
  if (!points.length) return;
  for (const chart of charts) chart.update(points, range);
  showFigures(points);
}
