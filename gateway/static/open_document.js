// The document in the textarea: loads, saves and restores it, and follows the changes of other windows. It does not
// know the list of documents, nor what the page shows of them.
//
// No version is ever overwritten by a window that has not seen it. If two windows change a document at the same time,
// one of them continues in a copy.

import { changeText, contains, createDocument, mergeVersions, titleOf } from "./documents.js";

/** @typedef {import("./documents.js").TextDocument} TextDocument */
/** @typedef {import("./documents.js").Documents} Documents */

/** A change is saved within about this time, also while the writer keeps typing. A crash loses no more. */
const SAVE_DELAY_MS = 400;
const MAX_IDLE_WAIT_MS = 600;

export class OpenDocument {
  #documents;
  #textarea;
  #replaceText;
  #show;
  #notify;
  /** @type {TextDocument} */
  #document = createDocument("");
  /** Whether the textarea may differ from it. */
  #isChanged = false;
  #isSaveScheduled = false;
  #isReplacing = false;

  /**
   * @param {object} options
   * @param {Documents} options.documents
   * @param {HTMLTextAreaElement} options.textarea
   * @param {(text: string) => void} options.replaceText  Replaces the textarea's text. May call `changed`.
   * @param {() => void} options.show  Called after another document was opened, and after each save.
   * @param {(message: string) => void} options.notify  Shows a message to the writer.
   */
  constructor({ documents, textarea, replaceText, show, notify }) {
    this.#documents = documents;
    this.#textarea = textarea;
    this.#replaceText = replaceText;
    this.#show = show;
    this.#notify = notify;
    documents.watch((document) => this.#receive(document));
    addEventListener("pagehide", () => this.save());
    // A window in the background may have been suspended while another one wrote.
    addEventListener("focus", () => this.#catchUp());
    document.addEventListener("visibilitychange", () => (document.hidden ? this.save() : this.#catchUp()));
    textarea.addEventListener("blur", () => this.#isReplacing || this.save());
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

  /**
   * Replace the whole text, and forget the undo steps of the previous one: applied to another text, they would garble it.
   * @param {string} text
   */
  replaceText(text) {
    const textarea = this.#textarea;
    const isFocused = document.activeElement === textarea;
    const { parentNode, nextSibling } = textarea;
    this.#isReplacing = true; // the textarea loses the focus, with the caret of the previous text
    textarea.remove(); // browsers keep the undo steps of an element until it is removed
    parentNode?.insertBefore(textarea, nextSibling);
    this.#isReplacing = false;
    this.#replaceText(text);
    if (isFocused) textarea.focus();
  }

  /** Save the text, if it has changed, and the caret. */
  save() {
    const { selectionStart, selectionEnd, value } = this.#textarea;
    if (this.#isChanged && value === this.#document.text) this.#isChanged = false;
    if (this.#isChanged) {
      const stored = this.#documents.read(this.#document.id);
      if (stored && !contains(this.#document, stored) && stored.text !== value) this.#continueInCopy();
      else this.#write(changeText(this.#document, value));
    }
    if (!this.#document.text) return;
    const position = { start: selectionStart, end: selectionEnd, scrollPx: Math.round(scrollY) };
    this.#documents.writePosition(this.#document.id, position);
  }

  /** Read the stored version, if it is newer: its events may have been missed. */
  #catchUp() {
    const stored = this.#documents.read(this.#document.id);
    if (stored) this.#receive(stored);
  }

  /** Another window has written a version. @param {TextDocument} document */
  #receive(document) {
    if (document.id !== this.#document.id || contains(this.#document, document)) return;
    const isNewer = contains(document, this.#document);
    if (document.text === this.#textarea.value || (isNewer && !this.#isChanged)) this.#follow(document);
    else if (isNewer || this.#document.changedMs <= document.changedMs) this.#continueInCopy();
    else {
      // Both wrote before they saw the other's version. The other window decides likewise, and continues in a copy.
      this.#write(changeText(mergeVersions(this.#document, document), this.#textarea.value));
    }
  }

  /** @param {TextDocument} document */
  #follow(document) {
    const { selectionStart, selectionEnd, value } = this.#textarea;
    this.#document = document;
    if (document.text !== value) {
      this.replaceText(document.text);
      const [start, end] = moveOffsets([selectionStart, selectionEnd], value, document.text);
      this.#textarea.setSelectionRange(start, end);
    }
    this.#isChanged = false;
    this.#show();
  }

  /** The stored version remains as it is; this window's text becomes a document of its own. */
  #continueInCopy() {
    this.#write({ ...createDocument(this.#textarea.value), isCopy: true });
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

  /** Show the document in the textarea, with its caret where it was. */
  #load() {
    const { id, text } = this.#document;
    const position = this.#documents.readPosition(id);
    this.replaceText(text);
    this.#textarea.setSelectionRange(position?.start ?? text.length, position?.end ?? text.length);
    this.#isChanged = false;
    this.#documents.setCurrent(id);
    this.#show();
    if (position) scrollTo({ top: position.scrollPx });
  }
}

/**
 * Offsets in a text that was changed in one place. An offset after the change, or at the end of the text, moves with what
 * follows it.
 * @param {number[]} offsets
 * @param {string} before
 * @param {string} after
 * @returns {number[]}
 */
function moveOffsets(offsets, before, after) {
  let numSame = 0; // characters at the end
  const maxSame = Math.min(before.length, after.length);
  while (numSame < maxSame && before.at(-1 - numSame) === after.at(-1 - numSame)) numSame += 1;
  return offsets.map((offset) => (before.length - offset <= numSame ? offset + after.length - before.length : offset));
}
