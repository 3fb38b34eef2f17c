// One request, opened: what is left of its KV cache, and its text for the owner of the key.

import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { call } from "../api";
import { count, percent, whole } from "../format";
import { Strip } from "../memory";
import type { Span } from "../model";
import { Dialog } from "../parts";

const PERIOD = 1000;

interface Sequence { index: number; prompt_tokens: number; output_tokens: number; spans: Span[]; prompt: string | null; output: string | null }

export const opened = signal<string | null>(null);

export function Detail({ id }: { id: string }) {
  const [sequences, setSequences] = useState<Sequence[]>([]), [isOwn, setOwn] = useState(false), [note, setNote] = useState("");
  useEffect(() => {
    let timer = 0, isOpen = true;
    const refresh = async () => {
      try {
        const detail = await (await call(`live/requests/${encodeURIComponent(id)}`)).json();
        if (!isOpen) return;
        if (!detail.sequences.length) { setOwn(false); setNote("The request has ended."); return; }
        setSequences(detail.sequences);
        setOwn(detail.is_own);
        if (!detail.is_own) setNote("The text is shown to the request's own key alone.");
      } catch (error) {
        setNote((error as Error).message);
      }
      if (isOpen) timer = setTimeout(refresh, PERIOD);
    };
    refresh();
    return () => { isOpen = false; clearTimeout(timer); };
  }, []);
  const cancel = async () => setNote(await cancelRequest(id) || "The request is cancelled.");
  return (
    <Dialog id="detail" title={id} onClose={() => { opened.value = null; }}>
      <p id="detail-note" role="status">{note}</p>
      {isOwn && <button type="button" id="detail-cancel" onClick={cancel}>Cancel the request</button>}
      {sequences.map(sequence => <SequenceView key={sequence.index} sequence={sequence} />)}
    </Dialog>
  );
}

function SequenceView({ sequence: { index, prompt_tokens, output_tokens, spans, prompt, output } }: { sequence: Sequence }) {
  const length = spans.at(-1)?.[1] ?? 0, kept = spans.reduce((sum, span) => sum + span[2], 0);
  const label = `${whole(kept)} of ${count(length, "KV pair")} kept (${length ? percent(kept / length) : "–"})`;
  return (
    <>
      <h3>Completion {index}: {whole(prompt_tokens)} prompt tokens, {whole(output_tokens)} output tokens</h3>
      <p>{label}</p>
      <Strip spans={spans} prompt={prompt_tokens} length={length} label={label} />
      <details>
        <summary>{count(spans.length, "span")} as text</summary>
        <ol class="spans">{spans.map(([start, end, left]) => <li>{whole(start)} to {whole(end - 1)}: {whole(left)} of {whole(end - start)} kept</li>)}</ol>
      </details>
      {prompt !== null && <details><summary>Prompt</summary><pre tabindex={0} dir="auto">{prompt}</pre></details>}
      {output !== null && <><p>Output so far</p><pre id="detail-output" tabindex={0} dir="auto">{output}</pre></>}
    </>
  );
}

// Returns what went wrong, "" if nothing did.
export async function cancelRequest(id: string): Promise<string> {
  try {
    await call(`live/requests/${encodeURIComponent(id)}`, { method: "DELETE" });
    return "";
  } catch (error) {
    return (error as Error).message;
  }
}
