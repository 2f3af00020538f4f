// A textarea with a mirror element behind it. The mirror has the same text, style and directions; it draws the ghost text,
// which a textarea cannot, and measures where the caret is. This module does not know the server, suggestions or keys.
//
// The mirror holds the paragraphs before the caret's, the caret's paragraph and the paragraphs after it in three
// elements. A key changes only the caret's paragraph, so the browser lays out only that one anew.

import { setText } from "./dom.js";
import { insertText } from "./textarea.js";

export class MirroredTextarea {
  #container;
  #above;
  #before;
  #ghost;
  #after;
  #below;

  /**
   * @param {HTMLElement} container  Parent of the textarea and the mirror, which overlap.
   * @param {HTMLTextAreaElement} textarea
   * @param {HTMLElement} mirror  Contains the elements `.above`, `.before`, `.ghost`, `.after` and `.below`.
   */
  constructor(container, textarea, mirror) {
    this.#container = container;
    this.textarea = textarea;
    const [above, before, ghost, after, below] = ["above", "before", "ghost", "after", "below"].map(
      (name) => /** @type {HTMLElement} */ (mirror.querySelector(`.${name}`)),
    );
    this.#above = above;
    this.#before = before;
    this.#ghost = ghost;
    this.#after = after;
    this.#below = below;
    // The first letter of a paragraph says whether it runs from right to left, in a textarea by itself.
    textarea.dir = mirror.dir = "auto";
    for (const block of mirror.children) /** @type {HTMLElement} */ (block).style.unicodeBidi = "plaintext";
  }

  /** Insert text at the caret in place of the characters before it, as one undo step. @param {string} text @param {number} numReplaced */
  insert(text, numReplaced) {
    insertText(this.textarea, text, numReplaced);
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
   * Copy the textarea's text to the mirror and show ghost text at the caret. Before text on the same line there is no
   * room for ghost text, so none is shown; before other paragraphs it is cut at the end of the line.
   * @param {string} ghostText  Empty: none.
   */
  render(ghostText) {
    const { value, selectionEnd } = this.textarea;
    const start = value.lastIndexOf("\n", selectionEnd - 1) + 1;
    const lineEnd = value.indexOf("\n", selectionEnd);
    const end = lineEnd < 0 ? value.length : lineEnd;
    const after = value.slice(selectionEnd, end);
    setText(this.#above, value.slice(0, start));
    setText(this.#before, value.slice(start, selectionEnd));
    setText(this.#ghost, after.trim() ? "" : ghostText);
    setText(this.#after, `${after}\u200b`); // an empty line has a height only if it contains a character
    setText(this.#below, lineEnd < 0 ? "" : `${value.slice(lineEnd + 1)}\u200b`);
    this.#ghost.classList.toggle("is-single-line", Boolean(value.slice(end).trim()));
  }

  /** Bottom of the ghost text, or else of the caret's line, in pixels from the container's top. @returns {number} */
  get caretBottom() {
    const ghost = /** @type {Text} */ (this.#ghost.firstChild);
    const after = /** @type {Text} */ (this.#after.firstChild);
    const range = document.createRange();
    range.setStart(ghost, Math.max(0, ghost.length - 1));
    if (ghost.length) range.setEnd(ghost, ghost.length);
    else range.setEnd(after, 1); // the character after the caret; at the end of the line, the zero-width space
    const last = Array.from(range.getClientRects()).at(-1) ?? this.#ghost.getBoundingClientRect();
    return last.bottom - this.#container.getBoundingClientRect().top;
  }
}
