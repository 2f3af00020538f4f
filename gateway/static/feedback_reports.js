// Reports what the writer did with suggestions, and later how much of an accepted one is still in the document.
// It does not know which suggestions are shown.

import { typedSince } from "./text.js";

/** @typedef {import("./client.js").Client} Client */
/** @typedef {import("./suggestion_session.js").Candidate} Candidate */
/** @typedef {import("./suggestion_session.js").SuggestionSession} SuggestionSession */
/** @typedef {import("./text.js").TextBefore} TextBefore */
/** @typedef {"accepted"|"rejected"|"ignored"} Outcome */

/** An accepted text counts as kept as far as it is in the document after this time, or when the editor is closed. */
const KEPT_AFTER_MS = 15_000;

/** What was inserted of a suggestion, and what was before it. @typedef {{candidate: Candidate, before: TextBefore, text: string}} Taken */

export class FeedbackReports {
  /** Outcomes of requests whose response is not complete. @type {Map<SuggestionSession, () => void>} */
  #waiting = new Map();
  /** @type {WeakSet<SuggestionSession>} */
  #reported = new WeakSet();
  /** The suggestion that is being accepted, word by word. @type {Taken|null} */
  #taken = null;
  /** @type {(Taken & {id: string, index: number})[]} */
  #acceptances = [];
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #timer;
  #getClient;
  #getText;

  /**
   * @param {() => Client} getClient
   * @param {() => [TextBefore, string]} getText  Returns the text before the caret and some of the text after it.
   */
  constructor(getClient, getText) {
    this.#getClient = getClient;
    this.#getText = getText;
  }

  /**
   * Report the outcome of a request, once. Feedback needs the id of the response: call `end` when it is complete.
   * @param {Candidate} candidate  The suggestion that was used, or shown first.
   * @param {Outcome} outcome
   * @param {Taken} [taken]  What was inserted of it.
   */
  report(candidate, outcome, taken) {
    const { session } = candidate;
    if (this.#reported.has(session)) return;
    this.#reported.add(session);
    const send = () => this.#send(candidate, outcome, taken);
    if (session.response) send();
    else this.#waiting.set(session, send);
  }

  /** The suggestion of which the writer has taken a part. @returns {Candidate|null} */
  get taken() {
    return this.#taken?.candidate ?? null;
  }

  /** The writer is taking a part of a suggestion, or its rest. @param {Candidate} candidate @param {string} text */
  take(candidate, text) {
    if (this.taken !== candidate) this.reportTaken();
    const [{ end, text: textBefore }] = this.#getText();
    const { numReplaced } = candidate;
    const before = { end: end - numReplaced, text: textBefore.slice(0, textBefore.length - numReplaced) };
    this.#taken ??= { candidate, before, text: "" };
    this.#taken.text += text;
  }

  /** The writer takes no more of it. */
  reportTaken() {
    const taken = this.#taken;
    this.#taken = null;
    if (taken) this.report(taken.candidate, "accepted", taken);
  }

  /** A request has ended, with a complete response or without. @param {SuggestionSession} session */
  end(session) {
    if (session.response) this.#waiting.get(session)?.();
    this.#waiting.delete(session);
  }

  /** Report now what is kept of all accepted texts, for example because the page is closed. */
  flush() {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    const [{ end, text: textBefore }, after] = this.#getText();
    const around = textBefore + after;
    const startsAt = end - textBefore.length;
    for (const { id, index, before, text } of this.#acceptances.splice(0)) {
      const start = before.end - startsAt;
      if (start < 0 || start > around.length) continue; // the writer is elsewhere
      const isFollowed = typedSince(before, { end: before.end, text: around.slice(0, start) }) !== null;
      const kept = isFollowed ? numEqualChars(around.slice(start), text) : 0;
      void this.#getClient().feedback(id, index, "accepted", text.length, kept);
    }
  }

  /** @param {Candidate} candidate @param {Outcome} outcome @param {Taken} [taken] */
  #send({ session: { response }, sentence }, outcome, taken) {
    const index = response?.sentences.findIndex(({ seed }) => seed === sentence?.seed) ?? -1;
    if (!response || index < 0) return;
    void this.#getClient().feedback(response.id, index, outcome, taken?.text.length);
    if (!taken) return;
    this.#acceptances.push({ ...taken, id: response.id, index });
    this.#timer ??= setTimeout(() => this.flush(), KEPT_AFTER_MS);
  }
}

/** Length of the common prefix. @param {string} one @param {string} other */
function numEqualChars(one, other) {
  let num = 0;
  while (num < other.length && one[num] === other[num]) num += 1;
  return num;
}
