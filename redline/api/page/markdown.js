// Markdown as nodes of the document. Nothing is ever parsed as HTML: text goes into text nodes, so it cannot act.

const LINK = /^https?:\/\//i;

/** The blocks of a text, each {kind, ...} with the text that it was made of; the last may still grow. */
export function blocks(text) {
  const found = [];
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const first = at;
    if (fence) {
      at += 1;
      const code = [];
      while (at < lines.length && !lines[at].trim().startsWith(fence[1])) code.push(lines[at++]);
      at += 1;
      found.push({ kind: "code", language: fence[2], text: code.join("\n") });
    } else if (heading) {
      at += 1;
      found.push({ kind: "heading", level: heading[1].length, text: heading[2] });
    } else if (/^\s*([-*+]|\d+[.)])\s+/.test(line)) {
      const items = [];
      const ordered = /^\s*\d/.test(line);
      while (at < lines.length && lines[at].trim()) {
        const item = /^\s*(?:[-*+]|\d+[.)])\s+(.*)$/.exec(lines[at]);
        if (item) items.push(item[1]);
        else items[items.length - 1] += "\n" + lines[at].trim();
        at += 1;
      }
      found.push({ kind: "list", ordered, items });
    } else if (!line.trim()) {
      at += 1;
      continue;
    } else {
      const words = [];
      while (at < lines.length && lines[at].trim() && !/^\s{0,3}(```|~~~)|^#{1,6}\s/.test(lines[at])) words.push(lines[at++]);
      found.push({ kind: "paragraph", text: words.join("\n") });
    }
    found[found.length - 1].source = lines.slice(first, at).join("\n");
  }
  return found;
}

/** The pieces of a line: [kind, text, target]. */
export function pieces(text) {
  const found = [];
  const pattern = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\(([^()\s]+)\)/g;
  let last = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > last) found.push(["text", text.slice(last, match.index)]);
    if (match[1] !== undefined) found.push(["code", match[1]]);
    else if (match[2] !== undefined) found.push(["strong", match[2]]);
    else if (match[3] !== undefined) found.push(["em", match[3]]);
    else if (LINK.test(match[5])) found.push(["a", match[4], match[5]]);
    else found.push(["text", match[0]]);
    last = match.index + match[0].length;
  }
  if (last < text.length) found.push(["text", text.slice(last)]);
  return found;
}

function inline(node, text) {
  for (const [kind, words, target] of pieces(text)) {
    if (kind === "text") {
      node.append(words);
      continue;
    }
    const piece = document.createElement(kind);
    piece.textContent = words;
    if (kind === "a") Object.assign(piece, { href: target, rel: "noopener noreferrer", target: "_blank" });
    node.append(piece);
  }
  return node;
}

function rendered(block) {
  switch (block.kind) {
    case "code": {
      const pre = document.createElement("pre");
      const code = document.createElement("code");
      pre.tabIndex = 0; // wide code is scrolled by keys
      code.textContent = block.text;
      pre.append(code);
      return pre;
    }
    case "heading":
      return inline(document.createElement(`h${Math.min(6, block.level + 2)}`), block.text);
    case "list": {
      const list = document.createElement(block.ordered ? "ol" : "ul");
      for (const item of block.items) list.append(inline(document.createElement("li"), item));
      return list;
    }
    default:
      return inline(document.createElement("p"), block.text);
  }
}

/** Brings a node to show a text that grows: blocks that have not changed stay as they are. */
export function show(node, text) {
  const now = blocks(text);
  now.forEach((block, at) => {
    const child = node.children[at];
    if (child && child.source === block.source && child.kind === block.kind) return;
    const made = rendered(block);
    made.source = block.source;
    made.kind = block.kind;
    if (child) child.replaceWith(made);
    else node.append(made);
  });
  while (node.children.length > now.length) node.lastElementChild.remove();
}
