// One request and its suggestions: streamed text, and what of it still agrees with the document.
// It does not know HTTP, timers or the editor.

import { firstSentence, isInsideWord, isSameText, typedSince } from "./text.js";

/** @typedef {import("./client.js").AutocompleteResponse} AutocompleteResponse */
/** @typedef {import("./client.js").RequestFields} RequestFields */
/** @typedef {import("./client.js").Sentence} Sentence */
/** @typedef {import("./client.js").ServerEvent} ServerEvent */
/** @typedef {import("./text.js").TextBefore} TextBefore */

/**
 * A response that completes within this time is reordered best first. A slower one keeps its order, because the writer
 * may already be reading it.
 */
const MAX_REORDER_MS = 250;

/** Value of `n_samples` that the server uses by default. */
export const DEFAULT_NUM_SUGGESTIONS = 3;

/** Text received for one branch of a request. */
export class Candidate {
  text = "";
  /** @type {Sentence|null} */
  sentence = null;
  /** The server gave this branch up, and another branch may replace it. */
  isDropped = false;
  /** Since when it has been on display, on the clock of `performance.now()`; null: it is not. @type {number|null} */
  shownAtMs = null;

  /**
   * @param {SuggestionSession} session
   * @param {number} branch
   */
  constructor(session, branch) {
    this.session = session;
    this.branch = branch;
  }

  /** Whether it fills a gap in a word. */
  get isInsideWord() {
    return isInsideWord(this.session.before.text, this.session.after);
  }

  /** Of a correction, the characters before the caret that it replaces; else 0. */
  get numReplaced() {
    return this.sentence?.replaces ?? 0;
  }

  /**
   * What the document does not contain yet.
   * @param {TextBefore} before
   * @returns {string|null}  Null: the document does not agree with it. Empty: the document contains all of it.
   */
  rest(before) {
    const typed = this.isDropped ? null : typedSince(this.session.before, before);
    if (this.numReplaced && typed) return null;
    return typed !== null && this.text.startsWith(typed) ? this.text.slice(typed.length) : null;
  }
}

/** One request with its suggestions, from sending the request until the outcome has been reported. */
export class SuggestionSession {
  abortController = new AbortController();
  startedAtMs = performance.now();
  /** From the request to the first text, in milliseconds. @type {number|null} */
  firstMs = null;
  /** From the request to the complete response, in milliseconds. @type {number|null} */
  totalMs = null;
  /** In order of arrival; best first once a fast response is complete. @type {Candidate[]} */
  candidates = [];
  /** Null while the request is in flight. @type {AutocompleteResponse|null} */
  response = null;
  /** Response to the same request with `explain`; null until needed. @type {Promise<AutocompleteResponse>|null} */
  explanation = null;
  /** The order of the candidates must not change any more: the writer chose or accepted one of them. */
  isOrderFixed = false;
  /** Sent when the writer stood still: one idea, to the end of its sentence. */
  isIdea = false;

  /**
   * @param {TextBefore} before  When the request was sent.
   * @param {string} after  Text after the caret, at least to the end of its line.
   * @param {RequestFields} request
   * @param {boolean} isExplicit  Requested by the writer, with a key or button.
   */
  constructor(before, after, request, isExplicit) {
    this.before = before;
    this.after = after;
    this.request = request;
    this.isExplicit = isExplicit;
  }

  /** How many suggestions were requested. @returns {number} */
  get numRequested() {
    return Number(this.request.n_samples ?? DEFAULT_NUM_SUGGESTIONS);
  }

  /** @returns {"waiting"|"streaming"|"ready"} */
  get status() {
    if (this.response) return "ready";
    return this.candidates.length ? "streaming" : "waiting";
  }

  /**
   * Whether the document agrees with a candidate, or may agree once more text has arrived.
   * @param {TextBefore} before
   */
  agreesWith(before) {
    if (isSameText(this.before, before)) return true;
    const rests = this.candidates.map((candidate) => candidate.rest(before));
    return rests.some((rest) => rest !== null && (rest !== "" || !this.response));
  }

  /**
   * Apply one event of the response stream.
   * @param {ServerEvent} event
   */
  applyEvent({ name, data }) {
    if (name === "token") {
      this.firstMs ??= performance.now() - this.startedAtMs;
      this.#findOrAddCandidate(data.branch).text += data.text;
    } else if (name === "sentence") {
      const candidate = this.#findOrAddCandidate(data.branch);
      candidate.sentence = data;
      candidate.text = data.value;
    } else if (name === "done") {
      this.totalMs = performance.now() - this.startedAtMs;
      this.response = /** @type {AutocompleteResponse} */ (data);
      this.#dropUnfinished(() => true);
      if (this.totalMs < MAX_REORDER_MS && !this.isOrderFixed) this.#reorder(this.response);
    }
  }

  /**
   * Apply a response that was not streamed.
   * @param {AutocompleteResponse} response
   */
  applyResponse(response) {
    this.totalMs = this.firstMs = performance.now() - this.startedAtMs;
    this.response = response;
    this.candidates = response.sentences.map((sentence, branch) => {
      const candidate = new Candidate(this, branch);
      candidate.text = this.isIdea ? firstSentence(sentence.value) : sentence.value;
      candidate.sentence = sentence;
      return candidate;
    });
  }

  /** @param {number} branch */
  #findOrAddCandidate(branch) {
    let candidate = this.candidates.find((existing) => existing.branch === branch);
    if (!candidate) {
      candidate = new Candidate(this, branch);
      this.candidates.push(candidate); // in order of arrival: a suggestion that is being read keeps its position
      // A replacement branch starts only after the requested branches ended, so the unfinished ones were dropped.
      if (branch >= this.numRequested) this.#dropUnfinished((existing) => existing.branch < this.numRequested);
    }
    return candidate;
  }

  /** @param {(candidate: Candidate) => boolean} predicate */
  #dropUnfinished(predicate) {
    for (const candidate of this.candidates) candidate.isDropped ||= !candidate.sentence && predicate(candidate);
  }

  /** @param {AutocompleteResponse} response */
  #reorder(response) {
    const ranks = new Map(response.sentences.map((sentence, index) => [sentence.seed, index]));
    /** @param {Candidate} candidate */
    const rank = (candidate) => ranks.get(candidate.sentence?.seed ?? -1) ?? Infinity;
    this.candidates.sort((a, b) => rank(a) - rank(b));
  }
}
