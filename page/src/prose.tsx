// The text of an answer, block by block: a block that has not changed is left alone, and one that is far from the view
// is plain text, which costs little and is found by the browser's search.

import { Component, createRef } from "preact";
import { useRef } from "preact/hooks";
import { Blocks, render } from "./markdown";
import { copyText } from "./parts";

const NEAR = "1500px";
const blocks = new WeakMap<Element, Block>();
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) blocks.get(entry.target)?.move(entry.isIntersecting);
}, { rootMargin: `${NEAR} 0px`, scrollMargin: `${NEAR} 0px` } as IntersectionObserverInit);

// grows: whether more is to come; what does is made into elements at once.
export function Prose({ text, grows }: { text: string; grows: boolean }) {
  const parts = useRef<Blocks | null>(null);
  parts.current ??= new Blocks();
  return <div class="prose">{parts.current.update(text).map((source, i) => <Block key={i} source={source} isNear={grows} />)}</div>;
}

class Block extends Component<{ source: string; isNear: boolean }> {
  box = createRef<HTMLDivElement>();
  isNear = this.props.isNear;
  shouldComponentUpdate(next: { source: string }) { return next.source !== this.props.source; }
  componentDidUpdate() { this.fill(); }
  componentWillUnmount() { observer.unobserve(this.box.current!); }

  componentDidMount() {
    this.fill();
    blocks.set(this.box.current!, this);
    observer.observe(this.box.current!);
  }

  // What is selected or has the focus stays as it is.
  move(isNear: boolean) {
    const box = this.box.current!;
    if (isNear === this.isNear || !isNear && (box.contains(document.activeElement) || getSelection()?.containsNode(box, true))) return;
    this.isNear = isNear;
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
