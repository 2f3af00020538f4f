// The field for the API key in the settings form: its value, its message, and where the key is kept. It does not know
// when the server requires a key, nor what is sent.
//
// The browser forgets the key when the tab is closed (sessionStorage), because anyone who uses the browser later could
// write with it. The checkbox keeps it longer (localStorage), for a browser that only its owner uses.

import { setText } from "./dom.js";
import { load, remove, save } from "./store.js";

const ITEM = "key";

export class KeyField {
  #input;
  #keep;
  #note;
  #onChange;

  /**
   * Restores the stored key.
   * @param {HTMLFormElement} form  The form of the two inputs, which are elsewhere in the page.
   * @param {HTMLElement} note  Shows the message; describes the field.
   * @param {(key: string) => void} onChange  Called with the new key; empty: none.
   * @param {() => void} onSubmit  Called after the writer pressed Enter in the field.
   */
  constructor(form, note, onChange, onSubmit) {
    this.#input = /** @type {HTMLInputElement} */ (form.elements.namedItem("key"));
    this.#keep = /** @type {HTMLInputElement} */ (form.elements.namedItem("keep-key"));
    this.#note = note;
    this.#onChange = onChange;
    const kept = load(ITEM);
    this.#keep.checked = Boolean(kept);
    this.#input.value = load(ITEM, "sessionStorage") ?? kept ?? "";
    // The inputs are inside another form's element, whose own listeners must not take them for settings.
    for (const input of [this.#input, this.#keep]) input.addEventListener("input", (event) => event.stopPropagation());
    for (const input of [this.#input, this.#keep]) input.addEventListener("change", () => this.#handleChange());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      onSubmit();
    });
  }

  /** The key to send; empty: none. @returns {string} */
  get key() {
    return this.#input.value.trim();
  }

  /** Move the focus into the field. */
  focus() {
    this.#input.focus();
    this.#input.select();
  }

  /** Show a message at the field, or none. The focus stays where it is. @param {string} message */
  showProblem(message) {
    setText(this.#note, message);
    this.#input.ariaInvalid = String(Boolean(message));
  }

  #handleChange() {
    remove(ITEM);
    remove(ITEM, "sessionStorage");
    if (this.key) save(ITEM, this.key, this.#keep.checked ? "localStorage" : "sessionStorage");
    this.#onChange(this.key);
  }
}
