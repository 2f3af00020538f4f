// Inline suggestions from a Tercet server, for any editor. This is the module that editors import.
//
// `Completer` decides when to request suggestions, which of them still agree with the document, and what to insert.
// It does not access the editor or the page: the editor passes functions that return the text before the caret, insert
// text and show a `View`. `Client` sends the HTTP requests and can be used without `Completer`.

import { AdaptiveDebounce } from "./adaptive_debounce.js";
import { Client, Problem } from "./client.js";
import { SuggestionSession } from "./suggestion_session.js";
import { firstWord, trimContext } from "./text.js";

export { Client, Problem } from "./client.js";

/** @typedef {import("./client.js").AutocompleteResponse} AutocompleteResponse */
/** @typedef {import("./client.js").RequestFields} RequestFields */
/** @typedef {import("./client.js").Sentence} Sentence */
/** @typedef {import("./suggestion_session.js").Suggestion} Suggestion */

/**
 * @typedef {object} View  What an editor shows.
 * @property {"idle"|"waiting"|"streaming"|"ready"|"empty"} status  `idle`: no suggestions; `waiting`: requested, no
 *   text yet; `streaming`: text is arriving; `ready`: complete; `empty`: complete, and the model had nothing to add.
 * @property {Suggestion[]} suggestions  In display order.
 * @property {Suggestion|null} chosen  The element of `suggestions` to show as ghost text.
 * @property {boolean} isExplicit  Requested with a key or button; false: requested by a pause in typing.
 * @property {boolean} isChosenByUser  The writer moved the choice with a key.
 * @property {Problem|null} problem  Why the last request failed.
 * @property {number|null} firstMs  Latest request: milliseconds to the first text.
 * @property {number|null} totalMs  Latest request: milliseconds to the complete response.
 */

/**
 * Tab accepts automatic suggestions only after they have been visible for this long. An earlier Tab was pressed
 * before the writer could see them, to request suggestions.
 */
const MIN_VISIBLE_MS = 200;

/**
 * Suggestions for one text field.
 *
 * A request is sent by `request()`, or automatically when typing pauses (adaptive debounce). A newer request aborts
 * the request in flight, and so does an edit that no suggestion agrees with. While the writer types what a suggestion
 * says, its session stays open and no request is sent. Only one session is open at a time; when it closes, its outcome
 * is reported to the server as feedback.
 */
export class Completer {
  /** The suggestions that are shown. @type {SuggestionSession|null} */
  #session = null;
  /**
   * The session whose request is in flight: shown, or accepted before its response was complete.
   * @type {SuggestionSession|null}
   */
  #inFlight = null;
  /** The last session requested, shown or not. @type {SuggestionSession|null} */
  #latest = null;
  /** @type {Problem|null} */
  #problem = null;
  #isResponseEmpty = false;
  #isInserting = false;
  /** Text before the caret at the last edit or request. */
  #lastContext = "";
  #debounce = new AdaptiveDebounce();
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #pauseTimer;
  #getContext;
  #insert;
  #show;
  #getRequestFields;

  /**
   * @param {object} editor
   * @param {() => string} editor.context  Returns all text before the caret.
   * @param {(text: string) => void} editor.insert  Inserts text at the caret. May call `changed` synchronously.
   * @param {(view: View) => void} editor.show  Shows suggestions; called after every change.
   * @param {() => RequestFields} [editor.options]  Returns further fields of the next request. Default: none.
   * @param {Client} [editor.client]  Default: a client of the server that served this module.
   * @param {boolean} [editor.isAutomatic]  Request suggestions when typing pauses. Default: true.
   */
  constructor({ context, insert, show, options = () => ({}), client = new Client(), isAutomatic = true }) {
    this.#getContext = context;
    this.#insert = insert;
    this.#show = show;
    this.#getRequestFields = options;
    this.client = client;
    /** Whether a pause in typing requests suggestions. May be changed at any time. */
    this.isAutomatic = isAutomatic;
  }

  /** Request suggestions for the text before the caret. Errors appear in the view's `problem`. */
  request() {
    void this.#sendRequest(true);
  }

  /**
   * The editor's text has changed. Closes suggestions that no longer agree with it and restarts the debounce.
   * @param {Event} [event]  The `input` or `compositionend` event. Without it the change counts as typing. Changes
   *   that are not insertions, or belong to an IME composition, do not start the debounce.
   */
  changed(event) {
    const { inputType = "insertText", isComposing = false } = /** @type {InputEvent} */ (event ?? {});
    const isInsertion = inputType.startsWith("insert");
    if (isInsertion && !this.#isInserting) this.#debounce.recordKey(performance.now());
    this.#lastContext = this.#getContext();
    this.#problem = null;
    this.#isResponseEmpty = false;
    clearTimeout(this.#pauseTimer);
    if (this.#session && !this.#session.followEdit(this.#lastContext)) this.#closeSession("ignored");
    if (this.isAutomatic && isInsertion && !isComposing && !this.#session && this.#lastContext.trim()) {
      this.#pauseTimer = setTimeout(() => this.#sendRequest(false), this.#debounce.delayMs);
    }
    this.#render();
  }

  /** The caret may have moved. Closes the suggestions if it did, because they belong to its old position. */
  moved() {
    if (this.#getContext() !== this.#lastContext) this.close();
  }

  /** Hide the suggestions and abort the request, for example when the editor loses focus. Feedback: ignored. */
  close() {
    clearTimeout(this.#pauseTimer);
    this.#lastContext = this.#getContext();
    if (!this.#session) return;
    this.#closeSession("ignored");
    this.#render();
  }

  /** The writer dismisses the suggestions: hide them and abort the request. Feedback: rejected. */
  dismiss() {
    clearTimeout(this.#pauseTimer);
    this.#closeSession("rejected");
    this.#render();
  }

  /**
   * Choose another suggestion. Does nothing if none are shown.
   * @param {number} step  1: the next; −1: the previous; wraps around.
   */
  choose(step) {
    if (!this.#session) return;
    this.#session.choose(step);
    this.#render();
  }

  /**
   * Insert the rest of a suggestion and close the session. Feedback: accepted.
   * @param {number} [branch]  The suggestion's `branch`. Default: the chosen suggestion. An unknown branch is ignored.
   */
  accept(branch) {
    const session = this.#session;
    if (!session) return;
    const candidate = branch === undefined ? session.chosen : session.findCandidate(branch);
    if (!candidate) return;
    session.chosen = candidate;
    const rest = candidate.text.slice(session.typedText.length);
    session.numAcceptedChars += rest.length;
    this.#closeSession("accepted");
    this.#insertText(rest);
  }

  /** Insert the next word of the chosen suggestion. The session stays open while text remains. */
  acceptWord() {
    const session = this.#session;
    if (!session?.chosen) return;
    const word = firstWord(session.chosen.text.slice(session.typedText.length));
    session.numAcceptedChars += word.length;
    this.#insertText(word);
  }

  /**
   * Handle a `keydown` event: Tab requests or accepts, Enter accepts, arrow up and down choose, arrow right accepts a
   * word, Escape dismisses. Keys with modifiers and keys of an IME composition are left to the editor.
   * @param {KeyboardEvent} event
   * @returns {boolean}  True if the key was handled; its default action is prevented, and the editor must ignore it.
   */
  press(event) {
    if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return false;
    const action = this.#keyAction(event.key);
    if (!action) return false;
    event.preventDefault();
    action();
    return true;
  }

  /**
   * The chosen suggestion with its `explanation`: the likeliest tokens at each position. The first call repeats the
   * request with the same seed, which gives the same text; further calls for the same response reuse the answer.
   * @param {number} numLikeliest  Alternatives per token, 1 to 10.
   * @returns {Promise<Sentence|null>}  Null if the response is incomplete or nothing is chosen.
   * @throws {Problem} If the request fails.
   */
  async explain(numLikeliest) {
    const session = this.#session;
    const seed = session?.chosen?.sentence?.seed;
    if (!session?.response || seed === undefined) return null;
    session.explanation ??= this.client.complete(
      { ...session.request, explain: numLikeliest }, session.abortController.signal,
    );
    const response = await session.explanation;
    return response.sentences.find((sentence) => sentence.seed === seed) ?? null;
  }

  /** The current view, in the form passed to `show`. @returns {View} */
  get view() {
    const session = this.#session;
    const suggestions = session?.suggestions ?? [];
    return {
      status: session?.status ?? (this.#isResponseEmpty ? "empty" : "idle"),
      suggestions,
      chosen: suggestions.find(({ branch }) => branch === session?.chosen?.branch) ?? null,
      isExplicit: session?.isExplicit ?? false,
      isChosenByUser: session?.isChosenByUser ?? false,
      problem: this.#problem,
      firstMs: this.#latest?.firstMs ?? null,
      totalMs: this.#latest?.totalMs ?? null,
    };
  }

  /** @param {string} key  @returns {(() => void)|null}  Null: the key belongs to the editor. */
  #keyAction(key) {
    const session = this.#session;
    if (key === "Escape") return session && (() => this.dismiss());
    if (key === "Tab") return this.#tabAction(session);
    if (!session?.visible.length) return null;
    switch (key) {
      case "Enter": // inserts a line break while the writer has not used automatic suggestions
        return session.isExplicit || session.isChosenByUser ? () => this.accept() : null;
      case "ArrowDown":
        return () => this.choose(1);
      case "ArrowUp":
        return () => this.choose(-1);
      case "ArrowRight":
        return () => this.acceptWord();
      default:
        return null;
    }
  }

  /** @param {SuggestionSession|null} session  @returns {() => void} */
  #tabAction(session) {
    if (!session) return () => this.request();
    const canAccept = session.visible.length > 0 && (session.isExplicit || session.isOlderThan(MIN_VISIBLE_MS));
    if (canAccept) return () => this.accept();
    return () => {
      session.isExplicit = true; // the debounce sent the request just before the writer pressed Tab
      this.#render();
    };
  }

  /** @param {boolean} isExplicit */
  async #sendRequest(isExplicit) {
    clearTimeout(this.#pauseTimer);
    this.#closeSession("ignored");
    this.#inFlight?.abortController.abort();
    const context = this.#getContext();
    // Always send a seed, so that `explain` can repeat the request: a seed chosen by the server may exceed 2⁵³.
    const request = { seed: randomSeed(), ...this.#getRequestFields(), context: trimContext(context) };
    const session = new SuggestionSession(context, request, isExplicit);
    this.#lastContext = context;
    this.#problem = null;
    this.#isResponseEmpty = false;
    this.#session = this.#inFlight = this.#latest = session;
    this.#render();
    try {
      for await (const event of this.client.stream(request, session.abortController.signal)) {
        session.applyEvent(event);
        if (session === this.#session) this.#showProgress(session);
      }
      if (session.outcome) this.#sendFeedback(session);
    } catch (error) {
      this.#showError(session, error);
    }
    if (this.#inFlight === session) this.#inFlight = null;
  }

  /** @param {SuggestionSession} session */
  #showProgress(session) {
    if (session.response && !session.visible.length) {
      this.#isResponseEmpty = !session.typedText;
      this.#closeSession("ignored");
    }
    this.#render();
  }

  /**
   * @param {SuggestionSession} session
   * @param {unknown} error
   */
  #showError(session, error) {
    if (session !== this.#session) return; // closed or superseded: most likely our own abort
    this.#session = null;
    this.#problem = error instanceof Problem ? error : new Problem({ detail: String(error) });
    this.#render();
  }

  /**
   * Stop showing the session. A partly accepted session counts as accepted.
   * @param {"accepted"|"rejected"|"ignored"} outcome
   */
  #closeSession(outcome) {
    const session = this.#session;
    if (!session) return;
    this.#session = null;
    session.outcome = session.numAcceptedChars ? "accepted" : outcome;
    if (session.response) this.#sendFeedback(session);
    // Feedback needs the id of the complete response, so an accepted session's request runs to its end, unless a newer
    // request aborts it.
    else if (session.outcome !== "accepted") session.abortController.abort();
  }

  /** @param {SuggestionSession} session */
  #sendFeedback(session) {
    const { response, chosen, outcome, numAcceptedChars } = session;
    const seed = chosen?.sentence?.seed;
    const index = response?.sentences.findIndex((sentence) => sentence.seed === seed) ?? -1;
    if (response && outcome && index >= 0) void this.client.feedback(response.id, index, outcome, numAcceptedChars);
  }

  /** @param {string} text */
  #insertText(text) {
    this.#isInserting = true; // insertions are not keystrokes and must not affect the debounce
    this.#insert(text);
    this.#isInserting = false;
  }

  #render() {
    this.#show(this.view);
  }
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
