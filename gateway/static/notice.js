// A notice at the bottom of the page, with an Undo button if there is something to undo. It does not know what it says.

import { setText } from "./dom.js";

/** Time to read the notice and to reach its button, in milliseconds. */
const VISIBLE_MS = 15_000;

export class Notice {
  #element;
  #button;
  #announce;
  /** @type {(() => void)|null} */
  #undo = null;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #timer;

  /**
   * @param {HTMLElement} element  A manual popover, shown above other popovers; contains a `span` and a `button`.
   * @param {(message: string) => void} announce  Presents a message to screen readers.
   */
  constructor(element, announce) {
    this.#element = element;
    this.#button = /** @type {HTMLButtonElement} */ (element.querySelector("button"));
    this.#announce = announce;
    this.#button.addEventListener("click", () => {
      const undo = this.#undo;
      this.#hide();
      undo?.();
    });
  }

  /**
   * Show a message, in place of the previous one.
   * @param {string} message
   * @param {() => void} [undo]  What the Undo button does. Default: no button.
   */
  show(message, undo) {
    this.#undo = undo ?? null;
    this.#button.hidden = !undo;
    setText(/** @type {HTMLElement} */ (this.#element.querySelector("span")), message);
    this.#announce(undo ? `${message} Undo is available.` : message);
    this.#element.hidePopover();
    this.#element.showPopover();
    this.#hideLater();
  }

  #hideLater() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      if (this.#element.matches(":hover, :focus-within")) this.#hideLater();
      else this.#hide();
    }, VISIBLE_MS);
  }

  #hide() {
    clearTimeout(this.#timer);
    this.#undo = null;
    this.#element.hidePopover();
  }
}
