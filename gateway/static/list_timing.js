// When the list of suggestions is shown, beside the ghost text. Asked for, it is shown at once; unasked, once the first
// suggestion and the writer have stood still. It never flickers. This module does not know what is in the list.

/** The first suggestion must have been the same for this long, without a key, before an unasked list is shown. */
const MIN_STILL_MS = 400;

/** A list stays open for at least this long, unless the writer accepts, dismisses or moves away. */
const MIN_OPEN_MS = 400;

export class ListTiming {
  isOpen = false;
  #openedAtMs = 0;
  /** What the first place shows. @type {object|null} */
  #first = null;
  /** @type {"now"|"still"|"never"} */
  #when = "never";
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #timer;
  #onChange;

  /** @param {() => void} onChange  Called when `isOpen` has changed because time passed. */
  constructor(onChange) {
    this.#onChange = onChange;
  }

  /**
   * @param {object|null} first  Identifies the suggestion of the first place; null: there is none.
   * @param {"now"|"still"|"never"} when  Show the list now; once the suggestion has stood still; not at all.
   */
  update(first, when) {
    const hasMoved = first !== this.#first;
    if (!hasMoved && when === this.#when) return;
    this.#first = first;
    this.#when = when;
    if (first && when === "now") this.#open();
    else if (!this.isOpen) this.#openLater();
    else if (hasMoved || when === "never") this.#closeLater();
  }

  /** The writer pressed a key: an unasked list waits anew. */
  recordKey() {
    if (!this.isOpen) this.#openLater();
  }

  /** Close at once: the writer accepted, dismissed or moved away. */
  close() {
    clearTimeout(this.#timer);
    this.isOpen = false;
    this.#first = null;
  }

  #open() {
    clearTimeout(this.#timer);
    if (!this.isOpen) this.#openedAtMs = performance.now();
    this.isOpen = true;
  }

  #openLater() {
    clearTimeout(this.#timer);
    if (!this.#first || this.#when === "never") return;
    this.#timer = setTimeout(() => (this.#open(), this.#onChange()), MIN_STILL_MS);
  }

  #closeLater() {
    clearTimeout(this.#timer);
    const closesInMs = this.#openedAtMs + MIN_OPEN_MS - performance.now();
    if (closesInMs > 0) this.#timer = setTimeout(() => (this.#close(), this.#onChange()), closesInMs);
    else this.#close();
  }

  #close() {
    this.isOpen = false;
    this.#openLater();
  }
}
