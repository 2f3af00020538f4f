// The documents in this browser: read, write, list, and which of two versions contains the other. It does not know the
// page, nor which document is open.
//
// They are kept in IndexedDB, which does not hold up the writer, and in memory. When the page is left, those changed since
// are also written to localStorage, which is done when the handler returns: there, earlier versions of Tercet find them, and
// this one what IndexedDB had no time for.

import { load, names, remove, save } from "./store.js";
import { plainText } from "./text_files.js";

/**
 * @typedef {object} TextDocument
 * @property {string} id
 * @property {string} text
 * @property {string} [original]  The text of the file that it was opened from, if that has another form (`fileText`).
 * @property {number} changedMs  Time of the last change, in milliseconds since 1970.
 * @property {boolean} isCopy  Made because two windows changed a document at the same time.
 * @property {Record<string, number>} versions  Version vector: for each window that wrote the document, its number of
 *   writes that this version contains.
 *
 * @typedef {{start: number, end: number, scrollPx: number}} Position  Selection, and scroll position of the page.
 *
 * @typedef {{stored: Pick<TextDocument, "id"|"versions">}|{written: TextDocument}|{removed: string}} Message  To the other
 *   windows: they read what is stored; what storage refused is sent whole.
 */

const NAME = "tercet";
const STORE = "documents";
const DOCUMENT = "document.";
const POSITION = "position.";
const CURRENT = "current";
/** Where the text was kept before there were several documents. */
const SINGLE_TEXT = "text";
const MAX_TITLE_CHARS = 60;
/** Windows in a version vector. Older entries matter only to a window that was open, and unchanged, all the time. */
const MAX_VERSIONS = 20;

/** Identifies this window in version vectors. Not kept: a duplicated tab would get the same one. */
const WINDOW_ID = randomId();

export class Documents {
  /** Null: the browser has no such storage. @type {IDBDatabase|null} */
  #database = null;
  /** @type {Map<string, TextDocument>} */
  #documents = new Map();
  /** Documents that storage does not have yet, by id: being written, or refused. @type {Map<string, TextDocument>} */
  #unsaved = new Map();
  /** Those that storage refused. @type {Set<string>} */
  #refused = new Set();
  /** Written since the page was opened. @type {Set<string>} */
  #written = new Set();
  #channel = new BroadcastChannel(`${NAME}.${STORE}`);
  /** @type {(document: TextDocument) => void} */
  #onChange = () => {};
  /** @type {() => void} */
  #onUpdate = () => {};

  /** Read all documents. Takes over what earlier versions of the page, and this page as it was left, wrote to localStorage. */
  async open() {
    this.#database = await openDatabase();
    const stored = await this.#transact((store) => store.getAll()).catch(() => []);
    for (const document of stored) this.#documents.set(document.id, document);
    for (const name of names(DOCUMENT)) {
      const document = load(name);
      const known = document && this.#documents.get(document.id);
      if (document && !(known && contains(known, document))) this.write(document);
    }
    const text = load(SINGLE_TEXT);
    if (text) {
      const document = createDocument(text);
      this.write(document);
      this.setCurrent(document.id);
      if (save(DOCUMENT + document.id, document)) remove(SINGLE_TEXT);
    }
    this.#channel.addEventListener("message", ({ data }) => this.#follow(data));
    addEventListener("pagehide", () => this.#leave());
  }

  /**
   * @param {object} listeners
   * @param {(document: TextDocument) => void} listeners.changed  Called when another window has written a document.
   * @param {() => void} listeners.updated  Called when `list` or `isSaved` may have changed, except by the caller.
   */
  watch({ changed, updated }) {
    this.#onChange = changed;
    this.#onUpdate = updated;
  }

  /** All documents, the last changed first. @returns {TextDocument[]} */
  list() {
    return Array.from(this.#documents.values()).sort((a, b) => b.changedMs - a.changedMs);
  }

  /** @param {string} id  @returns {TextDocument|null}  Null: there is none. */
  read(id) {
    return this.#documents.get(id) ?? null;
  }

  /**
   * Store a document. A stored version that it does not contain is not replaced: it is passed to `changed`. A document that
   * storage refuses is kept until the page is closed.
   * @param {TextDocument} document
   */
  write(document) {
    this.#documents.set(document.id, document);
    this.#unsaved.set(document.id, document);
    this.#written.add(document.id);
    void this.#saveUnsaved();
  }

  /** Delete a document. @param {string} id */
  remove(id) {
    this.#documents.delete(id);
    this.#unsaved.delete(id);
    this.#written.delete(id);
    remove(DOCUMENT + id);
    remove(POSITION + id);
    this.#channel.postMessage({ removed: id });
    void this.#transact((store) => store.delete(id)).catch(() => {});
    void this.#saveUnsaved();
  }

  /**
   * Read what is stored again. A window that was suspended may have missed a message, and one that was closed may not have
   * sent it.
   * @param {string} [id]  Of the only document to read. Default: all.
   */
  async refresh(id) {
    const stored = await this.#transact((store) => store.getAll(id)).catch(() => []);
    for (const written of stored) this.#follow({ written });
  }

  /** Whether the browser keeps every document when the page is closed. */
  get isSaved() {
    return this.#refused.size === 0;
  }

  async #saveUnsaved() {
    for (const document of Array.from(this.#unsaved.values())) {
      const stored = await this.#put(document).catch(() => null);
      if (this.#unsaved.get(document.id) !== document) continue; // there is a newer one, which is being written
      if (stored === null) {
        this.#refused.add(document.id);
        this.#channel.postMessage({ written: document });
        continue;
      }
      this.#unsaved.delete(document.id);
      this.#refused.delete(document.id);
      if (stored !== document) this.#follow({ written: stored });
      else this.#channel.postMessage({ stored: { id: document.id, versions: document.versions } });
    }
    for (const id of this.#refused) if (!this.#unsaved.has(id)) this.#refused.delete(id);
    this.#onUpdate();
  }

  /**
   * Store a document, unless a version is stored that it does not contain.
   * @param {TextDocument} document
   * @returns {Promise<TextDocument>}  What is stored now.
   */
  async #put(document) {
    /** @type {TextDocument} */
    let result = document;
    await this.#transact((store) => {
      const request = store.get(document.id);
      request.addEventListener("success", () => {
        const stored = /** @type {TextDocument|undefined} */ (request.result);
        if (stored && !contains(document, stored) && stored.text !== document.text) result = stored;
        else store.put(document);
      });
      return request;
    });
    return result;
  }

  /**
   * Run a request in a transaction of its own.
   * @template T
   * @param {(store: IDBObjectStore) => IDBRequest<T>} ask
   * @returns {Promise<T>}  Its result, once the transaction is complete.
   * @throws {unknown} If there is no storage, or it refuses.
   */
  async #transact(ask) {
    if (!this.#database) throw new Error("no storage");
    const transaction = this.#database.transaction(STORE, "readwrite");
    const request = ask(transaction.objectStore(STORE));
    await new Promise((resolve, reject) => {
      transaction.addEventListener("complete", resolve);
      transaction.addEventListener("abort", () => reject(transaction.error));
    });
    return request.result;
  }

  /** @param {Message} message  Of another window. */
  #follow(message) {
    if ("removed" in message) {
      this.#documents.delete(message.removed);
    } else {
      const version = "stored" in message ? message.stored : message.written;
      const known = this.#documents.get(version.id);
      if (known && contains(known, version)) return;
      if ("stored" in message) return void this.refresh(version.id);
      this.#documents.set(version.id, message.written);
      this.#onChange(message.written);
    }
    this.#onUpdate();
  }

  #leave() {
    for (const id of this.#written) {
      const document = this.#documents.get(id);
      if (document) save(DOCUMENT + id, document);
    }
  }

  /** The document to open: this tab's last one, else the one opened last in any tab. @returns {TextDocument|null} */
  get current() {
    for (const id of [load(CURRENT, "sessionStorage"), load(CURRENT)]) {
      const document = id && this.read(id);
      if (document) return document;
    }
    return this.list()[0] ?? null;
  }

  /** Open this document at the next start. @param {string} id */
  setCurrent(id) {
    save(CURRENT, id, "sessionStorage");
    save(CURRENT, id);
  }

  /** @param {string} id  @returns {Position|null} */
  readPosition(id) {
    return load(POSITION + id);
  }

  /** @param {string} id  @param {Position} position */
  writePosition(id, position) {
    save(POSITION + id, position);
  }
}

/**
 * A document that is not stored yet.
 * @param {string} original  Its text, as in a file.
 * @returns {TextDocument}
 */
export function createDocument(original) {
  const text = plainText(original);
  const kept = text === original ? {} : { original };
  return { id: randomId(), text, ...kept, changedMs: Date.now(), isCopy: false, versions: { [WINDOW_ID]: 1 } };
}

/**
 * A new version of a document, by this window.
 * @param {TextDocument} document
 * @param {string} text
 * @returns {TextDocument}
 */
export function changeText(document, text) {
  const { [WINDOW_ID]: numWrites = 0, ...others } = document.versions;
  const newest = Object.entries(others).slice(1 - MAX_VERSIONS);
  const versions = Object.fromEntries([...newest, [WINDOW_ID, numWrites + 1]]);
  return { ...document, text, changedMs: Date.now(), versions };
}

/**
 * Whether a version contains another: it is the same, or was made from it.
 * @param {Pick<TextDocument, "versions">} document
 * @param {Pick<TextDocument, "versions">} other
 * @returns {boolean}
 */
export function contains(document, other) {
  return Object.entries(other.versions).every(([id, numWrites]) => (document.versions[id] ?? 0) >= numWrites);
}

/**
 * The first line of a document that is not empty, without the marks of a Markdown heading.
 * @param {{text: string, isCopy: boolean}} document
 * @returns {string}
 */
export function titleOf({ text, isCopy }) {
  const line = text.match(/^[\s#]*(\S.*)/)?.[1].trim() || "Untitled";
  const title = line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS - 1).trimEnd()}…` : line;
  return isCopy ? `${title} (copy)` : title;
}

function randomId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(2)), (number) => number.toString(36)).join("");
}

/** @returns {Promise<IDBDatabase|null>}  Null: the browser refuses. */
function openDatabase() {
  return new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.addEventListener("upgradeneeded", () => request.result.createObjectStore(STORE, { keyPath: "id" }));
      request.addEventListener("success", () => resolve(request.result));
      request.addEventListener("error", () => resolve(null));
    } catch {
      resolve(null);
    }
  });
}
