// The documents in this browser: read, write, list, and which of two versions contains the other. It does not know the
// page, nor which document is open.
//
// They are kept in localStorage, not in IndexedDB: it writes synchronously, so a text that is saved while the page is
// being closed is saved when the handler returns, and it informs the other windows. It holds about five million
// characters; what does not fit stays in memory, and `isSaved` says so.

import { load, names, remove, save, watch } from "./store.js";

/**
 * @typedef {object} TextDocument
 * @property {string} id
 * @property {string} text
 * @property {number} changedMs  Time of the last change, in milliseconds since 1970.
 * @property {boolean} isCopy  Made because two windows changed a document at the same time.
 * @property {Record<string, number>} versions  Version vector: for each window that wrote the document, its number of
 *   writes that this version contains.
 *
 * @typedef {{start: number, end: number, scrollPx: number}} Position  Selection, and scroll position of the page.
 */

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
  /** Documents that storage refused, by id. @type {Map<string, TextDocument>} */
  #unsaved = new Map();

  /** Turns the single text of earlier versions into a document. */
  constructor() {
    const text = load(SINGLE_TEXT);
    if (!text) return;
    const migrated = createDocument(text);
    if (!this.write(migrated)) return;
    remove(SINGLE_TEXT);
    this.setCurrent(migrated.id);
  }

  /** All documents, the last changed first. @returns {TextDocument[]} */
  list() {
    const ids = new Set([...names(DOCUMENT).map((name) => name.slice(DOCUMENT.length)), ...this.#unsaved.keys()]);
    const documents = Array.from(ids, (id) => this.read(id)).filter((document) => document !== null);
    return documents.sort((a, b) => b.changedMs - a.changedMs);
  }

  /** @param {string} id  @returns {TextDocument|null}  Null: there is none. */
  read(id) {
    return this.#unsaved.get(id) ?? load(DOCUMENT + id);
  }

  /**
   * Store a document, in place of the stored version. If storage refuses it, it is kept until the page is closed.
   * @param {TextDocument} document
   * @returns {boolean}  Whether it was stored.
   */
  write(document) {
    this.#unsaved.set(document.id, document);
    this.#saveUnsaved();
    return !this.#unsaved.has(document.id);
  }

  /** Delete a document. @param {string} id */
  remove(id) {
    this.#unsaved.delete(id);
    remove(DOCUMENT + id);
    remove(POSITION + id);
    this.#saveUnsaved();
  }

  #saveUnsaved() {
    for (const [id, document] of this.#unsaved) {
      if (save(DOCUMENT + id, document)) this.#unsaved.delete(id);
    }
  }

  /** Whether the browser keeps every document when the page is closed. */
  get isSaved() {
    return this.#unsaved.size === 0;
  }

  /**
   * Call a function when another window has written a document.
   * @param {(document: TextDocument) => void} onChange
   */
  watch(onChange) {
    watch(DOCUMENT, (_, document) => document && onChange(document));
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
 * @param {string} text
 * @returns {TextDocument}
 */
export function createDocument(text) {
  return { id: randomId(), text, changedMs: Date.now(), isCopy: false, versions: { [WINDOW_ID]: 1 } };
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
 * @param {TextDocument} document
 * @param {TextDocument} other
 * @returns {boolean}
 */
export function contains(document, other) {
  return Object.entries(other.versions).every(([id, numWrites]) => (document.versions[id] ?? 0) >= numWrites);
}

/**
 * A document whose version contains another one too. The text is unchanged.
 * @param {TextDocument} document
 * @param {TextDocument} other
 * @returns {TextDocument}
 */
export function mergeVersions(document, other) {
  const versions = { ...other.versions };
  for (const [id, numWrites] of Object.entries(document.versions)) {
    versions[id] = Math.max(numWrites, versions[id] ?? 0);
  }
  return { ...document, versions };
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
