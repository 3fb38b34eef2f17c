// What the server tells of itself: the model, what compression may be asked for, and its figures while the monitor is open.

import { signal } from "@preact/signals";
import { Problem, askForKey, call, events, forgetKey, keys, nameKey } from "./api";

export interface Info {
  model: string; max_model_len: number; block_size: number; max_num_seqs: number; compression: string;
  has_chat_template: boolean; kept_option: string; kept_default: number; kept_of: number; pair_bytes: number;
  stored: string; dropped_to: string; needs_key: boolean; key: string;
}

export const info = signal<Info | null>(null);
export const models = signal<string[]>([]);
// A model that was chosen, if it is still there.
export const offered = (name: string) => models.value.includes(name) ? name : undefined;
export const status = signal("connecting");

const LONGEST_PAUSE = 4000;
let controller = new AbortController();
let wantsTicks = false, receive: (event: any) => void = () => {};

// Figures go to `react` while they are wanted: a stream that nobody looks at takes one of the browser's few connections.
export function connect(react: (event: any) => void) {
  receive = react;
  run();
}

export function wantTicks(wanted: boolean) {
  wantsTicks = wanted;
  wake();
  if (!wanted && info.value) controller.abort();
}

// Opens the stream anew, with the key of now.
export function reconnect() {
  info.value = null;
  status.value = "connecting";
  controller.abort();
  wake();
}

let wake: () => void = () => {};
const woken = () => new Promise<void>(resolve => { wake = resolve; });

async function run() {
  let pause = 500;
  for (;;) {
    if (info.value && !wantsTicks) await woken();
    controller = new AbortController();
    try {
      const response = await call("live/events", { signal: controller.signal });
      pause = 500;
      for await (const { data } of events(response)) {
        if (data === "done") continue;
        receive(data);
        if (data.type === "start") {
          nameKey(data.info.key);
          info.value = data.info;
          status.value = "live";
          await listModels();
          if (!wantsTicks) controller.abort();
        }
      }
      status.value = "The server has closed the connection.";
    } catch (error) {
      if (controller.signal.aborted) continue;
      if (error instanceof Problem && error.status === 401) {
        status.value = "a key is needed";
        const [refused] = keys.value;
        if (refused) forgetKey(refused);
        await askForKey(refused ? "The server does not know this key: give another one." : "This server needs an API key.");
        if (!keys.value.length) await woken();  // the user has closed the dialog: “Key” opens it again
        continue;
      }
      const isOut = !(error instanceof Problem) || error.status === 0;
      status.value = isOut ? "The server cannot be reached. The page tries again by itself." : error.message;
    }
    await new Promise(resolve => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
}

async function listModels() {
  const listed = await (await call("v1/models", { signal: controller.signal })).json();
  models.value = listed.data.map((model: { id: string }) => model.id);
}
