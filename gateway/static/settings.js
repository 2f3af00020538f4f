// The settings form. Its values become fields of each request and are kept in this browser.

import { setText } from "./dom.js";
import { load, save } from "./store.js";

/** @typedef {{model: string, warning: string|null}} Model  An entry of `models` in `GET /health/ready`. */

/** Name of the input that says when suggestions appear; the other inputs are named like request fields. */
const MODE_INPUT = "mode";

export class Settings {
  #form;

  /**
   * Restores the stored values.
   * @param {HTMLFormElement} form
   * @param {() => void} onChange  Called after the writer changed or reset a setting.
   */
  constructor(form, onChange) {
    this.#form = form;
    this.#restore(load("settings") ?? {});
    this.#updateOutputs();
    form.addEventListener("input", () => this.#handleChange(onChange));
    form.addEventListener("submit", (event) => event.preventDefault());
    // The reset event fires before the inputs change.
    form.addEventListener("reset", () => queueMicrotask(() => this.#handleChange(onChange)));
  }

  /** Fields of a request. Empty and invalid inputs are left out. @returns {import("./tercet.js").RequestFields} */
  get requestFields() {
    /** @type {import("./tercet.js").RequestFields} */
    const fields = {};
    for (const input of this.#inputs()) {
      if (input.name === MODE_INPUT || !input.checkValidity() || input.value === "") continue;
      fields[input.name] = readValue(input);
    }
    return fields;
  }

  /** When suggestions appear unasked, and how readily. @returns {"eager"|"normal"|"quiet"|"pauses"|"off"} */
  get eagerness() {
    const input = /** @type {HTMLSelectElement} */ (this.#form.elements.namedItem(MODE_INPUT));
    return /** @type {any} */ (input.value);
  }

  /**
   * List the models to choose from, and show the warning of the chosen model.
   * @param {Model[]} models  The models being served.
   */
  setModels(models) {
    const select = /** @type {HTMLSelectElement} */ (this.#form.elements.namedItem("model_size"));
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

  #inputs() {
    return /** @type {(HTMLInputElement|HTMLSelectElement)[]} */ (
      Array.from(this.#form.elements).filter((element) => "name" in element && element.name)
    );
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

  /** @param {() => void} onChange */
  #handleChange(onChange) {
    this.#updateOutputs();
    save("settings", Object.fromEntries(this.#inputs().map((input) => [input.name, readValue(input)])));
    onChange();
  }

  /** Show the values of the sliders. */
  #updateOutputs() {
    for (const output of this.#form.querySelectorAll("output")) {
      const input = /** @type {HTMLInputElement} */ (this.#form.querySelector(`#${output.htmlFor}`));
      output.value = input.name === "length" ? `${input.value} tokens` : Number(input.value).toFixed(2);
    }
  }
}

/** @param {HTMLInputElement|HTMLSelectElement} input  @returns {boolean|number|string|null}  Null: an empty number. */
function readValue(input) {
  if (input.type === "checkbox") return /** @type {HTMLInputElement} */ (input).checked;
  if (input.type === "number" || input.type === "range") return input.value === "" ? null : Number(input.value);
  return input.value;
}
