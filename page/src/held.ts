// Which layers and heads still hold a token, from what the server tells of each compression.

import type { Memory, PairsLeft, Span } from "./model";

const unpacked = new WeakMap<PairsLeft, Promise<Uint8Array>>();

function unpack(pairs: PairsLeft): Promise<Uint8Array> {
  if (!unpacked.has(pairs)) unpacked.set(pairs, inflate(pairs.bits));
  return unpacked.get(pairs)!;
}

async function inflate(text: string): Promise<Uint8Array> {
  const packed = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  return new Uint8Array(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}

// share: of the layers and heads. layers: which heads of each; none where only the share is known. event: the tokens
// there were when it was compressed last.
export interface Held { share: number; layers: { layer: number; heads: boolean[] }[]; event?: number }

// What holds the token at a position, of which a span tells how much is left.
export async function held(memory: Memory, [start, end, left]: Span, at: number): Promise<Held> {
  const told = memory.pairs?.findLast(each => each.first <= at && at < each.end), shape = told ?? memory.pairs?.[0];
  const share = left / (end - start);
  if (!shape || !told && share < 1) return { share, layers: [] };
  const bits = told && await unpack(told), width = told ? Math.ceil((told.end - told.first) / 8) : 0, offset = told ? at - told.first : 0;
  const holds = (row: number) => !bits || (bits[row * width + (offset >> 3)] >> (offset & 7) & 1) === 1;
  const layers = shape.layers.map((layer, i) => ({ layer, heads: Array.from({ length: shape.heads }, (_, head) => holds(i * shape.heads + head)) }));
  const all = layers.flatMap(each => each.heads);
  return { share: all.filter(Boolean).length / all.length, layers, event: told?.at };
}
