// Elements. Text is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = id => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Sets an element's text only if it differs: an equal one would still be read out again.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
