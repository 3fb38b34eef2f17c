// The page: a chat, and a monitor of the server behind it.

import { signal } from "@preact/signals";
import { options, render } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { type Key, closeKey, forgetKey, keyWanted, keys, useKey } from "./api";
import { Chat } from "./chat";
import { shortName } from "./format";
import { TokenTip } from "./memory";
import { receive, Monitor } from "./monitor/monitor";
import { Dialog } from "./parts";
import { connect, info, models, offered, reconnect } from "./server";
import * as sidebar from "./sidebar";
import { changed, current, start, toast, version } from "./store";

const TOAST_SECONDS = 8;

// One rendering for each frame; hidden pages have no frames.
options.debounceRendering = work => { if (document.hidden) setTimeout(work, 50); else requestAnimationFrame(work as FrameRequestCallback); };

const view = signal(location.hash === "#monitor" ? "monitor" : "chat");
addEventListener("hashchange", () => { if (!location.hash || ["#chat", "#monitor"].includes(location.hash)) view.value = location.hash.slice(1) || "chat"; });

function App() {
  useEffect(() => { document.title = info.value ? `${shortName(info.value.model)} · KvLLM` : "KvLLM"; }, [info.value]);
  const isChat = view.value === "chat";
  const skip = (event: Event) => { event.preventDefault(); document.getElementById(isChat ? "composer" : "range")?.focus(); };
  return (
    <>
      <a class="skip" href={isChat ? "#composer" : "#range"} onClick={skip}>{isChat ? "Skip to your message" : "Skip to the figures"}</a>
      <header>
        {isChat && <button type="button" class="menu quiet" aria-expanded={sidebar.isOpen.value} onClick={() => { sidebar.isOpen.value = !sidebar.isOpen.value; }}>Chats</button>}
        <h1>KvLLM</h1>
        <ModelChoice />
        <span class="space" />
        {info.value?.needs_key !== false && <button type="button" id="change-key" class="quiet" onClick={() => { keyWanted.value = ""; }}>Key{info.value?.key && <span>: {info.value.key}</span>}</button>}
        <nav class="views" aria-label="Views">
          <a href="#chat" aria-current={isChat ? "page" : undefined}>Chat</a>
          <a href="#monitor" aria-current={isChat ? undefined : "page"}>Monitor</a>
        </nav>
      </header>
      {isChat ? <Chat /> : <Monitor />}
      <TokenTip />
      {keyWanted.value !== null && <KeyDialog note={keyWanted.value} />}
      <Toast />
    </>
  );
}

function ModelChoice() {
  version.value;
  const names = models.value, chosen = offered(current.value.model) ?? info.value?.model;
  if (names.length < 2) return <span id="model" title={info.value?.model}>{info.value ? shortName(info.value.model) : ""}</span>;
  const choose = (name: string) => { current.value.model = name; if (current.value.leaf) changed(); else version.value++; };
  return <select id="model" aria-label="Model" value={chosen} onChange={event => choose(event.currentTarget.value)}>{names.map(name => <option value={name}>{shortName(name)}</option>)}</select>;
}

function KeyDialog({ note }: { note: string }) {
  const field = useRef<HTMLInputElement>(null), remembers = useRef<HTMLInputElement>(null);
  const use = (key: Key) => { useKey(key); reconnect(); };
  const submit = (event: Event) => {
    event.preventDefault();
    const value = field.current!.value.trim();
    if (value) use({ name: "", value, remembers: remembers.current!.checked });
  };
  return (
    <Dialog id="key-dialog" title="API keys" onClose={closeKey}>
      {note && <p>{note}</p>}
      {keys.value.length > 0 && <ul class="keys" aria-label="Keys of this tab">{keys.value.map((key, i) => {
        const name = key.name || "a key that was not used yet";
        return (
          <li key={key.value}>
            <button type="button" class="link" aria-current={i === 0 ? "true" : undefined} onClick={() => use(key)}>{name}</button>
            {i === 0 && <span class="note">in use</span>}<span class="space" />
            <button type="button" class="quiet" aria-label={`Forget ${name}`} onClick={() => { forgetKey(key); if (i === 0) reconnect(); }}>×</button>
          </li>
        );
      })}</ul>}
      <form onSubmit={submit}>
        <label class="block">{keys.value.length ? "Another key" : "Key"}<input id="key" ref={field} type="password" autocomplete="off" /></label>
        <label class="check"><input ref={remembers} type="checkbox" checked /> Keep it until this tab is closed</label>
        <div class="row"><button type="submit" class="primary">Use this key</button></div>
      </form>
    </Dialog>
  );
}

function Toast() {
  const shown = toast.value;
  useEffect(() => {
    if (!shown) return;
    const timer = setTimeout(() => { toast.value = null; }, TOAST_SECONDS * 1000);
    return () => clearTimeout(timer);
  }, [shown]);
  return (
    <div class="toast" role="status">
      {shown && <p>{shown.text}{shown.undo && <button type="button" onClick={() => { shown.undo!(); toast.value = null; }}>Undo</button>}</p>}
    </div>
  );
}

start().then(() => {
  render(<App />, document.getElementById("app")!);
  connect(receive);
});
