// The suggestion panel: a listbox of suggestions and the details of the chosen suggestion.
// It renders what it is given, and does not know the editor or the server.

import { createElement, setText } from "./dom.js";
import { listedBesideGhost, typedPrefix } from "./editor_adapter.js";

/** @typedef {import("./tercet.js").View} View */
/** @typedef {import("./tercet.js").Sentence} Sentence */

/** Space kept below the panel. */
const MARGIN_BOTTOM_PX = 32;

export class SuggestionPanel {
  #panel;
  #container;
  #list;
  #details;
  #topPx = 0;

  /**
   * @param {HTMLElement} panel  Contains an element with `role=listbox`, an option for each place, and a `section` for
   *   the details.
   */
  constructor(panel) {
    this.#panel = panel;
    this.#container = /** @type {HTMLElement} */ (panel.parentElement);
    this.#list = /** @type {HTMLElement} */ (panel.querySelector("[role=listbox]"));
    this.#details = /** @type {HTMLElement} */ (panel.querySelector("section"));
  }

  get isOpen() {
    return !this.#panel.hidden;
  }

  /** Element id of the chosen option, for `aria-activedescendant`; empty if there is none. @returns {string} */
  get chosenId() {
    return this.#list.querySelector("[aria-selected=true]:not([hidden])")?.id ?? "";
  }

  /**
   * Show the list of a view, or hide the panel.
   * @param {View} view
   * @param {string} context  The end of the text before the caret.
   * @param {boolean} isStrip  The panel is a strip, which is shown whenever there are suggestions.
   */
  show(view, context, isStrip) {
    const { suggestions, chosen, isListed } = view;
    this.#panel.hidden = !(isListed || (isStrip && suggestions.length));
    if (this.#panel.hidden) {
      this.#list.classList.remove("is-expanded");
      this.resetPosition();
      this.#container.style.minHeight = "";
      return;
    }
    // A list that stays open for a moment, so that it does not flicker, shows what it did, dimmed.
    const listed = isStrip ? suggestions : listedBesideGhost(view);
    this.#list.classList.toggle("is-past", !listed.length);
    if (!listed.length) return;
    // Free places are hidden, not removed: removing a node ends the typing undo step (see `setText`).
    for (const [place, option] of Array.from(this.#list.children).entries()) {
      const suggestion = listed.find((each) => each.place === place);
      option.toggleAttribute("hidden", !suggestion);
      if (!suggestion) continue;
      option.ariaSelected = String(suggestion === chosen);
      option.classList.toggle("is-streaming", !suggestion.isFinished);
      setText(option.children[1], typedPrefix(context, suggestion));
      setText(option.children[2], singleLine(suggestion.rest));
    }
  }

  /**
   * Place the panel below the text. While it is open it only moves down, so that it does not jump while ghost text of
   * different lengths is shown.
   * @param {number} topPx  Pixels from the container's top.
   */
  placeAt(topPx) {
    this.#topPx = Math.max(this.#topPx, topPx);
    this.#panel.style.top = `${this.#topPx}px`;
    this.#container.style.minHeight = `${this.#topPx + this.#panel.offsetHeight + MARGIN_BOTTOM_PX}px`;
  }

  /** Show the suggestions of a strip whole, below each other. */
  expand() {
    this.#list.classList.add("is-expanded");
  }

  /** Allow the next `placeAt` to move the panel up. */
  resetPosition() {
    this.#topPx = 0;
  }

  /** @param {Node[]} nodes  Content of the details; empty: hide them. */
  showDetails(nodes) {
    if (this.#details.hidden && !nodes.length) return;
    this.#details.hidden = !nodes.length;
    this.#details.replaceChildren(...nodes);
  }
}

/**
 * Details of a sentence: a line of statistics, then a list of its tokens, each with its probability and the likeliest
 * alternatives.
 * @param {Sentence} sentence  With its `explanation`.
 * @returns {Node[]}
 */
export function renderDetails(sentence) {
  const { score, seed, model, slot, tokens, time } = sentence;
  const statistics = createElement("p", "statistics", [
    `score ${score?.toFixed(2).replace("-", "−") ?? "–"} (${formatProbability(score)} per token)`,
    `seed ${seed}`,
    `${model}, slot ${slot}`,
    `${tokens} tokens in ${Math.round(time * 1e3)} ms (queue ${sentence.queue_ms.toFixed(0)},`
      + ` prefill ${sentence.prefill_ms.toFixed(0)}, decode ${sentence.decode_ms.toFixed(0)};`
      + ` ${sentence.cached_tokens} prompt tokens cached)`,
  ].join(" · "));
  const list = document.createElement("ol");
  for (const token of sentence.explanation ?? []) {
    const item = createElement("li", "", "");
    item.append(renderToken("token", token.text, token.logprob));
    for (const [text, logprob] of token.likeliest) {
      if (text !== token.text) item.append(renderToken("alternative", text, logprob));
    }
    list.append(item);
  }
  return [statistics, list];
}

/** @param {string} className @param {string} text @param {number} logprob */
function renderToken(className, text, logprob) {
  const element = createElement("span", className, visibleToken(text));
  element.append(createElement("span", "probability", ` ${formatProbability(logprob)}`));
  return element;
}

/** @param {number|null} logprob  Natural logarithm. @returns {string}  A percentage. */
function formatProbability(logprob) {
  if (logprob === null) return "–";
  const percent = 100 * Math.exp(logprob);
  return percent < 0.1 ? "<0.1 %" : `${percent.toFixed(percent < 10 ? 1 : 0)} %`;
}

/** A suggestion as a list item: line breaks become pilcrows. @param {string} text */
function singleLine(text) {
  return text.trim().replace(/\s*\n\s*/g, " ¶ ");
}

/** A token with visible whitespace. @param {string} text */
function visibleToken(text) {
  return text.replaceAll("\n", "¶").trim() || "␣";
}
