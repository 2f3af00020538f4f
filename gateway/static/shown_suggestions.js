// The suggestions on show: which candidate has which place, and which of them the writer chose. Suggestions that still
// agree with the document keep their place. Pure state: it does not know requests, timers or the editor.

/** @typedef {import("./suggestion_session.js").Candidate} Candidate */
/** @typedef {import("./client.js").Sentence} Sentence */

/**
 * @typedef {object} Suggestion  One suggestion, as an editor shows it.
 * @property {number} place  0, 1 or 2: identifies the suggestion, and selects the key that accepts it.
 * @property {string} text  All text received so far.
 * @property {string} rest  The part of `text` that the document does not contain yet.
 * @property {boolean} isFinished  The whole sentence has arrived.
 * @property {Sentence|null} sentence  Null until finished.
 */

export class ShownSuggestions {
  /** The candidate of each place; null: the place is free. @type {(Candidate|null)[]} */
  #places = [];
  /** @type {Candidate|null} */
  #choice = null;
  /** Text before the caret. */
  #context = "";

  /** The candidates on show, in display order. @returns {Candidate[]} */
  get candidates() {
    return this.#places.filter((candidate) => candidate !== null);
  }

  /** The candidate whose rest is ghost text: the writer's choice, or the one of the first place. @returns {Candidate|null} */
  get chosen() {
    return this.#choice ?? this.#places[0] ?? null;
  }

  /** Whether the writer chose one. */
  get isChosenByUser() {
    return this.#choice !== null;
  }

  /** @returns {Suggestion[]} */
  get suggestions() {
    return this.#places.flatMap((candidate, place) => (candidate ? [this.#describe(candidate, place)] : []));
  }

  /** @param {number} place @returns {Candidate|null} */
  at(place) {
    return this.#places[place] ?? null;
  }

  /** @param {Candidate} candidate @returns {string}  What the document does not contain of it. */
  rest(candidate) {
    return candidate.rest(this.#context) ?? "";
  }

  /**
   * The document has changed: what does not agree with it leaves its place.
   * @param {string} context  Everything before the caret.
   */
  follow(context) {
    this.#context = context;
    this.#places = this.#places.map((candidate) => (candidate && this.rest(candidate) ? candidate : null));
    if (this.#choice && !this.#places.includes(this.#choice)) this.#choice = null;
  }

  /**
   * Show all candidates of one request, in their order.
   * @param {Candidate[]} candidates
   */
  replace(candidates) {
    this.#places = candidates.filter((candidate) => this.rest(candidate));
    if (this.#choice && !this.#places.includes(this.#choice)) this.#choice = null;
  }

  /**
   * Fill the free places. A candidate that only says what one on show says, or begins or continues it, is left out.
   * @param {Candidate[]} candidates  Best first.
   * @param {number} maxSuggestions
   */
  merge(candidates, maxSuggestions) {
    const rests = this.candidates.map((candidate) => this.rest(candidate));
    const added = candidates.filter((candidate) => {
      const rest = this.rest(candidate);
      return rest && !rests.some((kept) => kept.startsWith(rest) || rest.startsWith(kept));
    });
    const places = Array.from({ length: maxSuggestions }, (_, place) => this.at(place) ?? added.shift() ?? null);
    this.#places = places.filter((candidate) => candidate !== null);
  }

  /** Choose the next candidate or the previous. @param {number} step  1: the next; −1: the previous; wraps around. */
  choose(step) {
    const { candidates, chosen } = this;
    const index = chosen ? candidates.indexOf(chosen) : -1;
    this.#choice = candidates[(index + step + candidates.length) % candidates.length] ?? null;
  }

  /** The writer uses this candidate. @param {Candidate} candidate */
  chooseCandidate(candidate) {
    this.#choice = candidate;
  }

  clear() {
    this.#places = [];
    this.#choice = null;
  }

  /** @param {Candidate} candidate @param {number} place @returns {Suggestion} */
  #describe(candidate, place) {
    const { fitting, sentence } = candidate;
    return { place, text: fitting, rest: this.rest(candidate), isFinished: sentence !== null, sentence };
  }
}
