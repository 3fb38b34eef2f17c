// The text of an answer, block by block: a block that has not changed is left alone, and one that was never near the
// view is plain text, which costs nothing and is found by the browser's search.

import { Component, createRef } from "preact";
import { useRef } from "preact/hooks";
import { Blocks, render } from "./markdown";
import { copyText } from "./parts";

const NEAR = "1500px";
const waiting = new WeakMap<Element, Block>();
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) waiting.get(entry.target)?.come();
}, { rootMargin: `${NEAR} 0px`, scrollMargin: `${NEAR} 0px` } as IntersectionObserverInit);

// grows: whether more is to come; what does is in view.
export function Prose({ text, grows }: { text: string; grows: boolean }) {
  const blocks = useRef<Blocks | null>(null);
  blocks.current ??= new Blocks();
  return <div class="prose">{blocks.current.update(text).map((source, i) => <Block key={i} source={source} isNear={grows} />)}</div>;
}

class Block extends Component<{ source: string; isNear: boolean }> {
  box = createRef<HTMLDivElement>();
  isNear = this.props.isNear;
  shouldComponentUpdate(next: { source: string }) { return next.source !== this.props.source; }
  componentDidUpdate() { this.fill(); }
  componentWillUnmount() { observer.unobserve(this.box.current!); }

  componentDidMount() {
    this.fill();
    if (this.isNear) return;
    waiting.set(this.box.current!, this);
    observer.observe(this.box.current!);
  }

  come() {
    observer.unobserve(this.box.current!);
    this.isNear = true;
    this.fill();
  }

  render() { return <div class="block" dir="auto" ref={this.box} />; }

  fill() {
    if (!this.isNear) { this.box.current!.textContent = this.props.source; return; }
    const made = render(this.props.source);
    for (const code of made.querySelectorAll("pre.code")) code.before(codeBar(code));
    this.box.current!.replaceChildren(made);
  }
}

function codeBar(code: Element): HTMLElement {
  const bar = document.createElement("div"), name = document.createElement("span"), button = document.createElement("button");
  bar.className = "code-bar";
  name.textContent = code.getAttribute("data-language") || "text";
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Copy code";
  button.addEventListener("click", async () => {
    await copyText(code.textContent ?? "");
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy code"; }, 1500);
  });
  bar.append(name, button);
  return bar;
}
