// Whose a key is: the suggestions', the editor's, or that of another list in it. It does not know what an action does.

import { ACTIONS, chordOf } from "./keys.js";

/** @typedef {import("./keys.js").Action} Action */

/** What plain keys do in a list. @type {Record<string, Action>} */
const LIST_KEYS = { Enter: "accept", ArrowDown: "next", ArrowUp: "previous", ArrowRight: "acceptWord" };

/** Keys that move the choice of a list. */
const MOVES_CHOICE = /^(?:Arrow|Page)(?:Up|Down)$/;

export class KeyHandler {
  /** The next Tab belongs to the editor, to leave the field. */
  isTabFree = false;
  /** The last chord, if it was handled. It may be held down. */
  #heldChord = "";
  /** The last key that moves a choice and was left to the editor, while the text is the same. @type {KeyboardEvent|null} */
  #passedKey = null;
  #suggestions;

  /**
   * @param {object} suggestions
   * @param {() => import("./keys.js").Keys} suggestions.keys
   * @param {() => boolean} suggestions.isListUsed  Plain keys are those of the list.
   * @param {() => boolean} suggestions.isOtherListUsed  As the option of `Completer`.
   * @param {(action: Action|undefined, isPlain: boolean) => (() => void)|null} suggestions.performer  Null: there is
   *   nothing for this action. `isPlain`: the key has no modifier.
   */
  constructor(suggestions) {
    this.#suggestions = suggestions;
  }

  /** The text or the caret has changed, or suggestions were requested. */
  forget() {
    this.#passedKey = null;
  }

  /**
   * Handle a `keydown` event (`Completer.press`).
   * @param {KeyboardEvent} event
   * @param {boolean} isOutdated  What was shown belonged to another text.
   * @returns {boolean}  True if the key was handled.
   */
  press(event, isOutdated) {
    if (event.ctrlKey && (event.key === "n" || event.key === "p")) this.#passedKey = event; // as the arrows, on a Mac
    if (event.getModifierState?.("AltGraph")) return false;
    const { isListUsed, isOtherListUsed, keys, performer } = this.#suggestions;
    const chord = chordOf(event);
    const known = keys();
    const isPlain = !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey;
    const action = ACTIONS.find((each) => known[each].includes(chord)) ?? (isListUsed() ? LIST_KEYS[chord] : undefined);
    if (!action && !isPlain && !event.altKey) return false;
    const { isTabFree } = this;
    this.isTabFree = false;
    if (chord === "Tab" && isTabFree) return false;
    const isChoosing = action === "next" || action === "previous" || MOVES_CHOICE.test(chord);
    if (event.repeat && chord === this.#heldChord && !isChoosing) {
      event.preventDefault();
      return true;
    }
    const isOtherLists = isPlain && (this.#passedKey?.defaultPrevented || isOtherListUsed());
    const perform = isOtherLists ? null : performer(action, isPlain);
    if (!perform) {
      if (isOtherLists ? ["Tab", "Enter", "Escape"].includes(event.key) : MOVES_CHOICE.test(event.key)) {
        this.#passedKey = isOtherLists ? null : event;
      }
      this.isTabFree = chord === "Escape" && !isOtherLists && !isOutdated;
      this.#heldChord = "";
      return false;
    }
    this.#heldChord = chord;
    event.preventDefault();
    if (!event.repeat || isChoosing) perform();
    return true;
  }
}
