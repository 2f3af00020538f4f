// The document in the editor: loads, saves and restores it, and follows the changes of other windows. It does not
// know the list of documents, nor what the page shows of them.
//
// No version is ever overwritten by a window that has not seen it. If two windows change a document at the same time,
// one of them continues in a copy.

import { changeText, contains, createDocument, titleOf } from "./documents.js";

/** @typedef {import("./documents.js").TextDocument} TextDocument */
/** @typedef {import("./documents.js").Documents} Documents */

/**
 * A change is saved within about a second, also while the writer keeps typing. A crash loses no more. To save a long
 * document costs as much as some keys, so it is not done more often.
 */
const SAVE_DELAY_MS = 750;
const MAX_IDLE_WAIT_MS = 250;

export class OpenDocument {
  #documents;
  #editor;
  #show;
  #notify;
  /** @type {TextDocument} */
  #document = createDocument("");
  /** Whether the editor's text may differ from it. */
  #isChanged = false;
  #isSaveScheduled = false;

  /**
   * @param {object} options
   * @param {Documents} options.documents
   * @param {import("./text_editor.js").TextEditor} options.editor
   * @param {() => void} options.show  Called when the open document, the list or what is saved has changed.
   * @param {(message: string) => void} options.notify  Shows a message to the writer.
   */
  constructor({ documents, editor, show, notify }) {
    this.#documents = documents;
    this.#editor = editor;
    this.#show = show;
    this.#notify = notify;
    documents.watch({ changed: (document) => this.#receive(document), updated: show });
    addEventListener("pagehide", () => this.save());
    // A window in the background may have been suspended while another one wrote.
    addEventListener("focus", () => this.#catchUp());
    document.addEventListener("visibilitychange", () => (document.hidden ? this.save() : this.#catchUp()));
    editor.view.contentDOM.addEventListener("blur", () => this.save());
    addEventListener("beforeunload", (event) => {
      this.save();
      if (!documents.isSaved) event.preventDefault(); // the browser asks whether to leave
    });
  }

  /** The version that this window last read or wrote. @returns {TextDocument} */
  get document() {
    return this.#document;
  }

  /**
   * Save the open document and open another. A document without text is not kept.
   * @param {TextDocument} document
   */
  open(document) {
    this.save();
    if (!this.#document.text && document.id !== this.#document.id) this.#documents.remove(this.#document.id);
    this.#document = document;
    this.#load();
  }

  /** The text has changed: save it soon, when the browser is idle. */
  changed() {
    this.#isChanged = true;
    if (this.#isSaveScheduled) return;
    this.#isSaveScheduled = true;
    setTimeout(() => {
      const save = () => {
        this.#isSaveScheduled = false;
        this.save();
      };
      if ("requestIdleCallback" in globalThis) requestIdleCallback(save, { timeout: MAX_IDLE_WAIT_MS });
      else save(); // Safari
    }, SAVE_DELAY_MS);
  }

  /** Save the text, if it has changed, and the caret. */
  save() {
    const { text: value } = this.#editor;
    if (this.#isChanged && value === this.#document.text) this.#isChanged = false;
    if (this.#isChanged) {
      const stored = this.#documents.read(this.#document.id);
      if (stored && !contains(this.#document, stored) && stored.text !== value) this.#continueInCopy();
      else this.#write(changeText(this.#document, value));
    }
    if (!this.#document.text) return;
    const [start, end] = this.#editor.selection;
    const position = { start, end, scrollPx: Math.round(scrollY) };
    this.#documents.writePosition(this.#document.id, position);
  }

  /** Read the stored version, if it is newer: its events may have been missed. */
  #catchUp() {
    void this.#documents.refresh(this.#document.id);
  }

  /** Another window has written a version. @param {TextDocument} document */
  #receive(document) {
    if (document.id !== this.#document.id || contains(this.#document, document)) return;
    const isNewer = contains(document, this.#document);
    if (document.text === this.#editor.text || (isNewer && !this.#isChanged)) this.#follow(document);
    else this.#continueInCopy();
  }

  /** @param {TextDocument} document */
  #follow(document) {
    const { selection, text } = this.#editor;
    this.#document = document;
    if (document.text !== text) this.#editor.replace(document.text, moveOffsets(selection, text, document.text));
    this.#isChanged = false;
    this.#show();
  }

  /** The stored version remains as it is; this window's text becomes a document of its own. */
  #continueInCopy() {
    this.#write({ ...this.#document, ...createDocument(this.#editor.text), isCopy: true });
    this.#notify(`Another window changed this document too. Both versions are kept; this one is “${titleOf(this.#document)}”.`);
  }

  /** @param {TextDocument} document */
  #write(document) {
    this.#document = document;
    this.#isChanged = false;
    this.#documents.write(document);
    this.#documents.setCurrent(document.id);
    this.#show();
  }

  /** Show the document in the editor, with its caret where it was. */
  #load() {
    const { id, text } = this.#document;
    const position = this.#documents.readPosition(id);
    this.#editor.replace(text, [position?.start ?? text.length, position?.end ?? text.length]);
    this.#isChanged = false;
    this.#documents.setCurrent(id);
    this.#show();
    if (position) scrollTo({ top: position.scrollPx });
  }
}

/**
 * Offsets in a text that was changed in one place. An offset after the change, or at the end of the text, moves with what
 * follows it.
 * @param {[number, number]} offsets
 * @param {string} before
 * @param {string} after
 * @returns {[number, number]}
 */
function moveOffsets(offsets, before, after) {
  let numSame = 0; // characters at the end
  const maxSame = Math.min(before.length, after.length);
  while (numSame < maxSame && before.at(-1 - numSame) === after.at(-1 - numSame)) numSame += 1;
  const [start, end] = offsets.map((offset) =>
    before.length - offset <= numSame ? offset + after.length - before.length : offset,
  );
  return [start, end];
}
