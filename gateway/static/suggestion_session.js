// The suggestions of one request: streamed text, the chosen suggestion, what the writer typed since.
// It does not know HTTP, timers or the editor.

/** @typedef {import("./client.js").AutocompleteResponse} AutocompleteResponse */
/** @typedef {import("./client.js").RequestFields} RequestFields */
/** @typedef {import("./client.js").Sentence} Sentence */
/** @typedef {import("./client.js").ServerEvent} ServerEvent */

/**
 * @typedef {object} Suggestion  One suggestion, as an editor shows it.
 * @property {number} branch  Identifies the suggestion within its session.
 * @property {string} text  All text received so far.
 * @property {string} rest  The part of `text` that the document does not contain yet.
 * @property {boolean} isFinished  The whole sentence has arrived.
 * @property {Sentence|null} sentence  Null until finished.
 */

/**
 * A response that completes within this time is reordered best first. A slower one keeps its order, because the writer
 * may already be reading it.
 */
const MAX_REORDER_MS = 250;

/** Value of `n_samples` that the server uses by default. */
const DEFAULT_NUM_SUGGESTIONS = 3;

/** Text received for one branch of the request. */
class Candidate {
  text = "";
  /** @type {Sentence|null} */
  sentence = null;
  /** The server gave this branch up, and another branch may replace it. */
  isDropped = false;

  /** @param {number} branch */
  constructor(branch) {
    this.branch = branch;
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
  /** The candidate shown as ghost text. @type {Candidate|null} */
  chosen = null;
  /** The writer moved the choice with a key. */
  isChosenByUser = false;
  /** Null while the request is in flight. @type {AutocompleteResponse|null} */
  response = null;
  /** Response to the same request with `explain`; null until needed. @type {Promise<AutocompleteResponse>|null} */
  explanation = null;
  /** Text added to the document since the request, typed or accepted word by word. */
  typedText = "";
  /** Characters inserted by accepting suggestions. */
  numAcceptedChars = 0;
  /** Null while the suggestions are shown. @type {"accepted"|"rejected"|"ignored"|null} */
  outcome = null;

  /**
   * @param {string} context  Everything before the caret when the request was sent.
   * @param {RequestFields} request
   * @param {boolean} isExplicit  Requested with a key or button rather than by a pause.
   */
  constructor(context, request, isExplicit) {
    this.context = context;
    this.request = request;
    this.isExplicit = isExplicit;
  }

  /** Candidates that agree with the typed text and extend it. @returns {Candidate[]} */
  get visible() {
    return this.candidates.filter(
      ({ isDropped, text }) => !isDropped && text.startsWith(this.typedText) && text.length > this.typedText.length,
    );
  }

  /** Visible candidates, as an editor shows them. @returns {Suggestion[]} */
  get suggestions() {
    return this.visible.map((candidate) => ({
      branch: candidate.branch,
      text: candidate.text,
      rest: candidate.text.slice(this.typedText.length),
      isFinished: candidate.sentence !== null,
      sentence: candidate.sentence,
    }));
  }

  /** @returns {"waiting"|"streaming"|"ready"} */
  get status() {
    if (this.response) return "ready";
    return this.candidates.length ? "streaming" : "waiting";
  }

  /** Whether the first text arrived more than this many milliseconds ago. @param {number} ms @returns {boolean} */
  isOlderThan(ms) {
    return this.firstMs !== null && performance.now() - this.startedAtMs - this.firstMs > ms;
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
      if (this.totalMs < MAX_REORDER_MS && !this.isChosenByUser && !this.numAcceptedChars) this.#reorder(this.response);
    }
    if (!this.chosen || this.chosen.isDropped) this.chosen = this.visible[0] ?? null;
  }

  /**
   * Compare the document with the suggestions after an edit.
   * @param {string} context  Everything before the caret.
   * @returns {boolean}  Whether the document still agrees with a suggestion, so that the session may stay open.
   */
  followEdit(context) {
    if (!context.startsWith(this.context)) return false;
    this.typedText = context.slice(this.context.length);
    if (!this.typedText) return true;
    const { visible } = this;
    if (this.chosen && !visible.includes(this.chosen) && visible.length) this.chosen = visible[0] ?? null;
    if (visible.length) return true;
    // A candidate that has been typed to its end may still grow while the request is in flight.
    return !this.response && this.candidates.some((other) => !other.isDropped && other.text.startsWith(this.typedText));
  }

  /** Choose another visible candidate. @param {number} step  1: the next; −1: the previous; wraps around. */
  choose(step) {
    const { visible } = this;
    const index = visible.indexOf(/** @type {Candidate} */ (this.chosen));
    this.chosen = visible[(index + step + visible.length) % visible.length] ?? null;
    this.isChosenByUser = true;
  }

  /** @param {number} branch  @returns {Candidate|null} */
  findCandidate(branch) {
    return this.candidates.find((candidate) => candidate.branch === branch) ?? null;
  }

  /** @param {number} branch */
  #findOrAddCandidate(branch) {
    let candidate = this.findCandidate(branch);
    if (!candidate) {
      candidate = new Candidate(branch);
      this.candidates.push(candidate); // in order of arrival: a suggestion that is being read keeps its position
      const numRequested = /** @type {number|undefined} */ (this.request.n_samples) ?? DEFAULT_NUM_SUGGESTIONS;
      // A replacement branch starts only after the requested branches ended, so the unfinished ones were dropped.
      if (branch >= numRequested) this.#dropUnfinished((existing) => existing.branch < numRequested);
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
    this.chosen = this.visible[0] ?? null;
  }
}
