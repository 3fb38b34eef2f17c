// Small parts that several views use.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export function Dialog({ title, onClose, children, id }: { title: string; onClose: () => void; children: ComponentChildren; id?: string }) {
  const box = useRef<HTMLDialogElement>(null), isShown = useRef(true);
  useEffect(() => {
    const dialog = box.current!;
    dialog.showModal();
    return () => {
      isShown.current = false;
      dialog.close();  // which gives the focus back
    };
  }, []);
  return (
    <dialog ref={box} id={id} aria-label={title} onClose={() => { if (isShown.current) onClose(); }}>
      <div class="bar"><h2>{title}</h2><button type="button" onClick={() => box.current!.close()}>Close</button></div>
      {children}
    </dialog>
  );
}

// A button that copies a text, and says so.
export function Copy({ text, label = "Copy" }: { text: () => string; label?: string }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await copyText(text());
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return <button type="button" class="quiet" onClick={copy}>{isDone ? "Copied" : label}</button>;
}

export async function copyText(text: string) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // pages without TLS have no clipboard
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}
