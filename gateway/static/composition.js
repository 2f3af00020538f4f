// Compositions of input methods: whether what is being composed stands as it is shown, or will be replaced by other letters.
// It does not know suggestions.

/**
 * The word before the caret has a letter of a script that an input method converts, wide Latin letters included. Such a
 * composition is converted again and again before it stands.
 */
const ENDS_CONVERTED =
  /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}\p{sc=Bopomofo}\u3001-\u303F\u30FC\uFF01-\uFF9F]\S*$/u;

/** Of the text before the caret, enough to hold its last word. */
const MAX_WORD_CHARS = 100;

/**
 * Whether a `keydown` event belongs to an input method: it composes, or just ended a composition with this key. Safari
 * ends the composition before the event; only the key code is the input method's then.
 * @param {KeyboardEvent} event
 */
export function isInputMethods({ isComposing, keyCode }) {
  return isComposing || keyCode === 229;
}

/** @param {string} text */
function endsConverted(text) {
  return ENDS_CONVERTED.test(text.slice(-MAX_WORD_CHARS));
}

export class Composition {
  #isOpen = false;
  /** The last one that ended was converted, for example from Latin letters to Han. */
  #convertsLetters = false;
  /** The input method's last key is one of a keyboard; the keys of a touch screen have no place on one. */
  #isByKeyboard = false;

  /** The input method has a key. @param {KeyboardEvent} event */
  press({ code, key }) {
    this.#isByKeyboard = key === "Process" || !["", "Unidentified"].includes(code);
  }

  /**
   * The text has changed.
   * @param {boolean} isOpen  By a composition, which goes on.
   * @param {string} text  Before the caret.
   * @param {string} previous  The text before it changed.
   * @returns {boolean}  Whether it was being composed then, and stood as it was shown.
   */
  change(isOpen, text, previous) {
    const stood = this.#isOpen && !this.willBeConverted(previous);
    if (this.#isOpen && !isOpen) {
      this.#convertsLetters = endsConverted(text);
      this.#isByKeyboard = false;
    }
    this.#isOpen = isOpen;
    return stood;
  }

  /**
   * Whether what is being composed will be replaced by other letters. Touch keyboards compose every word letter by
   * letter, and it stands as it is shown. Input methods of Chinese, Japanese and Korean show their own scripts, or Latin
   * letters that a keyboard types, or that they have converted before.
   * @param {string} text  Text before the caret.
   */
  willBeConverted(text) {
    return this.#isByKeyboard || this.#convertsLetters || endsConverted(text);
  }
}
