// Images of questions: read from files, stored in this browser (IndexedDB), shown as thumbnails.

export const MOST_BYTES = 20e6; // of all stored images; those of the oldest questions are dropped beyond
const KINDS = /^image\/(png|jpeg|webp|gif|bmp|x-ms-bmp)$/;
const DATA_URL = /^data:image\/[\w.+-]{1,40};base64,[A-Za-z0-9+/]+=*$/;

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
export const isImage = (url) => typeof url === "string" && DATA_URL.test(url);

/** An image of a question: {id, bytes, url}. url: a data URL, missing until `fill` has read it from the storage. */
export const imageOf = (url) => ({ id: newId(), bytes: Math.floor(((url.length - url.indexOf(",") - 1) * 3) / 4), url });

/** The images in a list of files, to be added to those that are there. Throws an Error that names the file. */
export async function readImages(files, there) {
  const added = [];
  for (const file of files) {
    const name = file.name || "The image";
    if (!KINDS.test(file.type)) throw new Error(`${name} is not a PNG, JPEG, WebP, GIF or BMP image.`);
    if (!file.size) throw new Error(`${name} is empty.`);
    if (file.size + [...there, ...added].reduce((sum, { bytes }) => sum + bytes, 0) > MOST_BYTES) {
      throw new Error(`${name} has ${(file.size / 1e6).toFixed(1)} MB; the images of a question have ${MOST_BYTES / 1e6} MB at most.`);
    }
    added.push(imageOf(await dataUrl(file)));
  }
  return added;
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });
}

const newestFirst = (chats) => chats.flatMap(({ messages }) => messages.toReversed()).filter(({ images }) => images);

/** Drops the images of the oldest questions until the rest has at most `most` bytes; returns how many. */
export function bound(chats, most = MOST_BYTES) {
  let bytes = 0;
  return newestFirst(chats).reduce(
    (count, message) => count + drop(message, message.images.filter((one) => (bytes += one.bytes) <= most)),
    0,
  );
}

/** Drops the oldest image unless it is the only one; returns how many. */
export function dropOldest(chats) {
  const sizes = newestFirst(chats).flatMap(({ images }) => images.map((one) => one.bytes));
  return sizes.length > 1 ? bound(chats, sizes.slice(0, -1).reduce((sum, one) => sum + one)) : 0;
}

function drop(message, kept) {
  const count = (message.images?.length ?? 0) - kept.length;
  if (count) Object.assign(message, { images: kept, dropped: (message.dropped ?? 0) + count });
  return count;
}

// ---------------------------------------------------------------------------------------------------- the storage

const settled = (request) =>
  new Promise((done, failed) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });

let opened = null;
function database() {
  return (opened ??= (async () => {
    const request = indexedDB.open("redline", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("images");
    return settled(request);
  })());
}

/** Stores the images of these chats, and deletes those of no chat. stored: gives the ids of all stored chats' images.
 * Throws if the browser has no room or no IndexedDB. */
export async function shelve(chats, stored) {
  const images = newestFirst(chats).flatMap((message) => message.images);
  if (!images.length && opened === null) return;
  const transaction = (await database()).transaction("images", "readwrite");
  const ended = new Promise((done, failed) => {
    transaction.oncomplete = done;
    transaction.onabort = () => failed(transaction.error);
  });
  ended.catch(() => {}); // an error of the first request is thrown below
  const shelf = transaction.objectStore("images");
  const keys = new Set(await settled(shelf.getAllKeys()));
  const wanted = stored();
  for (const { id, url } of images) if (url && wanted.has(id) && !keys.has(id)) shelf.put(url, id);
  for (const id of keys) if (!wanted.has(id)) shelf.delete(id);
  await ended;
}

/** Reads the images of a chat from the storage; those that are not there are dropped. Returns whether it had any. */
export async function fill({ messages }) {
  let found = false;
  for (const message of messages) {
    const missing = (message.images ?? []).filter(({ url }) => !url);
    if (!missing.length) continue;
    found = true;
    try {
      const shelf = (await database()).transaction("images").objectStore("images");
      await Promise.all(missing.map(async (image) => (image.url ??= await settled(shelf.get(image.id)))));
    } catch {
      // a browser without IndexedDB has stored none
    }
    drop(message, message.images.filter(({ url }) => url));
  }
  return found;
}

// --------------------------------------------------------------------------------------------------- on the page

/** Fills a box with thumbnails. wrong: index of the image that the server has refused; remove(index): adds a button
 * for it. */
export function thumbnails(box, images, { wrong = -1, remove = null } = {}) {
  box.hidden = !images.length;
  box.className = "thumbnails";
  box.replaceChildren(
    ...images.map(({ url }, index) => {
      const one = document.createElement("span");
      one.classList.toggle("wrong", index === wrong);
      const picture = Object.assign(document.createElement("img"), { alt: `Image ${index + 1}` });
      if (url) picture.src = url;
      one.append(picture);
      if (remove) {
        const away = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
        away.setAttribute("aria-label", `Remove image ${index + 1}`);
        away.addEventListener("click", () => remove(index));
        one.append(away);
      }
      return one;
    }),
  );
  return box;
}

/** Calls take(files) with images that are pasted or dropped into an element. reads: whether the model reads images. */
export function receive(box, reads, take) {
  box.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files].filter(({ type }) => type.startsWith("image/"));
    // text that comes along, as from a spreadsheet, is what was meant
    if (!reads() || !files.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    event.stopPropagation();
    take(files);
  });
  box.addEventListener("dragover", (event) => {
    if (!reads() || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    event.stopPropagation();
    box.classList.add("over");
  });
  for (const name of ["dragleave", "drop"]) box.addEventListener(name, () => box.classList.remove("over"));
  box.addEventListener("drop", (event) => {
    const files = [...event.dataTransfer.files];
    if (!reads() || !files.length) return;
    event.preventDefault();
    event.stopPropagation();
    take(files);
  });
}
