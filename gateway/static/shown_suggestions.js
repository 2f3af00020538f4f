// The suggestions on show: which candidate has which place, and which of them the writer chose. Suggestions that still
// agree with the document keep their order, and move up when one before them leaves. Pure state: it does not know
// requests, timers or the editor.

import { firstWord } from "./text.js";

/** @typedef {import("./suggestion_session.js").Candidate} Candidate */
/** @typedef {import("./client.js").Sentence} Sentence */
/** @typedef {import("./text.js").TextBefore} TextBefore */

/**
 * @typedef {object} Suggestion  One suggestion, as an editor shows it.
 * @property {number} place  0, 1 or 2: identifies the suggestion, and selects the key that accepts it.
 * @property {string} text  All text received so far.
 * @property {string} rest  The part of `text` that the document does not contain yet.
 * @property {boolean} isFinished  The whole sentence has arrived.
 * @property {Sentence|null} sentence  Null until finished.
 */

export class ShownSuggestions {
  /** The candidates that agree with the document; those on show come first, in display order. @type {Candidate[]} */
  #all = [];
  /** @type {Candidate|null} */
  #choice = null;
  /** @type {TextBefore} */
  #before = { end: 0, text: "" };

  /**
   * Predictions are held back until their usefulness, in keystrokes, and the number of their characters that the writer
   * has typed reach this together. Those requested by the writer or after an acceptance are not.
   */
  minUsefulness = 0;

  /** The candidates on show, in display order. Unasked, no two begin with the same word. @returns {Candidate[]} */
  get candidates() {
    const words = new Set();
    return this.#all.filter((candidate) => {
      const { isExplicit, isIdea, request } = candidate.session;
      const isUnasked = !isExplicit && (isIdea || request.strategy === "predict");
      const word = isUnasked ? bareWord(this.rest(candidate)) : candidate;
      return this.#isWorthShowing(candidate) && !words.has(word) && words.add(word);
    });
  }

  /** The candidate whose rest is ghost text: the writer's choice, or the one of the first place. @returns {Candidate|null} */
  get chosen() {
    return this.#choice ?? this.candidates[0] ?? null;
  }

  /** Whether the writer chose one. */
  get isChosenByUser() {
    return this.#choice !== null;
  }

  /** @returns {Suggestion[]} */
  get suggestions() {
    return this.candidates.map((candidate, place) => this.#describe(candidate, place));
  }

  /** @param {number} place @returns {Candidate|null} */
  at(place) {
    return this.candidates[place] ?? null;
  }

  /** @param {Candidate} candidate @returns {string}  What the document does not contain of it. */
  rest(candidate) {
    return candidate.rest(this.#before) ?? "";
  }

  /**
   * The document has changed: what does not agree with it leaves.
   * @param {TextBefore} before
   */
  follow(before) {
    const shown = this.candidates;
    this.#before = before;
    this.replace([...shown, ...this.#all.filter((candidate) => !shown.includes(candidate))]);
  }

  /**
   * Show these candidates, in this order.
   * @param {Candidate[]} candidates
   */
  replace(candidates) {
    this.#all = candidates.filter((candidate) => this.rest(candidate));
    if (this.#choice && !this.#all.includes(this.#choice)) this.#choice = null;
  }

  /**
   * Fill the free places at the end. A candidate that only says what one on show says, or begins or continues it, is left out.
   * @param {Candidate[]} candidates  Best first.
   * @param {number} maxSuggestions
   */
  merge(candidates, maxSuggestions) {
    const rests = this.#all.map((candidate) => this.rest(candidate));
    const added = candidates.filter((candidate) => {
      const rest = this.rest(candidate);
      return rest && !rests.some((kept) => kept.startsWith(rest) || rest.startsWith(kept));
    });
    this.#all = [...this.#all, ...added].slice(0, maxSuggestions);
  }

  /**
   * Show an idea: the first candidate that continues what is ghost text, in its place, or the first of all if there is none.
   * What was held back follows, as single words: a writer who stands still can read them, and their first words are right
   * more often than what follows them.
   * @param {Candidate[]} candidates  Best first.
   * @param {number} maxSuggestions
   */
  addIdea(candidates, maxSuggestions) {
    const { chosen, candidates: shown } = this;
    if (this.#choice) return; // the writer chose one meanwhile
    const isLonger = (/** @type {string} */ rest) => rest && (!chosen || rest.startsWith(this.rest(chosen)));
    const idea = candidates.find((candidate) => isLonger(this.rest(candidate)));
    const kept = idea ? [idea, ...shown.filter((candidate) => candidate !== chosen)] : shown;
    const words = new Set(kept.map((candidate) => bareWord(this.rest(candidate))));
    for (const candidate of this.#all.filter((each) => !shown.includes(each))) {
      const rest = this.rest(candidate);
      const word = firstWord(rest);
      if (words.has(bareWord(rest))) continue;
      words.add(bareWord(rest));
      candidate.text = candidate.text.slice(0, candidate.text.length - rest.length) + word;
      candidate.isHeldBack = false;
      kept.push(candidate);
    }
    this.#all = kept.slice(0, maxSuggestions);
  }

  /** Choose the next candidate or the previous. @param {number} step  1: the next; −1: the previous; wraps around. */
  choose(step) {
    const { candidates, chosen } = this;
    const index = chosen ? candidates.indexOf(chosen) : -1;
    this.#choice = candidates[(index + step + candidates.length) % candidates.length] ?? null;
  }

  clear() {
    this.#all = [];
    this.#choice = null;
  }

  /** @param {Candidate} candidate */
  #isWorthShowing({ sentence, session, isHeldBack }) {
    if (!isHeldBack || session.isAfterAcceptance || session.isExplicit || session.isIdea) return true;
    const numTyped = this.#before.end - session.before.end;
    return (sentence?.usefulness ?? Infinity) + numTyped >= this.minUsefulness;
  }

  /** @param {Candidate} candidate @param {number} place @returns {Suggestion} */
  #describe(candidate, place) {
    const { text, sentence } = candidate;
    return { place, text, rest: this.rest(candidate), isFinished: sentence !== null, sentence };
  }
}

/** The first word of a text, without punctuation; what has no letters, as it is. @param {string} text */
function bareWord(text) {
  const word = firstWord(text).trim();
  return word.replace(/[^\p{L}\p{M}\p{N}]/gu, "") || word;
}
