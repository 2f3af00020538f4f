// The page of slots: polls `GET /slots` and shows each slot as a box, and figures of all over the last ten seconds. It
// does not poll while it is hidden. What a slot's figures mean is said in the API's documentation.

import { createElement, setText } from "./dom.js";
import { KeyField } from "./key_field.js";

/** Between an answer and the next request, in milliseconds: after an answer, and after a failure. */
const INTERVAL_MS = 500;
const RETRY_MS = 2000;
/** Rates and latencies are over about this time. */
const WINDOW_MS = 10_000;
const STATES = /** @type {Record<string, string>} */ ({ loading: "loads", draining: "drains", warm: "rests" });

/**
 * @typedef {object} Slot
 * @property {number} slot
 * @property {string} state
 * @property {string|null} reason
 * @property {number} progress  Of loading, 0 to 1.
 * @property {string} model
 * @property {string} device
 * @property {string} dtype
 * @property {number} max_batch
 * @property {number} in_flight
 * @property {number} peak_in_flight
 * @property {number} ms_per_token
 * @property {number} memory_bytes
 * @property {number} pid
 * @property {Record<string, number>} counters
 *
 * @typedef {object} Slots
 * @property {Slot[]} slots
 * @property {number} waiting
 * @property {{bounds_s: number[], counts: number[]}} answers
 *
 * @typedef {Slots & {at: number}} Snapshot  `at`: of `performance.now()`.
 */

/** @param {string} id  @returns {HTMLElement} */
const find = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const keyForm = /** @type {HTMLFormElement} */ (find("key-form"));
const keyField = new KeyField(keyForm, find("key-note"), () => void poll(), () => void poll());
/** @type {Snapshot[]} The last ones, the oldest first. */
let snapshots = [];
/** @type {SlotBox[]} */
let boxes = [];
/** @type {ReturnType<typeof setTimeout>|undefined} */
let timer;

/** Ask now, and again after an interval. */
async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  let pause = RETRY_MS;
  try {
    const headers = keyField.key ? { authorization: `Bearer ${keyField.key}` } : undefined;
    const response = await fetch("slots", { headers, cache: "no-store" });
    if (response.status === 401) {
      const { detail } = await response.json();
      keyForm.hidden = false;
      keyField.showProblem(detail);
      showProblem("");
      pause = NaN; // until a key is entered
    } else if (response.ok) {
      keyField.showProblem("");
      show({ ...(await response.json()), at: performance.now() });
      pause = INTERVAL_MS;
    } else {
      showProblem(`The server answered ${response.status}.`);
    }
  } catch {
    showProblem("The server does not respond.");
  }
  clearTimeout(timer);
  if (pause) timer = setTimeout(() => void poll(), pause);
}

/** @param {string} message  Why the figures are not of now; empty: they are. */
function showProblem(message) {
  setText(find("problem"), message);
  document.body.classList.toggle("stale", Boolean(message));
}

/** @param {Snapshot} now */
function show(now) {
  showProblem("");
  // Of the snapshots that are older than the window, one stays.
  while (snapshots.length > 1 && now.at - snapshots[1].at >= WINDOW_MS) snapshots.shift();
  // Another gateway process counts from 0.
  if (snapshots.length && numAnswers(snapshots[0]) > numAnswers(now)) snapshots = [];
  const earlier = snapshots[0] ?? now;
  snapshots.push(now);
  const seconds = (now.at - earlier.at) / 1000;
  const counts = now.answers.counts.map((count, index) => count - earlier.answers.counts[index]);
  setText(find("rate"), seconds ? formatRate((numAnswers(now) - numAnswers(earlier)) / seconds) : "–");
  setText(find("p50"), formatSeconds(quantile(0.5, now.answers.bounds_s, counts)));
  setText(find("p99"), formatSeconds(quantile(0.99, now.answers.bounds_s, counts)));
  const then = new Map(earlier.slots.map((slot) => [slot.slot, slot]));
  // A slot that is new, on another machine, counts from now.
  const before = (/** @type {Slot} */ slot) => then.get(slot.slot) ?? slot;
  const sum = (/** @type {string} */ name) =>
    now.slots.reduce((total, slot) => total + growth(slot, before(slot), name), 0);
  const prompt = sum("prompt_tokens");
  setText(find("tokens"), seconds ? formatRate(sum("generated_tokens") / seconds) : "–");
  setText(find("hits"), prompt ? `${Math.round((100 * sum("cached_tokens")) / prompt)} %` : "–");
  setText(find("waiting"), String(now.waiting));
  if (boxes.length !== now.slots.length) {
    boxes = now.slots.map(() => new SlotBox());
    find("slots").replaceChildren(...boxes.map((box) => box.element));
  }
  now.slots.forEach((slot, index) => {
    const tokens = growth(slot, before(slot), "generated_tokens");
    boxes[index].show(slot, seconds ? tokens / seconds : 0);
  });
}

/** @param {Snapshot} snapshot  @returns {number} */
function numAnswers({ answers }) {
  return /** @type {number} */ (answers.counts.at(-1));
}

/**
 * How much a counter has grown. A new worker counts from 0.
 * @param {Slot} slot
 * @param {Slot} earlier
 * @param {string} name
 * @returns {number}
 */
function growth(slot, earlier, name) {
  const start = slot.pid === earlier.pid ? (earlier.counters[name] ?? 0) : 0;
  return (slot.counters[name] ?? 0) - start;
}

/** A slot's box. */
class SlotBox {
  element = createElement("li", "slot", "");
  #name = createElement("span", "", "");
  #state = createElement("span", "state", "");
  #device = createElement("p", "", "");
  #reason = createElement("p", "reason", "");
  #progress = document.createElement("progress");
  #rows = createElement("div", "rows", "");
  #memory = createElement("dd", "memory", "");
  #busy = createElement("dd", "", "");
  #tokens = createElement("dd", "", "");
  #step = createElement("dd", "", "");

  constructor() {
    const heading = document.createElement("h2");
    heading.append(this.#name, this.#state);
    const figures = document.createElement("dl");
    for (const [name, value] of /** @type {[string, HTMLElement][]} */ ([
      ["memory", this.#memory], ["branches", this.#busy], ["tokens/s", this.#tokens], ["ms/step", this.#step],
    ])) {
      figures.append(createElement("dt", "", name), value);
    }
    this.#rows.ariaHidden = "true"; // the figure of branches says the same
    this.#progress.ariaLabel = "loaded";
    this.element.append(heading, this.#device, this.#progress, this.#rows, this.#reason, figures);
  }

  /** @param {Slot} slot  @param {number} tokensPerSecond */
  show(slot, tokensPerSecond) {
    const busy = Math.max(slot.in_flight, slot.peak_in_flight);
    const state = slot.state === "warm" && busy ? "serves"
      : slot.state === "loading" && slot.progress === 1 ? "warms" : (STATES[slot.state] ?? slot.state);
    const isWarm = slot.state === "warm" || slot.state === "draining";
    this.element.dataset.state = state;
    setText(this.#name, `${slot.slot} · ${slot.model}`);
    setText(this.#state, state);
    setText(this.#device, [slot.device, slot.dtype].filter(Boolean).join(", "));
    setText(this.#reason, slot.reason ?? "");
    this.#reason.hidden = !slot.reason;
    this.#progress.hidden = slot.state !== "loading";
    this.#progress.value = slot.progress;
    this.#rows.hidden = !isWarm;
    while (this.#rows.childElementCount < slot.max_batch) this.#rows.append(document.createElement("span"));
    [...this.#rows.children].forEach((row, index) => row.classList.toggle("busy", index < busy));
    setText(this.#memory, slot.memory_bytes ? `${Math.round(slot.memory_bytes / 1e6).toLocaleString("en")} MB` : "–");
    setText(this.#busy, isWarm ? `${busy} of ${slot.max_batch}` : "–");
    setText(this.#tokens, isWarm ? formatRate(tokensPerSecond) : "–");
    setText(this.#step, isWarm ? slot.ms_per_token.toFixed(1) : "–");
  }
}

/**
 * The time below which a share of the answers stayed, as Prometheus' `histogram_quantile` estimates it.
 * @param {number} share
 * @param {number[]} bounds  Of the buckets, in seconds.
 * @param {number[]} counts  Answers up to each bound, and of all.
 * @returns {number|null}  Null: there was no answer.
 */
function quantile(share, bounds, counts) {
  const rank = share * /** @type {number} */ (counts.at(-1));
  if (!rank) return null;
  const index = counts.findIndex((count) => count >= rank);
  if (index >= bounds.length) return bounds[bounds.length - 1];
  const [lower, before] = index ? [bounds[index - 1], counts[index - 1]] : [0, 0];
  return lower + ((bounds[index] - lower) * (rank - before)) / (counts[index] - before);
}

/** @param {number|null} seconds  @returns {string} */
function formatSeconds(seconds) {
  return seconds === null ? "–" : `${Math.round(seconds * 1000).toLocaleString("en")} ms`;
}

/** @param {number} rate  @returns {string} */
function formatRate(rate) {
  return rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
}

document.addEventListener("visibilitychange", () => void poll());
void poll();
