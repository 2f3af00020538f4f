// The settings form. Its values become fields of each request and are kept in this browser.
//
// Some fields have a slider in words ("cautious … daring") beside the exact number under Details. The number is the
// value; the slider shows it and changes it.

import { setText } from "./dom.js";
import { load, save } from "./store.js";

/** @typedef {{model: string, warning: string|null}} Model  An entry of `models` in `GET /health/ready`. */
/** @typedef {"eager"|"normal"|"quiet"|"pauses"|"off"} Eagerness  When suggestions are requested unasked. */

/** Names of the inputs for `Eagerness`, `isProseOnly` and `tabTakes`; the other inputs are named like request fields. */
const EAGERNESS_INPUT = "mode";
const PROSE_INPUT = "prose";
const TAB_INPUT = "tab_takes";
const PAGE_INPUTS = [EAGERNESS_INPUT, PROSE_INPUT, TAB_INPUT];
/** Words per token of English prose. */
const WORDS_PER_TOKEN = 0.75;

export class Settings {
  #form;

  /**
   * Restores the stored values.
   * @param {HTMLFormElement} form
   * @param {() => void} onChange  Called after the writer changed or reset a setting.
   */
  constructor(form, onChange) {
    this.#form = form;
    this.#restore(migrate(load("settings") ?? {}));
    this.#updateSliders();
    form.addEventListener("input", (event) => this.#handleInput(event, onChange));
    form.addEventListener("submit", (event) => event.preventDefault());
    // The reset event fires before the inputs change.
    form.addEventListener("reset", () => queueMicrotask(() => this.#handleChange(onChange)));
  }

  /** Fields of a request. Empty and invalid inputs are left out. @returns {import("./tercet.js").RequestFields} */
  get requestFields() {
    /** @type {import("./tercet.js").RequestFields} */
    const fields = {};
    for (const input of this.#inputs()) {
      if (PAGE_INPUTS.includes(input.name) || !input.checkValidity() || input.value === "") continue;
      fields[input.name] = readValue(input);
    }
    return fields;
  }

  /** When suggestions are requested unasked. @returns {Eagerness} */
  get eagerness() {
    return /** @type {Eagerness} */ (this.#input(EAGERNESS_INPUT).value);
  }

  /** Whether nothing is suggested unasked in code, front matter and mathematics. */
  get isProseOnly() {
    return Boolean(readValue(this.#input(PROSE_INPUT)));
  }

  /** What Tab takes of a suggestion. @returns {"all"|"word"} */
  get tabTakes() { return this.#input(TAB_INPUT).value === "word" ? "word" : "all"; }

  /**
   * List the models to choose from, and show the warning of the chosen model.
   * @param {Model[]} models  The models being served.
   */
  setModels(models) {
    const select = /** @type {HTMLSelectElement} */ (this.#input("model_size"));
    const names = models.map(({ model }) => model);
    if (names.join() !== Array.from(select.options, (option) => option.value).join()) {
      const wanted = select.value || load("settings")?.model_size;
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      select.value = names.includes(wanted) ? wanted : names[0] ?? "";
    }
    const chosen = models.find(({ model }) => model === select.value);
    const note = /** @type {HTMLElement} */ (this.#form.querySelector("#model-note"));
    setText(note, chosen?.warning ?? "");
  }

  /** The inputs with a value of their own: all but the sliders. */
  #inputs() {
    return /** @type {(HTMLInputElement|HTMLSelectElement)[]} */ (
      Array.from(this.#form.elements).filter((element) => "name" in element && element.name)
    );
  }

  /** @param {string} name */
  #input(name) {
    return /** @type {HTMLInputElement|HTMLSelectElement} */ (this.#form.elements.namedItem(name));
  }

  /** @returns {NodeListOf<HTMLInputElement>} */
  #sliders() {
    return this.#form.querySelectorAll("input[data-field]");
  }

  /** @param {Record<string, unknown>} stored */
  #restore(stored) {
    for (const input of this.#inputs()) {
      const value = stored[input.name];
      if (value === undefined || value === null) continue;
      if (input.type === "checkbox") /** @type {HTMLInputElement} */ (input).checked = Boolean(value);
      else input.value = String(value);
    }
  }

  /** @param {Event} event  @param {() => void} onChange */
  #handleInput({ target }, onChange) {
    const field = target instanceof HTMLInputElement && target.dataset.field;
    if (field) this.#input(field).value = target.value;
    this.#handleChange(onChange);
  }

  /** @param {() => void} onChange */
  #handleChange(onChange) {
    this.#updateSliders();
    save("settings", Object.fromEntries(this.#inputs().map((input) => [input.name, readValue(input)])));
    onChange();
  }

  /** Move the sliders to the numbers; a number beyond a slider's end moves it there. */
  #updateSliders() {
    for (const slider of this.#sliders()) {
      const { value } = this.#input(slider.dataset.field ?? "");
      if (value !== "") slider.value = value;
    }
    const words = /** @type {HTMLInputElement} */ (this.#form.querySelector("#words"));
    const output = /** @type {HTMLOutputElement} */ (this.#form.querySelector("output[for=words]"));
    output.value = `about ${Math.round(Number(this.#input("length").value) * WORDS_PER_TOKEN)} words`;
    words.ariaValueText = output.value;
  }
}

/**
 * Stored settings in their present form: a checkbox for suggestions at pauses is now one of several modes.
 * @param {Record<string, unknown>} stored
 * @returns {Record<string, unknown>}
 */
function migrate(stored) {
  return stored.pauses === false ? { [EAGERNESS_INPUT]: "off", ...stored } : stored;
}

/** @param {HTMLInputElement|HTMLSelectElement} input  @returns {boolean|number|string|null}  Null: an empty number. */
function readValue(input) {
  if (input.type === "checkbox") return /** @type {HTMLInputElement} */ (input).checked;
  if (input.type === "number") return input.value === "" ? null : Number(input.value);
  return input.value;
}
