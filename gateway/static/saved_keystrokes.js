// The number of keystrokes that suggestions have saved: counted up by an insertion, down when it is undone. It does not
// know suggestions or the server.

import { load, save } from "./store.js";

const ITEM = "saved";

/**
 * @typedef {object} Insertion
 * @property {number} numSaved
 * @property {number} caretBefore
 * @property {number} lengthBefore  Length of the text before and after the insertion, in UTF-16 code units.
 * @property {number} lengthAfter
 */

export class SavedKeystrokes {
  #textarea;
  #show;
  /** Insertions that undo would remove, the last one last. @type {Insertion[]} */
  #inserted = [];
  /** Insertions that redo would restore, the next one last. @type {Insertion[]} */
  #undone = [];
  #lengthBefore = 0;

  /**
   * @param {HTMLTextAreaElement} textarea
   * @param {(number: number) => void} show  Called with the number at once, and after each change.
   */
  constructor(textarea, show) {
    this.#textarea = textarea;
    this.#show = show;
    show(this.#total);
    textarea.addEventListener("beforeinput", ({ inputType }) => {
      if (inputType.startsWith("history")) this.#lengthBefore = textarea.textLength;
    });
    textarea.addEventListener("input", (event) => this.#followHistory(/** @type {InputEvent} */ (event).inputType));
  }

  /**
   * Count an insertion.
   * @param {() => void} insert  Inserts text at the caret, as one undo step.
   * @param {number} numSaved  Keystrokes that it saves.
   */
  record(insert, numSaved) {
    const { selectionEnd: caretBefore, textLength: lengthBefore } = this.#textarea;
    insert();
    this.#inserted.push({ numSaved, caretBefore, lengthBefore, lengthAfter: this.#textarea.textLength });
    this.#undone = [];
    this.#add(numSaved);
  }

  /** @param {string} inputType  Of an `input` event. */
  #followHistory(inputType) {
    const { selectionEnd, textLength } = this.#textarea;
    const [inserted, undone] = [this.#inserted.at(-1), this.#undone.at(-1)];
    if (inputType === "historyUndo") {
      const isRemoved = inserted && this.#lengthBefore === inserted.lengthAfter
        && textLength === inserted.lengthBefore && selectionEnd === inserted.caretBefore;
      if (isRemoved) this.#move(inserted, this.#inserted, this.#undone, -1);
    } else if (inputType === "historyRedo") {
      const isRestored = undone && this.#lengthBefore === undone.lengthBefore && textLength === undone.lengthAfter;
      if (isRestored) this.#move(undone, this.#undone, this.#inserted, 1);
    } else {
      this.#undone = [];
      if (!inputType) this.#inserted = []; // another document
    }
  }

  /** @param {Insertion} insertion  @param {Insertion[]} from  @param {Insertion[]} to  @param {1|-1} sign */
  #move(insertion, from, to, sign) {
    from.pop();
    to.push(insertion);
    this.#add(sign * insertion.numSaved);
  }

  /** The stored number, which other windows change too. */
  get #total() {
    return Number(load(ITEM)) || 0;
  }

  /** @param {number} number */
  #add(number) {
    const total = Math.max(0, this.#total + number);
    save(ITEM, total);
    this.#show(total);
  }
}
