// The suggestions on show: which candidate has which place, and which of them the writer chose. Suggestions that still
// agree with the document keep their order, and move up when one before them leaves. Pure state: it does not know
// requests, timers or the editor.

import { firstWord, firstWordKey } from "./text.js";

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

/** A fragment of one or two words that was visible for this long is left standing; an idea may take its place. */
const MAX_FRAGMENT_MS = 1000;

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
      const word = isUnasked ? firstWordKey(this.rest(candidate)) : candidate;
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

  /** Show a candidate in the first place, unless it is on show. @param {Candidate} candidate */
  show(candidate) {
    if (!this.#all.includes(candidate)) this.#all = [candidate, ...this.#all];
  }

  /**
   * Fill the free places at the end. A candidate that begins with the same word as an earlier one is left out.
   * @param {Candidate[]} candidates  Best first.
   * @param {number} maxSuggestions
   */
  merge(candidates, maxSuggestions) {
    this.#all = this.#distinct([...this.#all, ...candidates]).slice(0, maxSuggestions);
  }

  /**
   * Show an idea in the place of the ghost text, or as the first of all if there is none: the first candidate that continues
   * it; or, if it is a fragment that the writer has left standing, any, and the fragment moves to the list. What was held
   * back follows, as single words: a writer who stands still can read them, and their first words are right more often
   * than what follows them.
   * @param {Candidate[]} candidates  Best first.
   * @param {number} maxSuggestions
   * @param {boolean} isTaken  The writer began to take the ghost text.
   */
  addIdea(candidates, maxSuggestions, isTaken) {
    const { chosen, candidates: shown } = this;
    if (this.#choice) return; // the writer chose one meanwhile
    const start = chosen ? this.rest(chosen) : "";
    const mayReplace = !chosen || (!isTaken && this.#isFragmentLeft(chosen));
    const idea = candidates.find((candidate) => this.rest(candidate).startsWith(start) && this.rest(candidate))
      ?? (mayReplace ? candidates.find((candidate) => !this.#isFragment(candidate)) : undefined);
    const kept = this.#distinct(idea ? [idea, ...shown] : shown);
    for (const candidate of this.#distinct([...kept, ...this.#all])) {
      if (candidate === idea || shown.includes(candidate)) continue;
      const rest = this.rest(candidate);
      candidate.text = candidate.text.slice(0, candidate.text.length - rest.length) + firstWord(rest);
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

  /**
   * The candidates without those that only begin or continue one before them, or begin with the same word.
   * @param {Candidate[]} candidates
   */
  #distinct(candidates) {
    /** @type {Map<string, Candidate>} */
    const byRest = new Map();
    for (const candidate of candidates) {
      const rest = this.rest(candidate);
      const isSaid = Array.from(byRest.keys()).some((said) =>
        said.startsWith(rest) || rest.startsWith(said) || firstWordKey(said) === firstWordKey(rest));
      if (rest && !isSaid) byRest.set(rest, candidate);
    }
    return Array.from(byRest.values());
  }

  /** Whether a candidate is at most two words. @param {Candidate} candidate */
  #isFragment(candidate) {
    const rest = this.rest(candidate);
    return firstWord(rest.slice(firstWord(rest).length)).length >= rest.trimEnd().length - firstWord(rest).length;
  }

  /** Whether it is a predicted fragment that the writer has left standing. @param {Candidate} candidate */
  #isFragmentLeft(candidate) {
    const { session, shownAtMs } = candidate;
    const visibleMs = performance.now() - (shownAtMs ?? Infinity);
    return !session.isIdea && !session.isExplicit && visibleMs >= MAX_FRAGMENT_MS && this.#isFragment(candidate);
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
