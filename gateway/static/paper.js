// The surface to write on: a textarea, and behind it a mirror that draws what a textarea cannot, the ghost of a
// suggestion in its place, and knows where on the page the cursor is. Knows no server and no keys.

import { write } from "./dom.js";
import { insertText, textBefore } from "./textarea.js";

export class Paper {
  #before;
  #ghost;
  #after;
  #place;

  /**
   * @param {HTMLElement} place  Holds the two.
   * @param {HTMLTextAreaElement} textarea
   * @param {HTMLElement} mirror
   */
  constructor(place, textarea, mirror) {
    this.#place = place;
    this.textarea = textarea;
    this.#before = /** @type {HTMLElement} */ (mirror.querySelector(".before"));
    this.#ghost = /** @type {HTMLElement} */ (mirror.querySelector(".ghost"));
    this.#after = /** @type {HTMLElement} */ (mirror.querySelector(".after"));
  }

  /** What stands before the cursor. */
  get context() {
    return textBefore(this.textarea);
  }

  /** @param {string} text */
  insert(text) {
    insertText(this.textarea, text);
  }

  /** Take all out; undo brings it back. */
  clear() {
    this.textarea.select();
    if (this.textarea.value && !document.execCommand("delete")) this.replace("");
    this.textarea.focus();
  }

  /** @param {string} text  Instead of all there is, and without undo: it was written elsewhere. */
  replace(text) {
    this.textarea.value = text;
    this.textarea.dispatchEvent(new InputEvent("input", { bubbles: true, inputType: "" }));
  }

  /** @param {string} ghost  To be seen at the cursor, but not there. */
  draw(ghost) {
    const { value, selectionEnd } = this.textarea;
    const after = value.slice(selectionEnd);
    write(this.#before, value.slice(0, selectionEnd));
    write(this.#ghost, ghost);
    write(this.#after, `${after}\u200b`); // so that an empty last line is a line
    // Text after the cursor makes room for the ghost: then the mirror shows all of it, in the textarea's place.
    this.#place.classList.toggle("is-parted", Boolean(ghost && after.trim()));
  }

  /** Where the ghost ends, or the cursor is, in pixels from the paper's top. */
  get cursorBottom() {
    const ghost = /** @type {Text} */ (this.#ghost.firstChild);
    const after = /** @type {Text} */ (this.#after.firstChild);
    const range = document.createRange();
    range.setStart(ghost, Math.max(0, ghost.length - 1));
    if (ghost.length) range.setEnd(ghost, ghost.length);
    else range.setEnd(after, 1); // what stands behind the cursor, if only the mark that ends the text
    const last = Array.from(range.getClientRects()).at(-1) ?? this.#ghost.getBoundingClientRect();
    return last.bottom - this.#place.getBoundingClientRect().top;
  }
}
