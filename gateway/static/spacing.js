// The space and the comma that come with an accepted text, and what takes their place when the writer types on. It does not
// know suggestions or keys.

import { hasTextAfter, isSameText, replacesSpace } from "./text.js";

/** A text that ends with white space, or in a script that puts no spaces between words. */
const ENDS_WITHOUT_SPACE = /(?:\s|[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}])$/u;

/** A dash takes the place of the space that came with a word, until another space is typed: word – word, word—word. */
const DASH = /^\p{Pd}$/u;

/** A comma at the end of an accepted text, with the space that may have come with it. */
const COMMA = /[,،，、] ?$/;

/** A mark that ends a clause takes the place of an accepted comma; another comma is the same. */
const REPLACES_COMMA = /^[.!?…;:؟؛。！？；：]/;

export class Spacing {
  /** The text before the caret, if its last space or comma was accepted, or a dash took its place. @type {import("./text.js").TextBefore|null} */
  #before = null;
  #text;
  #insert;

  /**
   * @param {import("./caret_text.js").CaretText} text
   * @param {(text: string, numReplaced: number) => void} insert  As the option of `Completer`.
   */
  constructor(text, insert) {
    this.#text = text;
    this.#insert = insert;
  }

  /** Handle a text that is about to be typed (`Completer.type`). @param {string} text  @returns {boolean} */
  type(text) {
    const { before } = this.#text;
    if (!this.#before || !isSameText(this.#before, before)) return false;
    const [comma = ""] = before.text.match(COMMA) ?? [];
    if (comma && text === comma.trim()) return true;
    this.#before = null;
    if (comma && REPLACES_COMMA.test(text)) return this.#insert(text, comma.length), true;
    const last = before.text.slice(-1);
    if (last === comma) return false; // no space came with it
    if (DASH.test(last)) {
      if (text === " ") this.#insert(` ${last} `, 1);
      return text === " ";
    }
    if (text === " ") return true;
    if (!replacesSpace(before.text, text)) return false;
    this.#insert(text, 1);
    if (DASH.test(text)) this.#before = this.#text.before;
    return true;
  }

  /** Whether a whole suggestion needs a space after it. @param {string} text */
  isNeededAfter(text) {
    return !ENDS_WITHOUT_SPACE.test(text) && !this.isFollowedAfter(text);
  }

  /** Whether what is on the line after the caret follows a word without a space. @param {string} word  Accepted. */
  isFollowedAfter(word) {
    const { before, line } = this.#text;
    return line !== "" && (!hasTextAfter(line) || replacesSpace(before.text + word, line));
  }

  /** Insert an accepted text. @param {string} text  @param {boolean} hasSpace  A space comes with it. @param {number} [numReplaced] */
  insert(text, hasSpace, numReplaced = 0) {
    this.#insert(hasSpace ? `${text} ` : text, numReplaced);
    if (hasSpace || COMMA.test(text)) this.#before = this.#text.before;
  }
}
