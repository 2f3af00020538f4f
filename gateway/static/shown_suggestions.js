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
 * @property {string} rest  The part of `text` that the document does not contain yet; empty if it is a correction.
 * @property {boolean} isCorrection  `text` replaces a misspelled word before the caret.
 * @property {boolean} isFinished  The whole sentence has arrived.
 * @property {Sentence|null} sentence  Null until finished.
 */

/** A fragment of one or two words that was visible for this long is left standing; an idea may take its place. */
const MAX_FRAGMENT_MS = 1000;

/**
 * A suggestion can be accepted only after it has been visible for this long: an earlier key was pressed before the
 * writer could have read it.
 */
const MIN_VISIBLE_MS = 200;

/** Whether the writer can have read it. @param {Candidate} candidate */
export function isReadable({ shownAtMs }) {
  return shownAtMs !== null && performance.now() - shownAtMs >= MIN_VISIBLE_MS;
}

export class ShownSuggestions {
  /** Those that agree with the document. @type {Candidate[]} */
  #candidates = [];
  /** @type {Candidate|null} */
  #choice = null;
  /** @type {TextBefore} */
  #before = { end: 0, text: "" };
  /** The suggestion shown as ghost text. @type {Candidate|null} */
  #ghost = null;
  /** The suggestion that was ghost text until another took its place. @type {{candidate: Candidate, untilMs: number}|null} */
  #previous = null;

  /** In display order. @returns {Candidate[]} */
  get candidates() {
    return this.#candidates;
  }

  /** The candidate whose rest is ghost text: the writer's choice, or the one of the first place. @returns {Candidate|null} */
  get chosen() {
    return this.#choice ?? this.candidates[0] ?? null;
  }

  /** Whether the writer chose one. */
  get isChosenByUser() {
    return this.#choice !== null;
  }

  /**
   * What Tab accepts: the ghost text; or, if it has just changed, what stood there before, if it still agrees with the text.
   * @returns {Candidate|null}
   */
  get readable() {
    const { chosen } = this;
    if (chosen && isReadable(chosen)) return chosen;
    const previous = this.#previous;
    const wasJustThere = previous && performance.now() - previous.untilMs < MIN_VISIBLE_MS;
    return wasJustThere && this.rest(previous.candidate) ? previous.candidate : chosen;
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
    this.#before = before;
    this.replace(this.#candidates);
  }

  /**
   * Show these candidates, in this order.
   * @param {Candidate[]} candidates
   */
  replace(candidates) {
    this.#candidates = candidates.filter((candidate) => this.rest(candidate));
    if (this.#choice && !this.#candidates.includes(this.#choice)) this.#choice = null;
  }

  /** Show a candidate in the first place, unless it is on show. @param {Candidate} candidate */
  show(candidate) {
    if (!this.#candidates.includes(candidate)) this.#candidates = [candidate, ...this.#candidates];
  }

  /**
   * Fill the free places at the end. A candidate that begins with the same word as an earlier one is left out.
   * @param {Candidate[]} candidates  Best first.
   * @param {number} maxSuggestions
   */
  merge(candidates, maxSuggestions) {
    this.#candidates = this.#distinct([...this.#candidates, ...candidates]).slice(0, maxSuggestions);
  }

  /**
   * Show an idea in the place of the ghost text, or as the first of all if there is none: the first candidate that continues
   * it; or, if it is a fragment that the writer has left standing, any, and the fragment moves to the list. The other
   * ideas follow.
   * @param {Candidate[]} candidates  Best first.
   * @param {number} maxSuggestions
   * @param {boolean} isTaken  The writer began to take the ghost text.
   */
  addIdea(candidates, maxSuggestions, isTaken) {
    const { chosen } = this;
    if (this.#choice) return; // the writer chose one meanwhile
    const start = chosen ? this.rest(chosen) : "";
    const mayReplace = !chosen || (!isTaken && this.#isFragmentLeft(chosen));
    const idea = candidates.find((candidate) => this.rest(candidate).startsWith(start) && this.rest(candidate))
      ?? (mayReplace ? candidates.find((candidate) => !this.#isFragment(candidate)) : undefined);
    const ordered = [...(idea ? [idea] : []), ...this.#candidates, ...candidates];
    this.#candidates = this.#distinct(ordered).slice(0, maxSuggestions);
  }

  /** Choose the next candidate or the previous. @param {number} step  1: the next; −1: the previous; wraps around. */
  choose(step) {
    const { candidates, chosen } = this;
    const index = chosen ? candidates.indexOf(chosen) : -1;
    this.#choice = candidates[(index + step + candidates.length) % candidates.length] ?? null;
  }

  clear() {
    this.#candidates = [];
    this.#choice = null;
  }

  /**
   * Note since when each suggestion is visible: the ghost text, and the others if they are listed.
   * @param {Candidate[]} candidates  Those that may be.
   * @param {boolean} areAllVisible
   */
  noteVisible(candidates, areAllVisible) {
    const { chosen } = this;
    const nowMs = performance.now();
    if (this.#ghost && this.#ghost !== chosen) {
      this.#previous = isReadable(this.#ghost) ? { candidate: this.#ghost, untilMs: nowMs } : null;
    }
    this.#ghost = chosen;
    for (const candidate of candidates) {
      const isGhost = candidate === chosen && !chosen.numReplaced;
      const isVisible = this.#candidates.includes(candidate) && (isGhost || areAllVisible);
      const wasJustThere = candidate === this.#previous?.candidate;
      if (!wasJustThere) candidate.shownAtMs = isVisible ? candidate.shownAtMs ?? nowMs : null;
    }
  }

  /** Forget what was ghost text: it belongs to another text. */
  forgetGhost() {
    this.#ghost = this.#previous = null;
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

  /** @param {Candidate} candidate @param {number} place @returns {Suggestion} */
  #describe(candidate, place) {
    const { text, sentence } = candidate;
    const isCorrection = candidate.numReplaced > 0;
    return { place, text, rest: isCorrection ? "" : this.rest(candidate), isCorrection, isFinished: sentence !== null, sentence };
  }
}
