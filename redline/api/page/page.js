// The page that the server gives at /: chats, the engine, settings. Everything that it keeps stays in this browser.

import { show } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const KEPT_CHATS = 50;
const SHOWN_EVERY_MS = 50; // an answer is drawn at most so often, whatever comes

const settings = { model: "", system: "", temperature: 0.6, tokens: "", thinking: true, colours: false, ...stored("redline.settings", {}) };
let chats = stored("redline.chats", []);
let chat = chats[0] ?? fresh();
let answering = null; // an AbortController while an answer comes
let key = sessionStorage.getItem("redline.key") ?? "";

// ------------------------------------------------------------------------------------------------ what is kept

function stored(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keep() {
  chats = [chat, ...chats.filter((one) => one.id !== chat.id)].filter((one) => one.messages.length).slice(0, KEPT_CHATS);
  try {
    localStorage.setItem("redline.chats", JSON.stringify(chats, (name, value) => (name === "pieces" ? undefined : value)));
    localStorage.setItem("redline.settings", JSON.stringify(settings));
  } catch {
    tell("This browser has no room for more chats: delete some, or this one is lost with the tab.", true);
  }
}

function fresh() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, messages: [] };
}

const titleOf = (one) => one.messages[0]?.content.slice(0, 80) || "New chat";

// ------------------------------------------------------------------------------------------------- the server

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

async function refusal(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `${answer.status}`;
  }
}

async function* events(path, how) {
  const answer = await fetch(path, { ...how, headers: { ...headers(), ...how.headers } });
  if (!answer.ok) {
    const hint = answer.status === 401 ? " Enter a key under Settings." : "";
    throw new Error((await refusal(answer)) + hint);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function learnModels() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    if (!answer.ok) throw new Error(await refusal(answer));
    const names = (await answer.json()).data.map((one) => one.id);
    const choice = $("settings-form").elements.model;
    choice.replaceChildren(...names.map((name) => new Option(name, name)));
    if (!names.includes(settings.model)) settings.model = names[0] ?? "";
    choice.value = settings.model;
    $("model").textContent = settings.model;
    tell("");
  } catch (error) {
    tell(`${error.message} ${key ? "" : "Where this server wants a key, enter it under Settings."}`, true);
  }
}

// --------------------------------------------------------------------------------------------------- a chat

function tell(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

function element(name, text = "", how = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, how);
}

function drawn(message, index) {
  const one = element("article", "", { className: message.role });
  one.append(element("h2", message.role === "user" ? "You" : "Answer"));
  if (message.role === "user") {
    one.append(element("div", message.content, { className: "text" }));
  } else {
    const thinking = element("details");
    thinking.append(element("summary", "Thinking"), element("div"));
    one.append(thinking, element("div", "", { className: "text" }), element("div"), element("p", "", { className: "rate" }));
    update(one, message);
  }
  const tools = element("div", "", { className: "tools" });
  if (message.role === "user") tools.append(button("Edit", () => edit(index)));
  else tools.append(button("Copy", () => navigator.clipboard?.writeText(message.content)), button("Again", () => again(index)));
  one.append(tools);
  return one;
}

function button(text, act) {
  const made = element("button", text, { type: "button" });
  made.addEventListener("click", act);
  return made;
}

function update(one, message) {
  const [, thinking, text, calls, rate] = one.children;
  thinking.hidden = !message.reasoning;
  if (settings.colours && message.pieces) {
    coloured(thinking.lastElementChild, message.pieces.filter((piece) => piece.thought));
    coloured(text, message.pieces.filter((piece) => !piece.thought));
  } else {
    plain(text);
    thinking.lastElementChild.textContent = message.reasoning ?? "";
    show(text, message.content);
  }
  calls.replaceChildren(
    ...(message.calls ?? []).map((call) => {
      const box = element("pre");
      box.append(element("code", `${call.name}(${call.arguments})`));
      return box;
    }),
  );
  rate.textContent = [message.rate, settings.colours && shares(message.proposed)].filter(Boolean).join(" · ");
}

// Who proposed each piece of an answer: the model itself, its drafter, a match of the text's own past, or a grammar.
const PROPOSERS = { target: "model", learned: "drafter", suffix: "earlier text", grammar: "grammar" };

function coloured(box, pieces) {
  if (!box.classList.contains("proposed")) {
    box.replaceChildren();
    box.classList.add("proposed");
  }
  const known = Math.max(0, box.childElementCount - 1); // the last one may have grown since
  for (const [index, piece] of pieces.entries()) {
    if (index < known) continue;
    const part = box.children[index] ?? box.appendChild(element("span", "", { className: `by-${piece.by}` }));
    part.title = `proposed by: ${PROPOSERS[piece.by]}`;
    part.textContent = piece.text;
  }
}

function plain(box) {
  if (!box.classList.contains("proposed")) return;
  box.classList.remove("proposed");
  box.replaceChildren();
}

function shares(proposed) {
  const whole = Object.values(proposed ?? {}).reduce((sum, tokens) => sum + tokens, 0);
  const parts = Object.entries(proposed ?? {}).map(([by, tokens]) => `${PROPOSERS[by]} ${((100 * tokens) / whole).toFixed(0)} %`);
  return parts.length ? `proposed by ${parts.join(", ")}` : "";
}

function draw() {
  $("messages").replaceChildren(...chat.messages.map(drawn));
  $("messages").scrollTop = $("messages").scrollHeight;
  $("chat-list").replaceChildren(
    ...chats.map((one) => {
      const line = element("li");
      const open = button(titleOf(one), () => choose(one));
      if (one.id === chat.id) open.setAttribute("aria-current", "true");
      const away = button("×", () => forget(one));
      away.setAttribute("aria-label", `Delete ${titleOf(one)}`);
      line.append(open, away);
      return line;
    }),
  );
}

function choose(one) {
  answering?.abort();
  chat = one;
  $("chats").hidden = matchMedia("(max-width: 44em)").matches || $("chats").hidden;
  $("chats-button").setAttribute("aria-expanded", String(!$("chats").hidden));
  draw();
  $("question").focus();
}

function forget(one) {
  chats = chats.filter((other) => other.id !== one.id);
  if (one.id === chat.id) {
    answering?.abort();
    chat = chats[0] ?? fresh();
  }
  keep();
  draw();
}

function edit(index) {
  answering?.abort();
  $("question").value = chat.messages[index].content;
  chat.messages.length = index;
  draw();
  $("question").focus();
}

function again(index) {
  answering?.abort();
  chat.messages.length = index;
  answer();
}

function tell_pieces(pieces, by, delta) {
  const thought = delta?.reasoning_content ?? delta?.reasoning ?? "";
  for (const [text, isThought] of [[thought, true], [delta?.content ?? "", false]]) {
    if (!text) continue;
    const last = pieces.at(-1);
    if (last?.by === by && last.thought === isThought) last.text += text;
    else pieces.push({ by, thought: isThought, text });
  }
}

async function answer() {
  const here = chat; // the user may open another meanwhile
  const control = (answering = new AbortController());
  const message = { role: "assistant", content: "", reasoning: "", pieces: [], proposed: {} };
  const sent = here.messages.map(({ role, content }) => ({ role, content }));
  here.messages.push(message);
  keep();
  draw();
  const shown = $("messages").lastElementChild;
  $("send").hidden = true;
  $("stop").hidden = false;
  tell("");
  const began = performance.now();
  let first = 0;
  let tokens = 0;
  let due = false;

  function paint() {
    due = false;
    if (!shown.isConnected) return;
    const log = $("messages");
    const below = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    update(shown, message);
    if (below) log.scrollTop = log.scrollHeight;
  }

  try {
    const body = {
      model: settings.model,
      messages: settings.system ? [{ role: "system", content: settings.system }, ...sent] : sent,
      temperature: Number(settings.temperature),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true, include_proposers: true },
      chat_template_kwargs: { thinking: settings.thinking },
    };
    if (settings.tokens) body.max_tokens = Number(settings.tokens);
    const how = { method: "POST", body: JSON.stringify(body), signal: control.signal };
    for await (const chunk of events("v1/chat/completions", { ...how, headers: { "Content-Type": "application/json" } })) {
      if (chunk.error) throw new Error(chunk.error.message);
      const until = tokens;
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const by = chunk.choices?.[0]?.proposer;
      if (by in PROPOSERS && tokens > until) message.proposed[by] = (message.proposed[by] ?? 0) + tokens - until;
      const delta = chunk.choices?.[0]?.delta;
      if (delta && !first) first = performance.now();
      message.reasoning += delta?.reasoning_content ?? delta?.reasoning ?? "";
      message.content += delta?.content ?? "";
      if (by in PROPOSERS) tell_pieces(message.pieces, by, delta);
      for (const call of delta?.tool_calls ?? []) {
        const known = ((message.calls ??= [])[call.index ?? 0] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      const seconds = (performance.now() - first) / 1000;
      if (tokens > 1 && seconds > 0) {
        message.rate = `${tokens} tokens, ${((tokens - 1) / seconds).toFixed(0)} tokens/s, first after ${(first - began).toFixed(0)} ms`;
      }
      if (!due) {
        due = true;
        setTimeout(() => requestAnimationFrame(paint), SHOWN_EVERY_MS);
      }
    }
  } catch (error) {
    if (!control.signal.aborted) tell(error.message, true);
    if (!message.content && !message.reasoning) here.messages.pop();
  } finally {
    if (answering === control) {
      answering = null;
      $("send").hidden = false;
      $("stop").hidden = true;
    }
    keep();
    if (here === chat) draw();
  }
}

// ------------------------------------------------------------------------------------------------- the engine

let watching = null;
let before = null; // [milliseconds, tokens generated until then]
const timed = new Map(); // worker and kind of step -> the sums of the last event, and the newest steps that were shown

async function watch() {
  const control = (watching = new AbortController());
  while (!control.signal.aborted) {
    try {
      for await (const now of events("engine", { signal: control.signal })) engine(now);
      $("engine-status").textContent = "The server has ended the stream; asking again.";
    } catch (error) {
      if (control.signal.aborted) return;
      $("engine-status").textContent = error.message;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

// Rows of a table: what it is called, a part of a whole, and what is said of it: the counts, where nothing is given.
function meters(id, rows) {
  $(id).hidden = !rows.length;
  $(id).querySelector("tbody").replaceChildren(
    ...rows.map(([name, part, whole, said]) => {
      const line = element("tr");
      const cell = element("td");
      const share = whole ? part / whole : 0;
      const meter = element("meter", `${(100 * share).toFixed(0)} %`, { min: 0, max: 1, value: share });
      meter.setAttribute("aria-label", name);
      cell.append(meter);
      const counts = said ?? `${(100 * share).toFixed(0)} %, ${part.toLocaleString()} of ${whole.toLocaleString()}`;
      line.append(element("th", name, { scope: "row" }), cell, element("td", counts));
      return line;
    }),
  );
}

const total = (loads, name) => loads.reduce((sum, load) => sum + (load[name] ?? 0), 0);

function positions(loads) {
  const drafts = total(loads, "drafts");
  const most = Math.max(...loads.map((load) => load.accepted_per_pos.length));
  return Array.from({ length: most }, (_, place) => [
    `draft ${place + 1}`, loads.reduce((sum, load) => sum + (load.accepted_per_pos[place] ?? 0), 0), drafts,
  ]);
}

function proposers(loads) {
  const [made, held] = [total(loads, "draft_tokens"), total(loads, "accepted_tokens")];
  const [suffix, grammar] = ["suffix", "grammar"].map((by) => ["draft", "accepted"].map((what) => total(loads, `${by}_${what}_tokens`)));
  const learned = [made - suffix[0] - grammar[0], held - suffix[1] - grammar[1]];
  const rows = [["drafter", ...learned], ["earlier text", ...suffix], ["grammar", ...grammar]];
  return rows.filter(([, all]) => all).map(([name, all, good]) => [name, good, all]);
}

function holders({ name, load }) {
  if (!load?.pages_total) return [];
  const free = load.pages_total - load.pages_used - load.pages_cached;
  const parts = [["answers that run", load.pages_used], ["the prefix cache alone", load.pages_cached], ["nobody", free]];
  return parts.map(([who, pages]) => [`${name}: ${who}`, pages, load.pages_total]);
}

// A worker tells sums since its start: the newest steps are what has come since the last event. Where none has, those
// that came last stay.
const KINDS = { decode: "answers alone", prompts: "with prompts" };

function newest(key, sums) {
  const known = timed.get(key);
  const then = known && known.sums.steps <= sums.steps ? known.sums : { steps: 0, seconds: 0, floor_s: 0 };
  const steps = sums.steps - then.steps;
  const shown = steps
    ? { ms: (1000 * (sums.seconds - then.seconds)) / steps, floor: (1000 * (sums.floor_s - then.floor_s)) / steps }
    : known.shown;
  timed.set(key, { sums, shown });
  return shown;
}

function steps({ name, load, read_bytes_per_s }) {
  const kinds = [...(load?.step_times ?? [])].sort((a, b) => a.kind.localeCompare(b.kind));
  return kinds.map((sums) => {
    const { ms, floor } = newest(`${name} ${sums.kind}`, sums);
    const share = `${((100 * floor) / ms).toFixed(0)} %`;
    const said = `step ${ms.toFixed(1)} ms, floor ${floor.toFixed(1)} ms, ${share}, at ${(read_bytes_per_s / 1e9).toFixed(1)} GB/s`;
    return [`${name}: ${KINDS[sums.kind] ?? sums.kind}`, floor, ms, said];
  });
}

function engine(now) {
  $("engine-status").textContent = now.trouble ?? (now.ready ? "Ready." : "Not ready.");
  const pages = (now.workers.map((one) => one.load).filter(Boolean)).reduce(
    (sum, load) => [sum[0] + load.pages_used, sum[1] + load.pages_total], [0, 0]);
  const loads = now.workers.map((one) => one.load).filter(Boolean);
  const generated = loads.reduce((sum, load) => sum + load.generation_tokens, 0);
  const at = performance.now();
  const rate = before ? Math.max(0, ((generated - before[1]) * 1000) / (at - before[0])) : 0;
  before = [at, generated];
  const share = (part, whole) => {
    const [a, b] = [part, whole].map((name) => loads.reduce((sum, load) => sum + (load[name] ?? 0), 0));
    return b ? `${((100 * a) / b).toFixed(0)} %` : "–";
  };
  const numbers = {
    "Tokens/s": Math.round(rate),
    "Answers that run": now.running,
    "Jobs that wait": now.queue.jobs,
    "Prompt tokens that wait": now.queue.tokens,
    "Prompts found cached": share("prompt_tokens_cached", "prompt_tokens"),
    "Drafts accepted": share("accepted_tokens", "draft_tokens"),
    "Pages in use": pages[1] ? `${pages[0]} of ${pages[1]}` : "0",
  };
  $("engine-numbers").replaceChildren(
    ...Object.entries(numbers).map(([name, value]) => {
      const box = element("div");
      box.append(element("dt", name), element("dd", typeof value === "number" ? value.toLocaleString() : value));
      return box;
    }),
  );
  meters("steps", now.workers.flatMap(steps));
  meters("positions", now.workers.flatMap(({ load }) => load?.accepted_per_pos ?? []).length ? positions(loads) : []);
  meters("proposers", proposers(loads));
  meters("holders", now.workers.flatMap(holders));
  const columns = ["running", "waiting", "pages_used", "pages_cached", "pages_total", "steps", "replayed", "preemptions", "generation_tokens"];
  const row = (cells, kind) => {
    const line = element("tr");
    line.append(...cells.map((cell) => element(kind, String(cell ?? ""))));
    return line;
  };
  $("workers-head").replaceChildren(row(["name", "role", "ready", ...columns.map((name) => name.replaceAll("_", " "))], "th"));
  $("workers").replaceChildren(
    ...now.workers.map((one) => row([one.name, one.role, one.ready ? "yes" : "no", ...columns.map((name) => one.load?.[name])], "td")),
  );
}

// --------------------------------------------------------------------------------------------------- the page

function view(name) {
  for (const one of ["chat", "engine", "settings"]) {
    $(one).hidden = one !== name;
    $(`show-${one}`).setAttribute("aria-pressed", String(one === name));
  }
  watching?.abort();
  if (name === "engine") watch();
}

for (const name of ["chat", "engine", "settings"]) $(`show-${name}`).addEventListener("click", () => view(name));
$("chats-button").addEventListener("click", () => {
  $("chats").hidden = !$("chats").hidden;
  $("chats-button").setAttribute("aria-expanded", String(!$("chats").hidden));
});
$("colours").addEventListener("click", () => {
  settings.colours = !settings.colours;
  keep();
  chosen();
  draw();
});
$("new-chat").addEventListener("click", () => choose(fresh()));
$("stop").addEventListener("click", () => answering?.abort());
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value;
  if (!question.trim() || answering) return;
  $("question").value = "";
  chat.messages.push({ role: "user", content: question });
  answer();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.abort();
});

const form = $("settings-form");
form.addEventListener("submit", (event) => event.preventDefault());
for (const name of ["system", "temperature", "tokens"]) form.elements[name].value = settings[name];
form.elements.thinking.checked = settings.thinking;
form.elements.key.value = key;
form.addEventListener("change", ({ target }) => {
  if (target.name === "key") {
    key = target.value.trim();
    sessionStorage.setItem("redline.key", key);
    learnModels();
    return;
  }
  settings[target.name] = target.type === "checkbox" ? target.checked : target.value;
  $("model").textContent = settings.model;
  keep();
});

function chosen() {
  $("colours").setAttribute("aria-pressed", String(settings.colours));
  $("legend").hidden = !settings.colours;
}

$("legend").append(...Object.entries(PROPOSERS).map(([by, name]) => element("span", name, { className: `by-${by}` })));
chosen();
draw();
learnModels();
