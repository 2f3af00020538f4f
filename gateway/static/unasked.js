// Suggestions without a request: likely next words at every key, one idea when the writer stands still, or several when
// typing pauses; and when they rest. It does not know what an editor shows or which keys there are.

import { hasTextAfter } from "./text.js";

/** @typedef {import("./suggestion_session.js").SuggestionSession} SuggestionSession */
/** @typedef {import("./text.js").TextBefore} TextBefore */

/** In pauses mode, a writer who has pressed no key for this long pauses. */
const PAUSE_MS = 400;

/** A writer who has stood still for this long thinks, and is shown one idea, whatever the rhythm of their typing. */
const IDEA_DELAY_MS = 1200;

/** While a slow server still owes an answer, the request for an idea waits for this long, and again. */
const IDEA_WAIT_MS = 300;

/** How long they rest after a dismissal. It doubles with each dismissal in a row, and ends by itself. */
const FIRST_REST_MS = 5000;
const MAX_REST_MS = 300_000;

/** Identifies a text before the caret by its end. @param {TextBefore} before */
const placeOf = ({ end, text }) => `${end}\n${text.slice(-256)}`;

export class Unasked {
  #numDismissals = 0;
  #restEndsAtMs = -Infinity;
  /** The word before the caret is misspelled, so that an idea would go on with it. */
  #isMisspelled = false;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #pauseTimer;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #restTimer;
  /** Texts before the caret for which the writer was shown ideas, or dismissed suggestions. @type {Set<string>} */
  #seenPlaces = new Set();
  #parts;

  /**
   * @param {object} parts
   * @param {import("./completer.js").Completer} parts.completer
   * @param {import("./caret_text.js").CaretText} parts.text
   * @param {import("./requests.js").Requests} parts.requests
   * @param {import("./shown_suggestions.js").ShownSuggestions} parts.shown
   * @param {import("./feedback_reports.js").FeedbackReports} parts.reports
   * @param {() => boolean} parts.isProse  As the option of `Completer`.
   * @param {() => boolean} parts.isAsked  Whether suggestions that the writer or a pause requested are shown or awaited.
   * @param {() => void} parts.requestIdeas  Called when typing pauses.
   * @param {() => void} parts.render
   */
  constructor(parts) {
    this.#parts = parts;
  }

  /** Whether something is about to be requested. */
  get isWaiting() {
    return this.#pauseTimer !== undefined;
  }

  /** Milliseconds until they come back after dismissals; 0: they do not rest. */
  get restMs() {
    return Math.max(0, this.#restEndsAtMs - performance.now());
  }

  /** Request something for the text that has just been typed, at once or at a pause. */
  request() {
    this.stop();
    if (!this.#mayRequest()) return;
    if (this.#parts.completer.mode === "live") {
      void this.#requestPredictions();
      this.#thinkFor(IDEA_DELAY_MS);
    } else {
      this.#pauseTimer = setTimeout(() => this.#requestAtPause(), PAUSE_MS);
    }
  }

  /** The writer came to this text without typing. At an end of it or of a paragraph, an idea comes, once. */
  visit() {
    const place = placeOf(this.#parts.text.last);
    const isAtEnd = /\S.*$/.test(place) || !this.#parts.text.after.trim();
    if (isAtEnd && !this.#seenPlaces.has(place) && this.#mayRequest()) this.#thinkFor(IDEA_DELAY_MS);
  }

  /** Request nothing at the next pause. */
  stop() {
    clearTimeout(this.#pauseTimer);
    this.#pauseTimer = undefined;
  }

  /** The text has changed. */
  edit() {
    this.stop();
    this.#isMisspelled = false;
  }

  /** The writer accepts or requests suggestions, which therefore need not rest. */
  use() {
    this.#numDismissals = 0;
    this.#restEndsAtMs = -Infinity;
  }

  /** The writer dismisses what is shown for this text. @param {boolean} isRest  It was not requested: it rests for a while. */
  dismiss(isRest) {
    this.stop();
    if (isRest) {
      this.#restEndsAtMs = performance.now() + Math.min(FIRST_REST_MS * 2 ** this.#numDismissals, MAX_REST_MS);
      this.#numDismissals += 1;
    }
    this.#seenPlaces.add(placeOf(this.#parts.text.last));
    this.#showRest();
  }

  /** Show no further idea where these are, unless they are predictions. @param {SuggestionSession} session */
  noteIdeas({ before, request, response }) {
    if (response && request.strategy !== "predict") this.#seenPlaces.add(placeOf(before));
  }

  /** Whether something may be requested unasked for the present text. */
  #mayRequest() {
    const { after, last } = this.#parts.text;
    const { mode, proseOnly } = this.#parts.completer;
    if (hasTextAfter(after) || !last.text.trim() || this.restMs) return false;
    if (mode === "off" || (proseOnly && !this.#parts.isProse())) return false;
    return this.#parts.requests.mayStart();
  }

  /** Show at each second how long they still rest, and that they do not any more. */
  #showRest() {
    clearTimeout(this.#restTimer);
    const { restMs } = this;
    if (restMs) this.#restTimer = setTimeout(() => (this.#showRest(), this.#parts.render()), restMs % 1000 || 1000);
    else this.#parts.completer.returned();
  }

  /** Request an idea if the writer stands still for so long, once a slow server has answered. @param {number} delayMs */
  #thinkFor(delayMs) {
    this.#pauseTimer = setTimeout(() => (this.#parts.requests.inFlight ? this.#thinkFor(IDEA_WAIT_MS) : this.#requestAtPause()), delayMs);
  }

  #requestAtPause() {
    this.#pauseTimer = undefined;
    if (!this.#parts.text.isSame) return;
    if (this.#parts.completer.mode === "live") void this.#requestIdea();
    else this.#parts.requestIdeas();
  }

  /** Request likely next words, and fill the free places with them. */
  async #requestPredictions() {
    const { minProbability, minUsefulness } = this.#parts.completer;
    const session = this.#parts.requests.start({ strategy: "predict", corrections: true, min_probability: minProbability }, false);
    if (await this.#parts.requests.complete(session)) {
      this.#isMisspelled = session.response?.errors?.some(({ code }) => code === "misspelled") ?? false;
      const useful = session.candidates.filter(({ sentence }) => (sentence?.usefulness ?? Infinity) >= minUsefulness);
      this.#parts.shown.merge(useful, session.numRequested);
    }
    this.#parts.render();
  }

  /**
   * The writer thinks: show one idea, to the end of its sentence, and list the others. What is on show stays, unless the
   * idea continues it or it is a fragment that was left standing.
   */
  async #requestIdea() {
    if (this.#parts.isAsked() || this.#parts.shown.isChosenByUser || this.#isMisspelled) return;
    const session = this.#parts.requests.start({}, false);
    session.isIdea = true;
    if (await this.#parts.requests.complete(session)) {
      const { taken } = this.#parts.reports;
      this.noteIdeas(session);
      this.#parts.shown.addIdea(session.candidates, session.numRequested, taken !== null && taken === this.#parts.shown.chosen);
    }
    this.#parts.render();
  }
}
