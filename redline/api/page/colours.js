// Text coloured by who proposed its tokens, as highlights: they lie over the text, and move nothing.

/** Who proposes: the model itself, its drafter, a match of the text's own past, or a grammar. */
export const PROPOSERS = { target: "model", learned: "drafter", suffix: "earlier text", grammar: "grammar" };

const able = typeof Highlight === "function" && CSS.highlights;
const marks = new Map();
if (able) {
  for (const by of Object.keys(PROPOSERS)) {
    marks.set(by, new Highlight());
    CSS.highlights.set(`by-${by}`, marks.get(by));
  }
}

/** Where the tokens of each proposer stand in a text that is made of these pieces: [start, end, by]. */
export function spans(pieces) {
  let at = 0;
  return pieces.map(({ by, text }) => [at, (at += text.length), by]);
}

/** Colours what the blocks within a node show of a text. spans: of that text. */
export function colour(node, text, where) {
  if (!able) return;
  const children = node.children.length ? [...node.children] : [node];
  children.forEach((child, place) => {
    const start = child.start ?? 0;
    const end = children[place + 1]?.start ?? text.length;
    const shape = child.shape ?? text.length;
    if (child.coloured === shape && child.colouredTo === end) return;
    bare(child);
    [child.coloured, child.colouredTo, child.marks] = [shape, end, found(child, text, start, end, where)];
    for (const [by, range] of child.marks) marks.get(by)?.add(range);
  });
}

/** Takes all colours away. */
export function clear(node) {
  for (const one of [node, ...node.querySelectorAll("*")]) if (one.marks) bare(one);
}

function bare(child) {
  for (const [by, range] of child.marks ?? []) marks.get(by)?.delete(range);
  child.marks = child.coloured = undefined;
}

// Words are found in the source one behind another: what Markdown's marks and links' addresses add is stepped over.
function found(child, text, start, end, where) {
  const made = [];
  const walker = document.createTreeWalker(child, NodeFilter.SHOW_TEXT);
  let at = start;
  let span = where.findIndex(([, to]) => to > start);
  if (span < 0) return made;
  while (walker.nextNode()) {
    const { currentNode: node } = walker;
    if (node.parentElement.closest(".bar")) continue;
    for (const { 0: word, index } of node.data.matchAll(/\S+/g)) {
      const next = text.indexOf(word, at);
      const near = next >= 0 && next < Math.min(end, at + (word.length > 2 ? 400 : 24));
      if (near) at = next;
      while (span < where.length - 1 && where[span][1] <= at) span += 1;
      let done = 0;
      while (done < word.length) {
        const rest = near ? Math.min(word.length, Math.max(done + 1, where[span][1] - at)) : word.length;
        made.push([where[span][2], new StaticRange(range(node, index + done, index + rest))]);
        done = rest;
        if (done < word.length && span < where.length - 1) span += 1;
        else break;
      }
      if (near) at += word.length;
    }
  }
  return made;
}

const range = (node, from, to) => ({ startContainer: node, startOffset: from, endContainer: node, endOffset: to });
