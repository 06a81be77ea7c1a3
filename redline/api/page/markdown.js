// Markdown in blocks. Finished blocks come from the server as sanitised HTML; the last one is plain text while it grows.

const BATCH = { blocks: 64, chars: 60_000 };
const KEPT = 4_000; // rendered blocks
const AGAIN_MS = 4_000;
const FENCE = /^\s*(`{3,}|~{3,})(.*)$/;
const ITEM = /^\s*([-*+]|\d{1,9}[.)])(\s|$)/;
const BEGUN = /^\s*([-*+]|\d{1,9}[.)]?|#{1,6}|[`~]+|\$|\\)?$/; // a line whose kind is not clear yet
const CLOSES = { $$: "$$", "\\[": "\\]" };

/** The blocks of a text, each {source, start, finished}, split where later text cannot change earlier blocks. */
export function blocks(text, done) {
  const found = [];
  const lines = text.split("\n");
  let from = 0; // start of the block
  let at = 0; // start of the line
  let blank = false;
  let list = false;
  let until = null; // tests for the end of a fence or a formula
  const cut = () => {
    if (text.slice(from, at).trim()) found.push({ source: text.slice(from, at).trimEnd(), start: from, finished: true });
    [from, blank, list] = [at, false, false];
  };
  for (const [number, line] of lines.entries()) {
    if (!done && !until && number === lines.length - 1 && BEGUN.test(line)) break;
    const alone = !/^\s/.test(line); // not part of a list item
    if (until) {
      const ends = until(line);
      at += line.length + 1;
      if (!ends) continue;
      until = null;
      if (!list) cut();
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence?.[1][0] === "`" && fence[2].includes("`")) fence.length = 0;
    const heading = /^#{1,6}(\s|$)/.test(line);
    if (!line.trim()) blank = true;
    else if (heading || (blank && alone && !(list && ITEM.test(line))) || (fence?.length && !(list && !alone))) cut();
    if (line.trim()) {
      list ||= at === from && ITEM.test(line);
      blank = false;
    }
    const formula = CLOSES[line.trimStart().slice(0, 2)];
    if (fence?.length) {
      const [mark, least] = [fence[1][0], fence[1].length];
      until = (next) => new RegExp(`^\\s*\\${mark}{${least},}\\s*$`).test(next);
    } else if (formula && !line.trimStart().slice(2).includes(formula)) until = (next) => next.includes(formula);
    at += line.length + 1;
    if (heading) cut();
  }
  if (text.slice(from).trim()) found.push({ source: text.slice(from), start: from, finished: done });
  else if (from > text.length) found.at(-1).finished = done; // its last line may continue
  return found;
}

/** Makes a node show a growing text; blocks that have not changed are left as they are. */
export function show(node, text, done) {
  const now = blocks(text, done);
  const named = done ? (text.match(/^ {0,3}\[[^\]\n]+\]:\s*\S.*$/gm) ?? []).join("\n") : ""; // link reference definitions
  now.forEach((block, place) => {
    const child = node.children[place] ?? node.appendChild(document.createElement("div"));
    child.start = block.start;
    if (child.source === block.source && child.finished === block.finished) return;
    [child.source, child.finished] = [block.source, block.finished];
    child.wants = named && block.source.includes("[") ? `${block.source}\n\n${named}` : block.source;
    const html = block.finished ? rendered.get(child.wants) : undefined;
    if (html) fill(child, html);
    else plain(child);
    if (block.finished && html === undefined) want(child);
  });
  while (node.children.length > now.length) node.lastElementChild.remove();
}

/** Shows the block's source as plain text, without fence marks. */
function plain(child) {
  const fence = FENCE.exec(child.source.split("\n", 1)[0]);
  const first = fence ? child.source.indexOf("\n") + 1 || child.source.length : 0;
  const text = child.source.slice(first).replace(fence ? /\n\s*(`{3,}|~{3,})\s*$/ : /\s+$/, "");
  child.className = fence ? "plain code" : "plain";
  grow(child, text, child.start + first);
}

/** Makes a node show a plain text that mostly grows. from: its offset in the whole text. */
export function grow(node, text, from = 0) {
  const known = node.firstChild;
  if (node.childNodes.length === 1 && known.nodeType === Node.TEXT_NODE && text.startsWith(known.data)) {
    if (known.length < text.length) known.appendData(text.slice(known.length));
  } else node.replaceChildren(text);
  node.from = from;
}

function fill(child, html) {
  // The sanitised HTML is parsed in a separate document, which loads no resources and runs no scripts.
  const made = new DOMParser().parseFromString(html, "text/html").body;
  for (const pre of made.querySelectorAll("pre")) {
    pre.tabIndex = 0; // wide code can be scrolled by keys
    const box = around(pre, "code");
    const bar = document.createElement("div");
    const copy = document.createElement("button");
    bar.className = "bar";
    [copy.type, copy.textContent] = ["button", "Copy"];
    copy.setAttribute("aria-label", "Copy this code");
    bar.append(pre.dataset.language ?? "", copy);
    box.prepend(bar);
  }
  for (const one of made.querySelectorAll("table, math[display=block]")) {
    const box = around(one, one.localName === "table" ? "wide table" : "wide formula");
    if (one.localName === "table") box.tabIndex = 0;
  }
  child.className = "rendered";
  child.from = undefined;
  child.replaceChildren(...made.childNodes);
  child.dispatchEvent(new CustomEvent("rendered", { bubbles: true }));
}

function around(node, name) {
  const box = document.createElement("div");
  box.className = name;
  node.replaceWith(box);
  box.append(node);
  return box;
}

/** Copies the code of a block whose button was clicked. */
export async function copied(button) {
  await navigator.clipboard.writeText(button.closest(".code").querySelector("pre").textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// ------------------------------------------------------------------------------------------ rendered by the server

const rendered = new Map(); // text -> its HTML; null: the server rejected it
const waiting = new Map(); // text -> the blocks that wait for it
let headers = () => ({});
let asking = false;

/** how: returns the headers of a request. */
export function renderWith(how) {
  headers = how;
}

function want(child) {
  waiting.set(child.wants, [...(waiting.get(child.wants) ?? []), child]);
  if (!asking) {
    asking = true;
    setTimeout(work, 50);
  }
}

async function work() {
  let pause = 0;
  while (waiting.size && !pause) {
    const batch = [];
    let chars = 0;
    for (const [text, nodes] of waiting) {
      if (!nodes.some((one) => one.isConnected && one.wants === text)) {
        waiting.delete(text);
        continue;
      }
      chars += text.length;
      if (batch.length && (batch.length === BATCH.blocks || chars > BATCH.chars)) break;
      batch.push(text);
    }
    pause = (await render(batch)) ? 0 : AGAIN_MS;
  }
  asking = waiting.size > 0;
  if (asking) setTimeout(work, pause);
}

/** Renders texts and shows them. Returns false if the server cannot render now; a retry may succeed. */
async function render(texts) {
  if (!texts.length) return true;
  let answer;
  try {
    answer = await fetch("page/render", {
      method: "POST",
      body: JSON.stringify({ blocks: texts }),
      headers: { ...headers(), "Content-Type": "application/json" },
    });
    if (answer.status === 400 || answer.status === 413) {
      if (texts.length === 1) settle(texts[0], null);
      else for (const text of texts) if (!(await render([text]))) return false;
      return true;
    }
    if (!answer.ok) return false;
    const { blocks: made } = await answer.json();
    texts.forEach((text, place) => settle(text, made[place]));
    return true;
  } catch {
    return false;
  }
}

function settle(text, html) {
  if (rendered.size >= KEPT) rendered.delete(rendered.keys().next().value);
  rendered.set(text, html);
  const nodes = waiting.get(text) ?? [];
  waiting.delete(text);
  if (html !== null) for (const one of nodes) if (one.wants === text && one.finished) fill(one, html);
}
