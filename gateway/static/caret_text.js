// The text around the caret: as the editor has it, and as it was when suggestions were last requested or shown for it. It
// does not know suggestions or keys.

import { isSameText } from "./text.js";

/** @typedef {import("./text.js").TextBefore} TextBefore */

export class CaretText {
  #editor;
  /** When it was last remembered. @type {TextBefore} */
  last = { end: 0, text: "" };
  /** The rest of the caret's line then. */
  #lastLine = "";

  /**
   * @param {{context: () => string, position?: () => number, after: () => string, isEditable: () => boolean}} editor  As the
   *   options of `Completer`.
   */
  constructor(editor) {
    this.#editor = editor;
  }

  /** @returns {TextBefore} */
  get before() {
    const text = this.#editor.context();
    return { end: this.#editor.position?.() ?? text.length, text };
  }

  /** The text after the caret, at least to the end of its line. */
  get after() {
    return this.#editor.after();
  }

  /** The rest of the caret's line. */
  get line() {
    return this.after.split("\n", 1)[0] ?? "";
  }

  /** What is shown or requested from now on belongs to the present text. */
  remember() {
    this.last = this.before;
    this.#lastLine = this.line;
  }

  /** Whether the rest of the caret's line is the remembered one: what is shown was to fit before it. */
  get isLineSame() {
    return this.#lastLine === this.line;
  }

  /** Whether the writer can change the text at present. */
  get isEditable() {
    return this.#editor.isEditable();
  }

  /** Whether it is the remembered one, and may be changed. A program can change it without an event. */
  get isSame() {
    return this.isEditable && isSameText(this.before, this.last) && this.isLineSame;
  }
}
