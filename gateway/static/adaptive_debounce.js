// Debounce delay that adapts to a writer's typing speed. It does not know timers or requests.

/** Estimates of a moderately fast typist, used until enough keystrokes have been recorded. */
const INITIAL_MEAN_MS = 180;
const INITIAL_DEVIATION_MS = 45;

/** Weight of the newest interval in the moving averages. */
const SMOOTHING = 0.2;

/** Longer intervals are pauses for thought and say nothing about typing speed. */
const MAX_INTERVAL_MS = 1000;

const MIN_DELAY_MS = 150;
const MAX_DELAY_MS = 1000;

/**
 * Chooses the debounce delay from exponential moving averages of the interval between keystrokes and of its absolute
 * deviation: `mean + 4 × deviation`, the estimator that TCP uses for its retransmission timeout (RFC 6298).
 */
export class AdaptiveDebounce {
  #lastKeyMs = -Infinity;
  #meanMs = INITIAL_MEAN_MS;
  #deviationMs = INITIAL_DEVIATION_MS;

  /**
   * Record a keystroke.
   * @param {number} nowMs  Time of the keystroke on a monotonic clock, such as `performance.now()`.
   */
  recordKey(nowMs) {
    const intervalMs = nowMs - this.#lastKeyMs;
    this.#lastKeyMs = nowMs;
    if (intervalMs > MAX_INTERVAL_MS) return;
    this.#deviationMs += SMOOTHING * (Math.abs(intervalMs - this.#meanMs) - this.#deviationMs);
    this.#meanMs += SMOOTHING * (intervalMs - this.#meanMs);
  }

  /** Time without a keystroke that counts as a pause; 150 to 1000 ms. @returns {number} */
  get delayMs() {
    return Math.min(Math.max(this.#meanMs + 4 * this.#deviationMs, MIN_DELAY_MS), MAX_DELAY_MS);
  }
}
