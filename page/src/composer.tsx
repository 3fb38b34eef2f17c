// The field for the next message, with what is attached and how much the next answer keeps.

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { hasRunning, runningCount } from "./answers";
import { percent } from "./format";
import { type Attachment, path } from "./model";
import { info, status } from "./server";
import { compares, current, send, share, stopAll, version } from "./store";

const LONG_PASTE = 2000;  // characters from which on a paste becomes an attachment
const LARGEST_FILE = 2 << 20;

const files = signal<Attachment[]>([]);
const problem = signal("");

export const draft = signal("");

export function Composer() {
  const field = useRef<HTMLTextAreaElement>(null), picker = useRef<HTMLInputElement>(null), back = useRef(0);
  useEffect(() => {
    const box = field.current!;
    const stop = draft.subscribe(text => {
      if (!text) return;
      box.value = text;
      draft.value = "";
      grow();
      box.focus();
    });
    return () => { stop(); draft.value = box.value; };  // while the monitor is shown
  }, []);
  const grow = () => {
    const box = field.current!;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
  };
  const runs = runningCount.value > 0 && hasRunning(current.value);
  const submit = () => {
    const text = field.current!.value.trim();
    if (!text && !files.value.length || runs || !info.value) return;
    send(text, files.value);
    files.value = [];
    problem.value = "";
    field.current!.value = "";
    back.current = 0;
    grow();
    field.current!.focus();
  };
  // Through what was asked before, as a shell does.
  const recall = (step: number) => {
    const asked = path(current.value).filter(message => message.role === "user");
    back.current = Math.min(asked.length, Math.max(0, back.current + step));
    field.current!.value = back.current ? asked.at(-back.current)!.content : "";
    grow();
  };
  const key = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && (!event.shiftKey || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape") {
      stopAll();
    } else if ((event.key === "ArrowUp" || event.key === "ArrowDown") && (!field.current!.value || back.current)) {
      event.preventDefault();
      recall(event.key === "ArrowUp" ? 1 : -1);
    } else {
      back.current = 0;
    }
  };
  const paste = (event: ClipboardEvent) => {
    const data = event.clipboardData;
    if (!data) return;
    const text = data.getData("text/plain");
    if (data.files.length) { event.preventDefault(); attach([...data.files]); }
    else if (text.length > LONG_PASTE) { event.preventDefault(); files.value = [...files.value, { name: `pasted text ${files.value.length + 1}`, text }]; }
  };
  const drop = (event: DragEvent) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  };
  return (
    <form class="composer" onSubmit={event => { event.preventDefault(); submit(); }} onDragOver={event => event.preventDefault()} onDrop={drop}>
      {!info.value && current.value.leaf && <p class="problem" role="status">{status.value === "connecting" ? "Connecting to the server…" : status.value}</p>}
      {problem.value && <p class="problem" role="alert">{problem.value}</p>}
      {files.value.length > 0 && (
        <ul class="files" aria-label="Attached">{files.value.map(file => (
          <li>{file.name} <button type="button" class="quiet" aria-label={`Remove ${file.name}`}
            onClick={() => { files.value = files.value.filter(each => each !== file); }}>×</button></li>
        ))}</ul>
      )}
      <textarea id="composer" ref={field} rows={1} dir="auto" aria-label="Your message" placeholder="Write a message"
        onKeyDown={key} onInput={grow} onPaste={paste} />
      <div class="row">
        <button type="button" onClick={() => picker.current!.click()}>Attach</button>
        <input ref={picker} type="file" multiple hidden aria-label="Text files" onChange={() => { attach([...picker.current!.files!]); picker.current!.value = ""; }} />
        <MemorySlider />
        <span class="space" />
        {runs ? <button type="button" class="primary" onClick={stopAll}>Stop</button>
          : <button type="submit" class="primary" disabled={!info.value}>Send</button>}
      </div>
    </form>
  );
}

async function attach(chosen: File[]) {
  problem.value = "";
  for (const file of chosen) {
    if (file.size > LARGEST_FILE) { problem.value = `${file.name} is larger than 2 MiB: attach the part that matters.`; continue; }
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new Error();
      files.value = [...files.value, { name: file.name, text }];
    } catch {
      problem.value = `${file.name} is no text file: only text can be attached.`;
    }
  }
}

// How much of what it reads and writes the model keeps for the next answer.
function MemorySlider() {
  version.value;
  const server = info.value;
  if (!server?.kept_option) return null;
  const steps = Math.min(server.kept_of, 100), own = server.kept_default / server.kept_of;
  const value = share.value ?? own;
  const set = (chosen: number) => { share.value = chosen >= steps ? 1 : Math.abs(chosen / steps - own) < 0.5 / steps ? null : chosen / steps; };
  return (
    <>
      <label class="slider" title="Less memory makes room for more conversations at once; the answer may differ.">
        <span>Memory: keep <output>{percent(value)}</output></span>
        <input type="range" min={1} max={steps} step={1} value={Math.max(1, Math.round(value * steps))} aria-valuetext={percent(value)}
          onInput={event => set(Number(event.currentTarget.value))} />
      </label>
      <label class="check"><input type="checkbox" checked={compares.value} onChange={event => { compares.value = event.currentTarget.checked; }} /> Compare with all kept</label>
    </>
  );
}
