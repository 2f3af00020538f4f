// The settings form: what it holds goes with each request, and is kept in this browser.

import { write } from "./dom.js";
import { load, save } from "./store.js";

/** @typedef {{model: string, warning: string|null}} Model */

export class Settings {
  #form;

  /**
   * @param {HTMLFormElement} form
   * @param {() => void} onChange
   */
  constructor(form, onChange) {
    this.#form = form;
    this.#restore(load("settings") ?? {});
    this.#label();
    form.addEventListener("input", () => this.#changed(onChange));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => queueMicrotask(() => this.#changed(onChange)));
  }

  /** Fields of a request. What is out of its range stays out. @returns {Record<string, unknown>} */
  get options() {
    /** @type {Record<string, unknown>} */
    const options = {};
    for (const input of this.#inputs()) {
      if (input.name === "pauses" || !input.checkValidity() || input.value === "") continue;
      options[input.name] = read(input);
    }
    return options;
  }

  get asksAtPauses() {
    return Boolean(read(this.#input("pauses")));
  }

  /** @param {Model[]} models  Those served now. */
  offer(models) {
    const select = /** @type {HTMLSelectElement} */ (this.#form.elements.namedItem("model_size"));
    const names = models.map((one) => one.model);
    if (names.join() !== Array.from(select.options, (option) => option.value).join()) {
      const wanted = select.value || load("settings")?.model_size;
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      select.value = names.includes(wanted) ? wanted : names[0] ?? "";
    }
    const chosen = models.find((one) => one.model === select.value);
    const note = /** @type {HTMLElement} */ (this.#form.querySelector("#model-note"));
    write(note, chosen?.warning ?? "");
  }

  #inputs() {
    return /** @type {(HTMLInputElement|HTMLSelectElement)[]} */ (
      Array.from(this.#form.elements).filter((one) => "name" in one && one.name)
    );
  }

  /** @param {string} name */
  #input(name) {
    return /** @type {HTMLInputElement} */ (this.#form.elements.namedItem(name));
  }

  /** @param {Record<string, unknown>} kept */
  #restore(kept) {
    for (const input of this.#inputs()) {
      const value = kept[input.name];
      if (value === undefined || value === null) continue;
      if (input.type === "checkbox") /** @type {HTMLInputElement} */ (input).checked = Boolean(value);
      else input.value = String(value);
    }
  }

  /** @param {() => void} onChange */
  #changed(onChange) {
    this.#label();
    save("settings", Object.fromEntries(this.#inputs().map((input) => [input.name, read(input)])));
    onChange();
  }

  #label() {
    for (const output of this.#form.querySelectorAll("output")) {
      const input = /** @type {HTMLInputElement} */ (this.#form.querySelector(`#${output.htmlFor}`));
      output.value = input.name === "length" ? `${input.value} tokens` : Number(input.value).toFixed(2);
    }
  }
}

/** @param {HTMLInputElement|HTMLSelectElement} input */
function read(input) {
  if (input.type === "checkbox") return /** @type {HTMLInputElement} */ (input).checked;
  if (input.type === "number" || input.type === "range") return input.value === "" ? null : Number(input.value);
  return input.value;
}
