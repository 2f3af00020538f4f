// The requests of one text field: one at a time, each with its text, and what their failures mean for the next. It does not
// know what is shown, nor when a request is due.

import { Problem } from "./client.js";
import { SuggestionSession } from "./suggestion_session.js";
import { hasTextAfter, isSameText, trimContext, trimSuffix } from "./text.js";

/** @typedef {import("./client.js").RequestFields} RequestFields */
/** @typedef {import("./text.js").TextBefore} TextBefore */

/** After a failure, unasked requests wait for this long, unless the server says how long. */
const RETRY_AFTER_MS = 1000;

/** A request whose answer has not begun, or not gone on, for this long is cancelled. */
const MAX_SILENCE_MS = 20_000;

/** Where the model knows the text, predictions ask again whether it does after this number of characters. */
const FAMILIARITY_CHARS = 24;

export class Requests {
  /** @type {SuggestionSession|null} */
  inFlight = null;
  /** The last request. @type {SuggestionSession|null} */
  latest = null;
  /** Stays until a request succeeds. @type {Problem|null} */
  problem = null;
  /** The model does not know text like that before the caret. */
  isUnfamiliar = false;
  /** Where the model was last asked whether it knows the text. */
  #familiarityEnd = -Infinity;
  #retryAtMs = -Infinity;
  /** The text for which a request failed last, or was not sent because of that. @type {TextBefore} */
  #beforeRetry = { end: 0, text: "" };
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #retryTimer;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #silenceTimer;
  #text;
  #options;

  /**
   * @param {import("./caret_text.js").CaretText} text
   * @param {object} options
   * @param {() => import("./client.js").Client} options.client
   * @param {() => RequestFields} options.fields  Further fields of each request.
   * @param {() => boolean} options.isOutdated  Whether the answer that arrives is for another text, which aborts its request.
   * @param {(session: SuggestionSession) => void} options.failed
   * @param {() => void} options.retry  An unasked request failed, the server is expected back, and the text is the same.
   */
  constructor(text, options) {
    this.#text = text;
    this.#options = options;
  }

  /**
   * Whether a request may be sent unasked: none has failed just now. If not, `retry` is called for the present text.
   * @returns {boolean}
   */
  mayStart() {
    const isSoon = performance.now() < this.#retryAtMs;
    if (isSoon) this.#beforeRetry = this.#text.last;
    return !isSoon;
  }

  stopRetry() {
    clearTimeout(this.#retryTimer);
  }

  /**
   * Abort the request in flight and begin another: call `complete` or `stream`.
   * @param {RequestFields} fields
   * @param {boolean} isExplicit  Requested by the writer, with a key or button.
   */
  start(fields, isExplicit) {
    this.abort();
    const { before, after } = this.#text;
    const suffix = trimSuffix(after);
    const isNear = Math.abs(before.end - this.#familiarityEnd) < FAMILIARITY_CHARS;
    const isChecked = this.isUnfamiliar || !isNear || fields.strategy !== "predict";
    // Always send a seed, so that `explain` can repeat the request: a seed chosen by the server may exceed 2⁵³.
    const request = {
      seed: randomSeed(), strategy: "idea", ...(isChecked && { familiar_only: true }), ...this.#options.fields(), ...fields,
      context: trimContext(before),
      ...(suffix && { suffix }),
      // Predictions are more often what is missing before a text than ideas are.
      ...(hasTextAfter(after) && { strategy: "predict" }),
    };
    const session = new SuggestionSession(before, after, request, isExplicit);
    this.inFlight = this.latest = session;
    this.#expectMore(session);
    return session;
  }

  abort() {
    this.inFlight?.abortController.abort();
    this.inFlight = null;
  }

  /**
   * Wait for a response that is not streamed.
   * @param {SuggestionSession} session
   * @returns {Promise<boolean>}  Whether there is one, and it is wanted.
   */
  async complete(session) {
    try {
      const response = await this.#options.client().complete(session.request, session.abortController.signal);
      if (session !== this.inFlight || this.#options.isOutdated()) return false;
      this.inFlight = null;
      session.applyResponse(response);
      this.#note(session);
      return true;
    } catch (error) {
      this.#fail(session, error);
      return false;
    }
  }

  /** Yield after each event of a streamed response. @param {SuggestionSession} session */
  async *stream(session) {
    try {
      for await (const event of this.#options.client().stream(session.request, session.abortController.signal)) {
        session.applyEvent(event);
        this.#expectMore(session);
        if (session.response) this.#note(session);
        yield;
      }
    } catch (error) {
      this.#fail(session, error);
    } finally {
      if (this.inFlight === session) this.inFlight = null;
    }
  }

  /** @param {SuggestionSession} session */
  #note({ request, response, before }) {
    this.problem = null;
    if (!request.familiar_only) return;
    this.isUnfamiliar = response?.errors?.some(({ code }) => code === "unfamiliar_context") ?? false;
    this.#familiarityEnd = before.end;
  }

  /** @param {SuggestionSession} session */
  #expectMore(session) {
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = setTimeout(() => {
      if (session !== this.inFlight) return; // answered, or aborted
      const detail = `The server has said nothing for ${MAX_SILENCE_MS / 1000} seconds, so the request was cancelled.`;
      this.#fail(session, new Problem({ code: "silent", detail }));
      session.abortController.abort();
    }, MAX_SILENCE_MS);
  }

  /**
   * @param {SuggestionSession} session
   * @param {unknown} error
   */
  #fail(session, error) {
    if (session !== this.inFlight) return; // aborted
    this.inFlight = null;
    const problem = error instanceof Problem ? error : new Problem({ detail: String(error) });
    // Requests that reach the server by two gateways may overtake each other; this is no problem of the writer's.
    if (problem.code !== "superseded") this.problem = problem;
    const delayMs = problem.retryAfterS ? 1000 * problem.retryAfterS : RETRY_AFTER_MS;
    this.#retryAtMs = performance.now() + delayMs;
    clearTimeout(this.#retryTimer);
    this.#beforeRetry = session.before;
    // A writer who has stopped learns that the server is back without another key.
    if (!session.isExplicit) this.#retryTimer = setTimeout(() => this.#retry(), delayMs);
    this.#options.failed(session);
  }

  #retry() {
    if (isSameText(this.#beforeRetry, this.#text.before) && !this.inFlight) this.#options.retry();
  }
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
