// A prompt sent once, or twice with the same seed at two settings, side by side.

import { byId, element, setText } from "./dom.js";
import { percent, seconds, whole } from "./format.js";
import { headers, problem } from "./key.js";
import { events } from "./stream.js";

const KEPT = { retain_blocks: "Blocks kept of a window", budget_tokens: "KV pairs kept" };
const EXAMPLE = "words: d3,f9\n#>d+f=k\n";
let info = null, sides = [], controller = null;

export function setUpChat() {
  byId("compare").addEventListener("change", showSides);
  byId("try").addEventListener("submit", event => { event.preventDefault(); send(); });
  byId("stop").addEventListener("click", () => controller?.abort());
}

export function showChat(newInfo) {
  if (info?.model === newInfo.model) return;
  info = newInfo;
  const prompt = byId("prompt");
  if (!prompt.value && info.model === "reasoner") prompt.value = EXAMPLE;
  const kind = info.has_chat_template ? "The prompt is sent as a message of a chat."
    : "The model has no chat template: it continues the prompt.";
  const differ = info.kept_option ? "A and B may differ in sampling and in what compression keeps." : "A and B may differ in sampling.";
  setText(byId("try-hint"), `${kind} ${differ}`);
  showSides();
}

function showSides() {
  const names = byId("compare").checked ? ["A", "B"] : ["A"];
  sides = names.map(name => sides.find(side => side.name === name) ?? makeSide(name));
  byId("sides").replaceChildren(...sides.map(side => side.box));
}

function makeSide(name) {
  const side = { name, fields: { temperature: number("Temperature", 0, 0, "any"), top_p: number("Top p", 1, 0, "any") } };
  if (info.kept_option) addCompression(side);
  side.thought = element("pre", { tabindex: 0 });
  side.thoughtBox = element("details", { hidden: "" }, element("summary", {}, "Thought"), side.thought);
  side.text = element("pre", { tabindex: 0, "aria-label": `Answer ${name}` });
  side.measured = element("p", { class: "measured", role: "status" });
  side.box = element("fieldset", {}, element("legend", {}, name), element("div", { class: "row" },
    ...Object.values(side.fields).map(field => field.label)), side.measured, side.thoughtBox, side.text);
  return side;
}

function addCompression(side) {
  const whole = element("input", { type: "checkbox" });
  // What a comparison is about: A drops nothing.
  whole.checked = side.name === "A";
  side.fields.whole = { input: whole, label: element("label", {}, whole, " keep all KV pairs") };
  side.fields.kept = number(KEPT[info.kept_option], info.kept_default, 1, 1);
  const show = () => { side.fields.kept.input.disabled = whole.checked; };
  whole.addEventListener("change", show);
  show();
}

function number(label, value, min, step) {
  const input = element("input", { type: "number", min, step, value });
  return { input, label: element("label", {}, `${label} `, input) };
}

async function send() {
  controller = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  await Promise.all(sides.map(side => run(side, controller.signal)));
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

async function run(side, signal) {
  const answer = { begin: performance.now(), first: null, tokens: 0, text: "", thought: "", usage: null };
  side.measured.classList.remove("error");
  show(side, answer);
  try {
    const path = info.has_chat_template ? "v1/chat/completions" : "v1/completions";
    const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body(side)), signal };
    const response = await fetch(path, options);
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      add(answer, event);
      show(side, answer);
    }
  } catch (error) {
    side.measured.classList.toggle("error", !signal.aborted);
    setText(side.measured, signal.aborted ? `stopped behind ${whole(answer.tokens)} tokens` : error.message);
  }
}

function body(side) {
  const prompt = byId("prompt").value;
  const request = {
    max_tokens: Number(byId("max-tokens").value), seed: Number(byId("seed").value), stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: Number(side.fields.temperature.input.value), top_p: Number(side.fields.top_p.input.value),
  };
  const { whole, kept } = side.fields;
  if (whole) request.compression = whole.input.checked ? { compress: false } : { [info.kept_option]: Number(kept.input.value) };
  return info.has_chat_template ? { ...request, messages: [{ role: "user", content: prompt }] } : { ...request, prompt };
}

function add(answer, event) {
  const choice = event.choices[0];
  answer.usage = event.usage ?? answer.usage;
  answer.tokens = answer.usage?.completion_tokens ?? answer.tokens;
  if (!choice) return;
  answer.first ??= performance.now();
  answer.last = performance.now();
  answer.thought += choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? "";
  answer.text += choice.delta?.content ?? choice.text ?? "";
}

function show(side, answer) {
  const end = answer.text.indexOf("</think>");
  const thought = answer.thought + (end < 0 ? "" : answer.text.slice(0, end).replace("<think>", ""));
  side.thoughtBox.hidden = !thought;
  setText(side.thought, thought);
  setText(side.text, end < 0 ? answer.text : answer.text.slice(end + "</think>".length));
  if (answer.first === null) return setText(side.measured, "waiting");
  const speed = answer.last > answer.first ? `${whole((answer.tokens - 1) / (answer.last - answer.first) * 1000)} tokens/s · ` : "";
  const kept = answer.usage?.kvllm ? ` · ${percent(answer.usage.kvllm.kept_share)} of KV pairs kept` : "";
  setText(side.measured, `${whole(answer.tokens)} tokens · ${speed}first token ${seconds((answer.first - answer.begin) / 1000)}${kept}`);
}
