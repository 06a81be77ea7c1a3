// Chats and settings that are stored in this browser, and export and import of chats.

import { imageOf, isImage } from "./images.js";

const KEPT_CHATS = 50;
export const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens", "stop"];
const empty = Object.fromEntries(SAMPLING.map((name) => [name, ""]));

export const settings = { model: "", system: "", thinking: true, colours: false, ...empty, ...stored("redline.settings", {}) };
settings.max_tokens ||= settings.tokens ?? ""; // its former name
delete settings.tokens;

function stored(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// Of an image the id and the size are stored here, its bytes by images.js.
const unkept = (name, value) => (["pieces", "wrong", "url"].includes(name) ? undefined : value);
const unexported = (name, value) => (name === "images" ? value.map(({ url }) => url) : unkept(name, value));

/** The stored chats, without answers that were empty when the page was closed. */
export function keptChats() {
  const chats = stored("redline.chats", []);
  for (const { messages } of chats) {
    const last = messages.at(-1);
    if (last?.role === "assistant" && !last.content && !last.reasoning && !last.calls) messages.pop();
  }
  return chats.filter(({ messages }) => messages.length);
}

/** The chats to store, newest first; throws if the browser's storage is full. */
export function keep(chats) {
  const kept = chats.filter((one) => one.messages.length).slice(0, KEPT_CHATS);
  localStorage.setItem("redline.chats", JSON.stringify(kept, unkept));
  localStorage.setItem("redline.settings", JSON.stringify(settings));
  return kept;
}

/** The ids of the images of all stored chats, of other tabs too. */
export const keptImages = () =>
  new Set(stored("redline.chats", []).flatMap(({ messages }) => messages.flatMap(({ images = [] }) => images.map(({ id }) => id))));

export const fresh = () => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, messages: [] });

/** Chats, with all their images read, as a file for `imported`. */
export function exported(chats) {
  return new Blob([JSON.stringify({ format: "redline.chats", version: 1, chats }, unexported, 1)], { type: "application/json" });
}

const isText = (value) => typeof value === "string";
const MESSAGE = { content: isText, reasoning: isText, rate: isText, ended: isText, calls: Array.isArray, proposed: (value) => value?.constructor === Object, images: (value) => Array.isArray(value) && value.every(isImage), dropped: Number.isSafeInteger };

/** The chats in an exported file's text. Throws an Error that names the invalid field. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  const check = (good, place, wanted) => {
    if (!good) throw new Error(`${place} is not ${wanted}`);
  };
  check(file?.format === "redline.chats", "format", '"redline.chats": the file has no exported chats');
  check(file.version === 1, "version", "1");
  check(Array.isArray(file.chats), "chats", "a list");
  return file.chats.map((chat, at) => {
    check(Array.isArray(chat?.messages) && chat.messages.length, `chats[${at}].messages`, "a list of messages");
    const messages = chat.messages.map((message, place) => {
      const where = `chats[${at}].messages[${place}]`;
      check(["user", "assistant"].includes(message?.role), `${where}.role`, '"user" or "assistant"');
      check(isText(message.content), `${where}.content`, "a text");
      const made = { role: message.role };
      for (const [name, good] of Object.entries(MESSAGE)) {
        if (message[name] === undefined) continue;
        check(good(message[name]), `${where}.${name}`, "a value of an export");
        made[name] = message[name];
      }
      for (const [index, call] of (made.calls ?? []).entries()) {
        check(isText(call?.name) && isText(call?.arguments), `${where}.calls[${index}]`, "a name and arguments");
      }
      if (made.images) made.images = made.images.map(imageOf);
      return made;
    });
    return { id: isText(chat.id) && chat.id ? chat.id : fresh().id, messages };
  });
}

/** The sampling parameters of a request, without empty fields, for which the server's defaults apply. */
export function sampling() {
  const given = SAMPLING.filter((name) => String(settings[name]).trim() !== "");
  return Object.fromEntries(
    given.map((name) => [name, name === "stop" ? settings.stop.split("\n").filter(Boolean) : Number(settings[name])]),
  );
}
