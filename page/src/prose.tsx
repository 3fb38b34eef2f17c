// The text of an answer, block by block: a block that has not changed is left alone.

import { Component, createRef } from "preact";
import { useRef } from "preact/hooks";
import { Blocks, render } from "./markdown";
import { copyText } from "./parts";

export function Prose({ text }: { text: string }) {
  const blocks = useRef<Blocks | null>(null);
  blocks.current ??= new Blocks();
  return <div class="prose">{blocks.current.update(text).map((source, i) => <Block key={i} source={source} />)}</div>;
}

class Block extends Component<{ source: string }> {
  box = createRef<HTMLDivElement>();
  shouldComponentUpdate(next: { source: string }) { return next.source !== this.props.source; }
  componentDidMount() { this.fill(); }
  componentDidUpdate() { this.fill(); }
  render() { return <div class="block" dir="auto" ref={this.box} />; }

  fill() {
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
