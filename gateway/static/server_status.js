// Whether the server responds and is ready: asks it at intervals, and learns it from requests. The only place that says
// so, so that no two statuses contradict each other. It does not know suggestions.

/** Requests of `GET /health/ready` in milliseconds: while a slot is warm, and while none is or the server is gone. */
const INTERVAL_MS = 10_000;
const RETRY_MS = 2000;

/**
 * @typedef {object} Status
 * @property {boolean} isReachable
 * @property {number} numWarm  Slots that serve requests.
 * @property {number} numSlots
 * @property {string} version  The server's; "" if it is not reachable.
 * @property {{model: string, source: string, warning: string|null, bytes: number}[]} models
 */

export class ServerStatus {
  #client;
  #show;
  #isReachable = true;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #timer;

  /**
   * Starts to ask.
   * @param {import("./client.js").Client} client
   * @param {(status: Status) => void} show  Called after each answer or failure.
   */
  constructor(client, show) {
    this.#client = client;
    this.#show = show;
    document.addEventListener("visibilitychange", () => void this.check());
    addEventListener("online", () => void this.check());
    void this.check();
  }

  /** Ask now. */
  async check() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    try {
      const { models, slots, version } = await this.#client.ready();
      const numWarm = slots.filter((/** @type {{state: string}} */ slot) => slot.state === "warm").length;
      this.#update({ isReachable: true, numWarm, numSlots: slots.length, version, models });
    } catch {
      this.reportUnreachable();
    }
  }

  /** A request has reached the server. */
  reportReachable() {
    if (!this.#isReachable) void this.check();
  }

  /** A request has not reached the server. */
  reportUnreachable() {
    this.#update({ isReachable: false, numWarm: 0, numSlots: 0, version: "", models: [] });
  }

  /** @param {Status} status */
  #update(status) {
    this.#isReachable = status.isReachable;
    this.#show(status);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.check(), status.numWarm ? INTERVAL_MS : RETRY_MS);
  }
}
