// Colours text by the proposer of its tokens, with CSS highlights, which lie over the text and do not change its layout.

/** Proposers: the model itself, its drafter, a match in earlier text, or a grammar. */
export const PROPOSERS = { target: "model", learned: "drafter", suffix: "earlier text", grammar: "grammar" };

const able = typeof Highlight === "function" && CSS.highlights;
const marks = new Map(); // the model's own tokens are not coloured
if (able) {
  for (const by of Object.keys(PROPOSERS).filter((one) => one !== "target")) {
    marks.set(by, new Highlight());
    CSS.highlights.set(`by-${by}`, marks.get(by));
  }
}

/** Ranges of each proposer's tokens in the text of these pieces: [start, end, by]. */
export function spans(pieces) {
  let at = 0;
  return pieces.map(({ by, text }) => [at, (at += text.length), by]);
}

/** Colours the displayed blocks of a text in a node. where: spans of that text. */
export function colour(node, text, where) {
  if (!able) return;
  const children = node.children.length ? [...node.children] : [node];
  children.forEach((child, place) => {
    if (child.marked !== child.firstChild) bare(child);
    child.marked = child.firstChild;
    if (child.from !== undefined) grown(child, where);
    else child.marks ??= add(found(child, text, child.start, children[place + 1]?.start ?? text.length, where));
  });
}

function add(made) {
  for (const [by, range] of made) marks.get(by).add(range);
  return made;
}

// For a growing plain text only the new part is coloured; the last highlight may grow with it.
function grown(child, where) {
  const [node, made] = [child.firstChild, (child.marks ??= [])];
  if (!node) return;
  const end = child.from + node.length;
  if (child.open) remove([made.pop()]);
  child.open = false;
  for (let at = (child.next ??= 0); at < where.length && where[at][0] < end; at += 1) {
    const [from, to, by] = where[at];
    const seen = to > child.from && marks.has(by);
    if (seen) made.push(...add([[by, range(node, Math.max(0, from - child.from), Math.min(to, end) - child.from)]]));
    child.open = seen && to >= end;
    if (!child.open) child.next = at + 1;
  }
}

/** Removes all colours. */
export function clear(node) {
  for (const one of [node, ...node.querySelectorAll("*")]) if (one.marks) bare(one);
}

function bare(child) {
  remove(child.marks ?? []);
  child.marks = child.marked = child.open = child.next = undefined;
}

function remove(made) {
  for (const [by, range] of made) marks.get(by).delete(range);
}

// Displayed words are searched in the source in order; Markdown marks and link targets in between are skipped.
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
        if (marks.has(where[span][2])) made.push([where[span][2], range(node, index + done, index + rest)]);
        done = rest;
        if (done < word.length && span < where.length - 1) span += 1;
        else break;
      }
      if (near) at += word.length;
    }
  }
  return made;
}

const range = (node, from, to) =>
  new StaticRange({ startContainer: node, startOffset: from, endContainer: node, endOffset: to });
