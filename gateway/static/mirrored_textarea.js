// A textarea with a mirror element behind it. The mirror has the same text and style; it draws the ghost text, which a
// textarea cannot, and measures where the caret is. This module does not know the server, suggestions or keys.

import { setText } from "./dom.js";
import { insertText, textBefore } from "./textarea.js";

export class MirroredTextarea {
  #container;
  #before;
  #ghost;
  #after;

  /**
   * @param {HTMLElement} container  Parent of the textarea and the mirror, which overlap.
   * @param {HTMLTextAreaElement} textarea
   * @param {HTMLElement} mirror  Contains the elements `.before`, `.ghost` and `.after`.
   */
  constructor(container, textarea, mirror) {
    this.#container = container;
    this.textarea = textarea;
    this.#before = /** @type {HTMLElement} */ (mirror.querySelector(".before"));
    this.#ghost = /** @type {HTMLElement} */ (mirror.querySelector(".ghost"));
    this.#after = /** @type {HTMLElement} */ (mirror.querySelector(".after"));
  }

  /** All text before the caret. @returns {string} */
  get context() {
    return textBefore(this.textarea);
  }

  /** Insert text at the caret, as one undo step. @param {string} text */
  insert(text) {
    insertText(this.textarea, text);
  }

  /** Delete all text, as one undo step, and focus the textarea. */
  clear() {
    this.textarea.select();
    if (this.textarea.value && !document.execCommand("delete")) this.replace("");
    this.textarea.focus();
  }

  /**
   * Replace all text without an undo step, because the change was made in another window. Dispatches an `input` event
   * with an empty `inputType`.
   * @param {string} text
   */
  replace(text) {
    this.textarea.value = text;
    this.textarea.dispatchEvent(new InputEvent("input", { bubbles: true, inputType: "" }));
  }

  /**
   * Copy the textarea's text to the mirror and show ghost text at the caret.
   * @param {string} ghostText  Empty: none.
   */
  render(ghostText) {
    const { value, selectionEnd } = this.textarea;
    const after = value.slice(selectionEnd);
    setText(this.#before, value.slice(0, selectionEnd));
    setText(this.#ghost, ghostText);
    setText(this.#after, `${after}\u200b`); // an empty last line has a height only if it contains a character
    // Ghost text in the middle of the document moves the text after it. A textarea cannot do that, so the mirror shows
    // all of the text and the textarea's own becomes transparent.
    this.#container.classList.toggle("shows-mirror", Boolean(ghostText && after.trim()));
  }

  /** Bottom of the ghost text, or else of the caret's line, in pixels from the container's top. @returns {number} */
  get caretBottom() {
    const ghost = /** @type {Text} */ (this.#ghost.firstChild);
    const after = /** @type {Text} */ (this.#after.firstChild);
    const range = document.createRange();
    range.setStart(ghost, Math.max(0, ghost.length - 1));
    if (ghost.length) range.setEnd(ghost, ghost.length);
    else range.setEnd(after, 1); // the character after the caret; at the end of the text, the zero-width space
    const last = Array.from(range.getClientRects()).at(-1) ?? this.#ghost.getBoundingClientRect();
    return last.bottom - this.#container.getBoundingClientRect().top;
  }
}
