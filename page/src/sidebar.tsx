// All chats: search, choose, import and export.

import { signal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { type Conversation, titleOf } from "./model";
import { changed, conversations, current, removeConversation, show, startNew, storageProblem, toast, version } from "./store";
import * as transfer from "./transfer";

export const isOpen = signal(false);  // on a phone, where the list lies over the chat
const sought = signal("");

function matches(conversation: Conversation): boolean {
  const words = sought.value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const text = [titleOf(conversation), ...Object.values(conversation.messages).map(each => each.content)].join("\n").toLowerCase();
  return words.every(word => text.includes(word));
}

export function Sidebar() {
  version.value;
  const picker = useRef<HTMLInputElement>(null);
  const found = conversations.value.filter(matches);
  const open = (conversation: Conversation) => { show(conversation); isOpen.value = false; };
  const key = (event: KeyboardEvent) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const items = [...document.querySelectorAll<HTMLElement>(".chats .open")];
    const at = items.indexOf(document.activeElement as HTMLElement) + (event.key === "ArrowDown" ? 1 : -1);
    event.preventDefault();
    items[Math.max(0, Math.min(items.length - 1, at))]?.focus();
  };
  return (
    <nav class={`sidebar ${isOpen.value ? "is-open" : ""}`} aria-label="Chats">
      <button type="button" class="primary" onClick={() => { startNew(); isOpen.value = false; document.getElementById("composer")?.focus(); }}>New chat</button>
      <input type="search" aria-label="Search in all chats" placeholder="Search" value={sought.value} onInput={event => { sought.value = event.currentTarget.value; }} />
      <ul class="chats" onKeyDown={key}>
        {found.map(conversation => (
          <li key={conversation.id} class={conversation.id === current.value.id ? "is-current" : ""}>
            <button type="button" class="open" dir="auto" aria-current={conversation.id === current.value.id ? "true" : undefined} onClick={() => open(conversation)}>{titleOf(conversation)}</button>
            <button type="button" class="quiet" aria-label={`Delete ${titleOf(conversation)}`} onClick={() => removeConversation(conversation)}>×</button>
          </li>
        ))}
      </ul>
      {!found.length && <p class="note">{sought.value ? "Nothing was found." : "Your chats are kept in this browser alone."}</p>}
      {storageProblem.value && <p class="problem" role="alert">{storageProblem.value}</p>}
      <div class="row">
        <button type="button" class="quiet" onClick={() => picker.current!.click()}>Import</button>
        <button type="button" class="quiet" disabled={!conversations.value.length} onClick={() => transfer.save("chats.json", "application/json", transfer.asJson(conversations.value))}>Export all</button>
        <input ref={picker} id="import" type="file" hidden multiple accept=".json,.md" aria-label="Chats to import" onChange={() => { read([...picker.current!.files!]); picker.current!.value = ""; }} />
      </div>
    </nav>
  );
}

async function read(files: File[]) {
  for (const file of files) {
    try {
      const list = transfer.read(file.name, await file.text());
      for (const conversation of list) changed(conversation);
      if (list.length) show(list[0]);
      toast.value = { text: `${list.length} imported.` };
    } catch (error) {
      toast.value = { text: `${file.name}: ${(error as Error).message}` };
    }
  }
}
