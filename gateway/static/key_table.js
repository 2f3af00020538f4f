// The keys of the suggestions in the page: names them wherever an element has `data-key`, and lets the writer choose others,
// which stay in this browser. It does not know the suggestions.

import { setText } from "./dom.js";
import { ACTIONS, chordOf, DEFAULT_KEYS, labelOf, refusalOf } from "./keys.js";
import { load, remove, save } from "./store.js";

/** @typedef {import("./keys.js").Keys} Keys */

const MODIFIER = /^(?:Alt|AltGraph|CapsLock|Control|Fn|Meta|Shift)$/;

export class KeyTable {
  #keys = DEFAULT_KEYS;
  /** The button that waits for a chord. @type {HTMLElement|null} */
  #recording = null;
  #status;
  #hint;

  /**
   * @param {HTMLElement} table  Has a button for each action, an element with `role=status`, and a button with the value `reset`.
   * @param {() => void} onChange  Called after the writer chose a key.
   */
  constructor(table, onChange) {
    this.#status = /** @type {HTMLElement} */ (table.querySelector("[role=status]"));
    this.#hint = this.#status.textContent ?? "";
    table.addEventListener("click", ({ target }) => {
      const button = target instanceof Element ? target.closest("button") : null;
      if (button?.dataset.key) this.#record(button);
      if (button?.value === "reset") remove("keys");
      if (button?.value === "reset") onChange();
    });
    table.addEventListener("focusout", () => this.#stop());
    table.addEventListener("keydown", (event) => this.#press(event) && onChange(), { capture: true });
  }

  /** The writer's own keys. @returns {Partial<Keys>} */
  get own() {
    const known = Object.entries(load("keys") ?? {}).filter(([action]) => action in DEFAULT_KEYS);
    return Object.fromEntries(known.map(([action, chord]) => [action, [String(chord)]]));
  }

  /** @param {Keys} keys */
  show(keys) {
    this.#keys = keys;
    for (const element of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-key]"))) {
      const chords = keys[/** @type {keyof Keys} */ (element.dataset.key)];
      const isButton = element instanceof HTMLButtonElement;
      setText(element, isButton ? chords.map(labelOf).join(", ") || "none" : labelOf(chords[0]));
      if (isButton) element.ariaLabel = `${element.textContent}: ${describe(element)}. Change it.`;
      element.closest("[aria-keyshortcuts]")?.setAttribute("aria-keyshortcuts", chords[0]?.replace("Ctrl", "Control") ?? "");
    }
  }

  /** @param {HTMLElement} button */
  #record(button) {
    button.focus(); // Safari does not
    this.#recording = button;
    setText(button, "press keys");
    setText(this.#status, `Press the keys for “${describe(button)}”. Esc leaves them as they are.`);
  }

  #stop(message = this.#hint) {
    if (this.#recording) setText(this.#status, message);
    this.#recording = null;
    this.show(this.#keys);
  }

  /** @param {KeyboardEvent} event  @returns {boolean}  Whether the writer has chosen a chord. */
  #press(event) {
    const button = this.#recording;
    if (!button) return false;
    event.preventDefault();
    event.stopPropagation();
    if (event.repeat || event.isComposing || MODIFIER.test(event.key)) return false;
    const action = button.dataset.key ?? "";
    const chord = chordOf(event);
    const other = ACTIONS.find((each) => each !== action && this.#keys[each].includes(chord));
    const named = document.querySelector(`button[data-key=${other}]`);
    const refusal = named ? `${labelOf(chord)} is for “${describe(named)}” already.` : refusalOf(chord);
    if (chord === "Escape" && action !== "dismiss") this.#stop();
    else if (refusal) setText(this.#status, `${refusal} Press other keys, or Esc.`);
    else this.#stop(`${labelOf(chord)}: ${describe(button)}.`);
    if (!this.#recording && !refusal) save("keys", { ...load("keys"), [action]: chord });
    return !this.#recording && !refusal;
  }
}

/** What an action does, as its row says it. @param {Element} button */
function describe(button) {
  return button.getAttribute("title") ?? button.closest("div")?.querySelector("dd")?.textContent ?? "";
}
