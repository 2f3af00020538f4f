// How long unasked suggestions rest after the writer has dismissed some. It does not know timers or suggestions.

const FIRST_REST_MS = 5000;
const MAX_REST_MS = 300_000;

/** A rest that doubles with each dismissal in a row, and ends by itself. */
export class Backoff {
  #numDismissals = 0;
  #endsAtMs = -Infinity;

  /** @param {number} nowMs  On a monotonic clock, such as `performance.now()`. */
  dismiss(nowMs) {
    this.#endsAtMs = nowMs + Math.min(FIRST_REST_MS * 2 ** this.#numDismissals, MAX_REST_MS);
    this.#numDismissals += 1;
  }

  /** The writer accepted or requested suggestions. */
  reset() {
    this.#numDismissals = 0;
    this.#endsAtMs = -Infinity;
  }

  /** Milliseconds until the rest ends; 0: there is none. @param {number} nowMs */
  restMs(nowMs) {
    return Math.max(0, this.#endsAtMs - nowMs);
  }
}
