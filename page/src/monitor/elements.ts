// Elements of charts. Text is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
type Attributes = Record<string, string | number>;

export function element(name: string, attributes: Attributes = {}, ...children: (Node | string)[]): HTMLElement {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name: string, attributes: Attributes = {}, ...children: (Node | string)[]): SVGElement {
  return fill(document.createElementNS(SVG, name) as SVGElement, attributes, children);
}

function fill<T extends Element>(node: T, attributes: Attributes, children: (Node | string)[]): T {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

// Sets an element's text only if it differs: an equal one would still be read out again.
export function setText(node: Node, text: string) {
  if (node.textContent !== text) node.textContent = text;
}
