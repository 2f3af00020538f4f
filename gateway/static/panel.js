// Suggestions under the cursor: a list for the eye, for the pointer and for a screen reader, and the details of one.
// Shows what it is given; knows no text and no server.

import { element, write } from "./dom.js";

/** @typedef {import("./tercet.js").View} View */
/** @typedef {import("./tercet.js").Sentence} Sentence */

/** Kept free below the panel. */
const MARGIN_PX = 32;

export class Panel {
  #panel;
  #paper;
  #list;
  #details;
  #lowest = 0;

  /** @param {HTMLElement} panel */
  constructor(panel) {
    this.#panel = panel;
    this.#paper = /** @type {HTMLElement} */ (panel.parentElement);
    this.#list = /** @type {HTMLElement} */ (panel.querySelector("[role=listbox]"));
    this.#details = /** @type {HTMLElement} */ (panel.querySelector("section"));
  }

  get isOpen() {
    return !this.#panel.hidden;
  }

  /** The chosen option's id. @returns {string} */
  get chosenId() {
    return this.#list.querySelector("[aria-selected=true]:not([hidden])")?.id ?? "";
  }

  /**
   * @param {View} view
   * @param {string} context  What stands before the cursor.
   */
  show({ suggestions, chosen }, context) {
    this.#panel.hidden = !suggestions.length;
    if (this.#panel.hidden) return this.#rise();
    const options = suggestions.map((one) => {
      const option = this.#option(one.branch);
      option.ariaSelected = String(one === chosen);
      option.classList.toggle("is-growing", !one.isWhole);
      write(option.children[0], beginning(context, one.rest));
      write(option.children[1], readable(one.rest));
      return option;
    });
    // Those that are ruled out stay, unseen: see `write` for what becomes of undo where nodes go while somebody types.
    const known = /** @type {HTMLElement[]} */ (Array.from(this.#list.children));
    for (const option of known) option.hidden = !options.includes(option);
    const seen = known.filter((option) => !option.hidden);
    if (options.some((option, index) => seen[index] !== option)) this.#list.replaceChildren(...options);
    return undefined;
  }

  /** @param {number} bottom  Of what stands above it. While it is open it only goes down, so as not to jump about. */
  placeUnder(bottom) {
    this.#lowest = Math.max(this.#lowest, bottom);
    this.#panel.style.top = `${this.#lowest}px`;
    this.#paper.style.minHeight = `${this.#lowest + this.#panel.offsetHeight + MARGIN_PX}px`;
  }

  /** What stands above it is whole, and nobody has read on: it may take its place anew. */
  settle() {
    this.#lowest = 0;
  }

  #rise() {
    this.#lowest = 0;
    this.#paper.style.minHeight = "";
  }

  /** @param {Node[]} parts  None: the details are closed. */
  showDetails(parts) {
    if (this.#details.hidden && !parts.length) return;
    this.#details.hidden = !parts.length;
    this.#details.replaceChildren(...parts);
  }

  /** @param {number} branch @returns {HTMLElement} */
  #option(branch) {
    const id = `suggestion-${branch}`;
    const known = /** @type {HTMLElement|null} */ (this.#list.querySelector(`#${id}`));
    if (known) return known;
    const option = document.createElement("li");
    option.id = id;
    option.role = "option";
    option.dataset.branch = String(branch);
    option.append(element("span", "lead", ""), element("span", "", ""));
    return option;
  }
}

/**
 * What there is to know of a sentence: a line of figures, and each token above what else was likely there.
 * @param {Sentence} sentence
 * @returns {Node[]}
 */
export function describe(sentence) {
  const figures = element("p", "figures", [
    `score ${sentence.score?.toFixed(2).replace("-", "−") ?? "–"} (${percent(sentence.score)} a token)`,
    `seed ${sentence.seed}`,
    `${sentence.model}, slot ${sentence.slot}`,
    `${sentence.tokens} tokens in ${Math.round(sentence.time * 1e3)} ms`,
    `(queue ${sentence.queue_ms.toFixed(0)}, prompt ${sentence.prefill_ms.toFixed(0)}, text ${sentence.decode_ms.toFixed(0)};`
      + ` ${sentence.cached_tokens} tokens cached)`,
  ].join(" · ").replace(" · (", " ("));
  const tokens = document.createElement("ol");
  for (const token of sentence.explanation ?? []) {
    const item = element("li", "", "");
    const drawn = element("span", "token", mark(token.text));
    drawn.append(element("span", "share", ` ${percent(token.logprob)}`));
    item.append(drawn);
    for (const [text, logprob] of token.likeliest) {
      if (text === token.text) continue;
      const other = element("span", "other", mark(text));
      other.append(element("span", "share", ` ${percent(logprob)}`));
      item.append(other);
    }
    tokens.append(item);
  }
  return [figures, tokens];
}

/** @param {number|null} logprob */
function percent(logprob) {
  if (logprob === null) return "–";
  const share = 100 * Math.exp(logprob);
  return share < 0.1 ? "<0.1 %" : `${share.toFixed(share < 10 ? 1 : 0)} %`;
}

/**
 * What is written of the word that a suggestion goes on with.
 * @param {string} context
 * @param {string} rest
 */
function beginning(context, rest) {
  return /^\s/.test(rest) ? "" : context.slice(-24).match(/\S*$/)?.[0] ?? "";
}

/** A suggestion on a line of its own. @param {string} text */
function readable(text) {
  return text.trim().replace(/\s*\n\s*/g, " ¶ ");
}

/** A token by itself: what of it is a new line. @param {string} text */
function mark(text) {
  return text.replaceAll("\n", "¶").trim() || "␣";
}
