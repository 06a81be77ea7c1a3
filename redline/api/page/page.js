// The page served at /: chats, the engine, settings. Everything that it stores stays in this browser.

import { number } from "./charts.js";
import { PROPOSERS, clear, colour, spans } from "./colours.js";
import { ownRate, showEngine, watch } from "./engine.js";
import { MOST_BYTES, bound, dropOldest, fill, readImages, receive, shelve, thumbnails } from "./images.js";
import { copied, grow, renderWith, show } from "./markdown.js";
import { Refused, events, headers, refusal, setKey, theKey, told } from "./server.js";
import { SAMPLING, exported, fresh, imported, keep as keepChats, keptChats, keptImages, sampling, settings } from "./store.js";

const $ = (id) => document.getElementById(id);
const SHOWN_EVERY_MS = { plain: 50, coloured: 100 }; // minimum interval between two redraws of an answer
const LEAST_S = 1; // minimum duration for which a rate is shown

let chats = keptChats();
let chat = chats[0] ?? fresh();
let answering = null; // an AbortController while an answer is streaming
let editing = null; // index of the question that is being edited
const pending = []; // images of the next question
let adding = null; // what takes the files that are chosen next
let seeing = []; // names of the models that read images

const reads = () => seeing.includes(settings.model);

// ------------------------------------------------------------------------------------------------- status and notices

function tell(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

/** Shows a notice over the page; undo: action of its Undo button. */
function notice(text, undo = null) {
  $("notice").firstElementChild.textContent = text;
  $("undo").hidden = !undo;
  $("undo").onclick = () => {
    $("notice").hidden = true;
    undo();
  };
  $("notice").hidden = false;
}
$("dismiss").addEventListener("click", () => ($("notice").hidden = true));

function keep() {
  chats = [chat, ...chats.filter((one) => one.id !== chat.id)];
  tellDropped(bound(chats));
  try {
    chats = keepChats(chats);
  } catch {
    tell("The browser's storage is full: delete some chats, or this one is lost when the tab is closed.", true);
  }
  keepImages();
}

async function keepImages() {
  try {
    await shelve(chats, keptImages);
  } catch (error) {
    const dropped = error.name === "QuotaExceededError" && dropOldest(chats);
    if (!dropped) return tell(`Images are not stored in this browser, and lost when the tab is closed: ${error.message}`, true);
    keep();
    tellDropped(dropped);
    if (editing === null) draw();
  }
}

function tellDropped(count) {
  if (count) notice(`${count} of the oldest images dropped: up to ${MOST_BYTES / 1e6} MB are stored, or less if the browser has no room.`);
}

const titleOf = ({ messages: [first] }) => first?.content.slice(0, 80) || (first?.images && "Image") || "New chat";

async function learnModels() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    if (!answer.ok) throw await refusal(answer);
    const cards = (await answer.json()).data;
    const names = cards.map((one) => one.id);
    seeing = cards.filter((one) => one.supports_image_in).map((one) => one.id);
    const choice = $("settings-form").elements.model;
    choice.replaceChildren(...names.map((name) => new Option(name, name)));
    if (!names.includes(settings.model)) settings.model = names[0] ?? "";
    choice.value = settings.model;
    modelChosen();
    tell("");
  } catch (error) {
    tell(`${error.message} ${theKey() ? "" : "If this server needs a key, enter it under Settings."}`, true);
  }
}

// --------------------------------------------------------------------------------------------------- a chat

function element(name, text = "", how = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, how);
}

function button(text, act) {
  const made = element("button", text, { type: "button" });
  made.addEventListener("click", act);
  return made;
}

const line = (...children) => {
  const made = element("div", "", { className: "tools" });
  made.append(...children);
  return made;
};

function drawn(message, index) {
  const one = element("article", "", { className: message.role });
  one.append(element("h2", message.role === "user" ? "You" : "Answer"));
  if (message.role === "user" && editing === index) {
    one.append(editor(message, index));
  } else if (message.role === "user") {
    if (reads()) one.append(...seen(message));
    if (message.content) one.append(element("div", message.content, { className: "text" }));
    one.append(line(button("Edit", () => edit(index))));
  } else {
    const thinking = element("details");
    thinking.append(element("summary", "Thinking"), element("div"));
    one.append(thinking, element("div", "", { className: "text" }), element("div"), element("p", "", { className: "ended" }));
    one.append(element("p", "", { className: "rate" }));
    update(one, message);
    one.append(line(button("Copy", () => navigator.clipboard?.writeText(message.content)), button("Again", () => again(index))));
  }
  return one;
}

/** What is shown of a question's images, and of an error about them. */
function seen({ images = [], dropped, wrong }) {
  const parts = images.length ? [thumbnails(element("div"), images, { wrong: wrong?.image })] : [];
  if (dropped) parts.push(element("p", dropped === 1 ? "An image is not stored any more." : `${dropped} images are not stored any more.`, { className: "ended" }));
  if (wrong) parts.push(element("p", wrong.text, { className: "ended" }));
  return parts;
}

function update(one, message) {
  const [, thinking, text, calls, ended, rate] = one.children;
  thinking.hidden = !message.reasoning;
  const thought = thinking.lastElementChild;
  grow(thought, message.reasoning ?? "");
  show(text, message.content, !message.open);
  if (settings.colours && message.pieces) {
    colour(thought, message.reasoning, spans(message.pieces.filter((piece) => piece.thought)));
    colour(text, message.content, spans(message.pieces.filter((piece) => !piece.thought)));
  }
  calls.replaceChildren(
    ...(message.calls ?? []).map((call) => {
      const box = element("pre", "", { tabIndex: 0 });
      box.append(element("code", `${call.name}(${call.arguments})`));
      return box;
    }),
  );
  ended.textContent = message.ended ?? "";
  ended.hidden = !message.ended;
  rate.textContent = [message.rate, shares(message.proposed)].filter(Boolean).join(" · ");
}

function shares(proposed) {
  const whole = Object.values(proposed ?? {}).reduce((sum, tokens) => sum + tokens, 0);
  const parts = Object.entries(proposed ?? {}).map(([by, tokens]) => `${PROPOSERS[by]} ${number((100 * tokens) / whole)} %`);
  return parts.length ? `proposed by ${parts.join(", ")}` : "";
}

function draw() {
  clear($("messages"));
  $("messages").replaceChildren(...chat.messages.map(drawn));
  if (editing === null) toEnd();
  drawList();
}

function drawList() {
  $("chat-list").replaceChildren(
    ...chats.map((one) => {
      const open = button(titleOf(one), () => choose(one));
      if (one.id === chat.id) open.setAttribute("aria-current", "true");
      const away = button("×", () => forget(one));
      away.setAttribute("aria-label", `Delete ${titleOf(one)}`);
      const item = element("li");
      item.append(open, away);
      return item;
    }),
  );
}

// The view stays at the end if it was there, while text arrives and while blocks are rendered.
let atEnd = true;
const toEnd = () => ($("messages").scrollTop = $("messages").scrollHeight);
$("messages").addEventListener("scroll", ({ target }) => {
  atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
});
$("messages").addEventListener("rendered", ({ target }) => {
  if (atEnd && editing === null) toEnd();
  const one = target.closest("article.assistant");
  const message = chat.messages[[...$("messages").children].indexOf(one)];
  if (message?.pieces && settings.colours) update(one, message);
});
$("messages").addEventListener("click", ({ target }) => {
  if (target.matches(".bar button")) copied(target);
});

// Another tab has stored chats: take them over, or storing here would overwrite them; the chat open here is kept.
addEventListener("storage", ({ key }) => {
  if (key !== "redline.chats") return;
  chats = keptChats().map((one) => (one.id === chat.id ? chat : one));
  if (chat.messages.length && !chats.includes(chat)) chats.unshift(chat);
  drawList();
});

function choose(one) {
  answering?.abort();
  chat = one;
  editing = null;
  aside(!matchMedia("(max-width: 44em)").matches && !$("chats").hidden);
  draw();
  view("chat");
  load(one);
}

/** Reads the images of a chat, and shows them. */
async function load(one) {
  if ((await fill(one)) && one === chat && editing === null) draw();
}

async function forget(one) {
  await fill(one); // its images are deleted too, and stored again by Undo
  const [place, current] = [chats.indexOf(one), one.id === chat.id];
  chats = chats.filter((other) => other.id !== one.id);
  if (current) {
    answering?.abort();
    chat = chats[0] ?? fresh();
    editing = null;
  }
  keep();
  draw();
  notice(`Deleted “${titleOf(one).slice(0, 40)}”.`, () => {
    chats.splice(place, 0, one);
    if (current) chat = one;
    keep();
    draw();
  });
}

// -- a question that is being edited, and the messages after it, stay until it is sent

function edit(index) {
  editing = index;
  draw();
  const field = $("messages").children[index].querySelector("textarea");
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function editor(message, index) {
  const form = element("form", "", { className: "editor" });
  const field = element("textarea", message.content, { rows: Math.min(12, message.content.split("\n").length + 1) });
  field.setAttribute("aria-label", "The question");
  const send = element("button", "Send", { type: "submit" });
  const tray = element("div");
  const tools = line(send, button("Cancel", leave));
  const images = [...(message.images ?? [])];
  const remove = (at) => {
    images.splice(at, 1);
    show();
  };
  const show = () => thumbnails(tray, images, { remove });
  const take = async (files) => {
    await attempt(async () => images.push(...(await readImages(files, images))));
    show();
  };
  if (reads()) {
    show();
    form.append(tray);
    receive(form, reads, take);
    tools.append(button("Add an image", () => pick(take)));
  }
  form.append(field, tools);
  field.addEventListener("keydown", sends);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!asks(field.value, images)) return;
    answering?.abort();
    editing = null;
    chat.messages.length = index;
    chat.messages.push(question(field.value, images));
    answer();
    $("question").focus();
  });
  return form;
}

// -- images of a question

const asks = (text, images) => text.trim() || (reads() && images.length);
const question = (content, images) => ({ role: "user", content, ...(images.length && { images }) });

async function attempt(act) {
  try {
    await act();
    tell("");
  } catch (error) {
    tell(error.message, true);
  }
}

function pick(take) {
  adding = take;
  $("image-file").click();
}

function drawPending() {
  const remove = (at) => {
    pending.splice(at, 1);
    drawPending();
    $("question").focus();
  };
  thumbnails($("images"), reads() ? pending : [], { remove });
}

async function takePending(files) {
  await attempt(async () => pending.push(...(await readImages(files, pending))));
  drawPending();
  $("question").focus();
}

function modelChosen() {
  $("model").textContent = settings.model;
  $("add-image").hidden = !reads();
  drawPending();
  if (chat.messages.some(({ images, dropped }) => images || dropped) && editing === null) draw();
}

$("add-image").addEventListener("click", () => pick(takePending));
$("image-file").addEventListener("change", ({ target }) => {
  const files = [...target.files];
  target.value = ""; // the same file may be chosen again
  adding(files);
});
receive($("chat"), reads, takePending);

/** A question as the API takes it, its images before its text. */
function sendable({ role, content, images = [] }) {
  if (!reads() || !images.length) return { role, content };
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
}

/** Notes an error of the server at the question whose image it names. field: as messages[1].content[0].image_url. */
function blame(messages, { field, message }) {
  const [, at, image] = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(field ?? "") ?? [];
  const asked = messages[at - (settings.system ? 1 : 0)];
  if (asked?.images) asked.wrong = { text: message, image: Number(image) };
}

function leave() {
  editing = null;
  draw();
  $("question").focus();
}

function sends(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

function again(index) {
  answering?.abort();
  editing = null;
  chat.messages.length = index;
  answer();
}

// --------------------------------------------------------------------------------------------------- an answer

function addPieces(pieces, by, thought, content) {
  for (const [text, isThought] of [[thought, true], [content, false]]) {
    if (!text) continue;
    const last = pieces.at(-1);
    if (last?.by === by && last.thought === isThought) last.text += text;
    else pieces.push({ by, thought: isThought, text });
  }
}

/** Tokens per second between the first and the last one, by the server's clock, so without network delays. */
class Pace {
  constructor() {
    this.began = performance.now();
    this.first = this.last = this.heard = null;
  }

  take(tokens, elapsed_ms) {
    if (elapsed_ms === undefined) return;
    this.heard ??= performance.now();
    this.last = { tokens, ms: elapsed_ms };
    this.first ??= this.last;
  }

  get line() {
    if (!this.last) return "";
    const { tokens, ms } = this.last;
    const parts = [];
    const seconds = (ms - this.first.ms) / 1000;
    if (seconds >= LEAST_S) {
      const rate = Math.min((tokens - this.first.tokens) / seconds, ownRate(seconds) ?? Infinity);
      parts.push(`${number(tokens)} tokens`, `${number(rate, rate < 10 ? 1 : 0)} tokens/s`);
    } else parts.push(`${number(tokens)} tokens in ${number(ms / 1000, 2)} s`);
    return [...parts, `first after ${number(this.heard - this.began)} ms`].join(", ");
  }
}

async function answer() {
  const here = chat; // the user may open another chat in the meantime
  const control = (answering = new AbortController());
  const message = { role: "assistant", content: "", reasoning: "", pieces: [], proposed: {}, open: true };
  const asked = [...here.messages];
  for (const one of asked) delete one.wrong;
  here.messages.push(message);
  keep();
  atEnd = true;
  draw();
  $("send").hidden = true;
  $("stop").hidden = false;
  tell("");
  complain();
  const pace = new Pace();
  let tokens = 0;
  let due = false;

  function paint() {
    due = false;
    const shown = here === chat && $("messages").children[here.messages.indexOf(message)];
    if (!shown) return;
    message.rate = pace.line;
    update(shown, message);
    if (atEnd && editing === null) toEnd();
  }

  try {
    await fill(here);
    const sent = asked.map(sendable);
    const body = {
      model: settings.model,
      messages: settings.system ? [{ role: "system", content: settings.system }, ...sent] : sent,
      ...sampling(),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true, include_proposers: true },
      chat_template_kwargs: { thinking: settings.thinking },
    };
    const how = { method: "POST", body: JSON.stringify(body), signal: control.signal };
    for await (const chunk of events("v1/chat/completions", { ...how, headers: { "Content-Type": "application/json" } })) {
      if (chunk.error) throw told(chunk.error);
      const until = tokens;
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const choice = chunk.choices?.[0];
      const by = choice?.proposer;
      if (by in PROPOSERS && tokens > until) message.proposed[by] = (message.proposed[by] ?? 0) + tokens - until;
      pace.take(tokens, choice?.elapsed_ms);
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      const content = choice?.delta?.content ?? "";
      message.reasoning += thought;
      message.content += content;
      if (by in PROPOSERS) addPieces(message.pieces, by, thought, content);
      for (const call of choice?.delta?.tool_calls ?? []) {
        const known = ((message.calls ??= [])[call.index ?? 0] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      if (choice?.finish_reason === "length") message.ended = `Cut off at ${number(tokens)} tokens, the limit of this answer.`;
      if (!due) {
        due = true;
        setTimeout(() => requestAnimationFrame(paint), SHOWN_EVERY_MS[settings.colours ? "coloured" : "plain"]);
      }
    }
  } catch (error) {
    const begun = message.content || message.reasoning || message.calls;
    if (control.signal.aborted) message.ended = "Stopped.";
    else {
      tell(error.message, true);
      if (error instanceof Refused) {
        complain(error.field?.split(/[.[]/)[0], error.message);
        blame(asked, error);
      }
      message.ended = `Interrupted: ${error.message}`;
    }
    if (!begun && !control.signal.aborted) here.messages.splice(here.messages.indexOf(message), 1);
  } finally {
    delete message.open;
    message.rate = pace.line;
    if (answering === control) {
      answering = null;
      $("send").hidden = false;
      $("stop").hidden = true;
    }
    keep();
    if (here === chat && editing === null) draw();
    else if (here === chat) paint();
  }
}

addEventListener("pagehide", () => {
  const message = chat.messages.at(-1);
  if (!message?.open) return;
  message.ended = "Stopped.";
  keep();
});

// --------------------------------------------------------------------------------------------------- the page

function view(name) {
  for (const one of ["chat", "engine", "settings"]) {
    $(one).hidden = one !== name;
    $(`show-${one}`).setAttribute("aria-pressed", String(one === name));
  }
  if (name === "engine") showEngine();
  if (name === "chat") {
    if (atEnd) toEnd();
    $("question").focus();
  }
}

function aside(open) {
  $("chats").hidden = !open;
  $("chats-button").setAttribute("aria-expanded", String(open));
}

for (const name of ["chat", "engine", "settings"]) $(`show-${name}`).addEventListener("click", () => view(name));
$("chats-button").addEventListener("click", () => aside($("chats").hidden));
$("colours").addEventListener("click", () => {
  settings.colours = !settings.colours;
  keep();
  chosen();
  if (settings.colours) [...$("messages").children].forEach((one, at) => one.matches(".assistant") && update(one, chat.messages[at]));
  else clear($("messages"));
});
$("new-chat").addEventListener("click", () => choose(fresh()));
$("stop").addEventListener("click", () => answering?.abort());
$("question").addEventListener("keydown", sends);
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value;
  if (!asks(text, pending) || answering) return;
  $("question").value = "";
  editing = null;
  chat.messages.push(question(text, reads() ? pending.splice(0) : []));
  drawPending();
  answer();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (editing !== null) leave();
  else if (answering) answering.abort();
  else if (matchMedia("(max-width: 44em)").matches) aside(false);
});

$("export").addEventListener("click", async () => {
  for (const one of chats) await fill(one);
  const link = element("a", "", { href: URL.createObjectURL(exported(chats)), download: "redline-chats.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  target.value = "";
  if (!file) return;
  try {
    const found = imported(await file.text());
    const known = new Set(chats.map((one) => one.id));
    const added = found.filter((one) => !known.has(one.id));
    chats = [...chats, ...added];
    if (!chat.messages.length && added.length) chat = added[0];
    keep();
    draw();
    const kept = added.filter((one) => chats.some((other) => other.id === one.id)).length;
    const left = [found.length - added.length && `${found.length - added.length} already existed`, added.length - kept && `${added.length - kept} exceeded the limit`];
    notice([`${kept} of ${found.length} chats imported`, ...left.filter(Boolean)].join("; ") + ".");
  } catch (error) {
    notice(`Nothing was imported. ${error.message}.`);
  }
});

// ---------------------------------------------------------------------------------------------------- settings

const form = $("settings-form");
const KEPT = ["system", ...SAMPLING];
const labelOf = (field) => field.closest("label").firstChild.data.trim();
for (const name of KEPT) form.elements[name].value = settings[name];
form.elements.thinking.checked = settings.thinking;
form.elements.key.value = theKey();

/** Shows an error below a field; without a field, removes all errors. */
function complain(name = "", text = "") {
  for (const one of form.querySelectorAll(".wrong")) one.remove();
  for (const one of form.elements) one.removeAttribute("aria-invalid");
  const field = KEPT.includes(name) && form.elements[name];
  if (!field) return;
  field.setAttribute("aria-invalid", "true");
  field.closest("label").append(element("span", text, { className: "wrong" }));
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", ({ target }) => {
  if (target.name === "key") {
    setKey(target.value);
    learnModels();
    watch();
    return;
  }
  complain();
  if (!target.checkValidity()) {
    complain(target.name, `${labelOf(target)}: ${target.validationMessage} The setting remains ${settings[target.name] || "the server's default"}.`);
    return;
  }
  settings[target.name] = target.type === "checkbox" ? target.checked : target.value;
  if (target.name === "model") modelChosen();
  keep();
});
$("reset").addEventListener("click", () => {
  for (const name of SAMPLING) settings[name] = form.elements[name].value = "";
  complain();
  keep();
});

function chosen() {
  $("colours").setAttribute("aria-pressed", String(settings.colours));
  $("legend").classList.toggle("off", !settings.colours);
}

$("legend").append(...Object.entries(PROPOSERS).map(([by, name]) => element("span", name, { className: `by-${by}` })));
renderWith(headers);
chosen();
draw();
load(chat);
learnModels();
watch();
$("question").focus();
