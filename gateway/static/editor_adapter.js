// What the adapters for textareas, CodeMirror and ProseMirror share: options, ghost text, and a list of the suggestions
// that takes clicks. It does not know any editor or the server.

/** @typedef {import("./completer.js").Completer} Completer */
/** @typedef {Completer["view"]} View */

/**
 * @typedef {object} DisplayOptions
 * @property {HTMLElement|false} [list]  Filled with the suggestions; false: no list. Default: a list at the caret.
 * @property {HTMLElement} [panel]  The suggestions stay while the focus is in it. Default: the list.
 * @property {(view: View) => void} [show]  Also called after every change, for other displays.
 *
 * @typedef {ConstructorParameters<typeof import("./completer.js").Completer>[0]} CompleterOptions
 *
 * @typedef {Omit<CompleterOptions, "context"|"position"|"after"|"insert"|"show"> & DisplayOptions} Options
 *   `Completer`'s options, except for those that the adapter provides.
 */

// A site's own rules for these classes win, because these have no specificity. A Content-Security-Policy does not
// restrict a style sheet made by a script. System colors follow the page's color scheme.
const STYLES = `
  :where(.tercet-ghost) { color: color-mix(in srgb, currentColor 62%, transparent); white-space: pre-wrap }
  :where(.tercet-list) {
    margin: 0; padding: 4px 10px 4px 30px; max-width: min(36em, 90vw); border-radius: 6px;
    border: 1px solid color-mix(in srgb, CanvasText 25%, transparent);
    background: Canvas; color: CanvasText; font: 14px/1.5 system-ui, sans-serif;
  }
  :where(.tercet-list:empty) { display: none }
  :where(.tercet-list li) { cursor: pointer }
  :where(.tercet-list [aria-current=true]) { font-weight: 600 }
  @media (forced-colors: active) { :where(.tercet-ghost) { color: GrayText } }
`;

/** A document and its shadow roots can share a style sheet; documents of other windows and frames cannot. */
const styleSheets = /** @type {WeakMap<Document, CSSStyleSheet>} */ (new WeakMap());

/**
 * Apply the styles to the document or shadow root that a node belongs to.
 * @param {Node} node  Of a node that is not attached, its document is meant.
 */
export function adoptStyles(node) {
  const owner = node.ownerDocument ?? /** @type {Document} */ (node);
  const topmost = node.getRootNode();
  const root = "adoptedStyleSheets" in topmost ? /** @type {Document|ShadowRoot} */ (topmost) : owner;
  let styleSheet = styleSheets.get(owner);
  if (!styleSheet) {
    styleSheet = new (owner.defaultView ?? globalThis).CSSStyleSheet();
    styleSheet.replaceSync(STYLES);
    styleSheets.set(owner, styleSheet);
  }
  if (!root.adoptedStyleSheets.includes(styleSheet)) root.adoptedStyleSheets.push(styleSheet);
}

/**
 * Whether a `blur` event means that the writer has left the editor, so that its suggestions close. Another window may have
 * the focus for a moment; the suggestions are still there when the writer comes back.
 * @param {FocusEvent} event
 * @param {HTMLElement} [panel]  Belongs to the editor.
 */
export function isLeaving({ relatedTarget }, panel) {
  const isFocusInside = relatedTarget instanceof Node && panel?.contains(relatedTarget);
  return !isFocusInside && !document.hidden && document.hasFocus();
}

/**
 * An element for text that is not part of the document. Hidden from screen readers, which would read it as if it were.
 * @param {string} text
 * @returns {HTMLElement}
 */
export function ghostElement(text) {
  const element = document.createElement("span");
  element.className = "tercet-ghost";
  element.setAttribute("aria-hidden", "true");
  element.textContent = text;
  return element;
}

/** Shows suggestions in a list element; the number of each is the one of its key (Alt+1, …). */
export class SuggestionList {
  #listeners = new AbortController();

  /**
   * @param {HTMLElement} element  Emptied and filled; an `ol` shows the numbers.
   * @param {(place: number) => void} accept  Called with the place of a clicked suggestion.
   */
  constructor(element, accept) {
    this.element = element;
    element.classList.add("tercet-list");
    const { signal } = this.#listeners;
    // On mousedown, because the item may be replaced before the click; prevented, so that the editor keeps the focus.
    element.addEventListener("mousedown", (event) => {
      event.preventDefault();
      const item = /** @type {Element} */ (event.target).closest("li");
      if (item && event.button === 0) accept(item.value - 1);
    }, { signal });
  }

  /** @param {View|null} view */
  show(view) {
    const suggestions = view?.isListed ? view.suggestions : [];
    if (view?.isListed && !suggestions.length) return; // a list that stays for a moment, so that it does not flicker
    const items = suggestions.map((suggestion) => {
      const item = document.createElement("li");
      item.value = suggestion.place + 1;
      item.dir = "auto";
      item.textContent = suggestion.rest.trim();
      item.ariaCurrent = String(suggestion === view?.chosen);
      return item;
    });
    this.element.replaceChildren(...items);
  }

  /** Empty the element and stop listening. */
  destroy() {
    this.#listeners.abort();
    this.element.classList.remove("tercet-list");
    this.element.replaceChildren();
  }
}

/**
 * What a screen reader should say about a view: the chosen suggestion, if the writer requested suggestions or chose
 * one. Automatic suggestions must not interrupt the writing.
 * @param {View|null} view
 * @param {View|null} previous  The view before it.
 * @returns {string}  Empty: nothing.
 */
export function announcement(view, previous) {
  if (!view?.chosen || view.status !== "ready" || !(view.isExplicit || view.isChosenByUser)) return "";
  if (previous?.status === "ready" && previous.chosen?.text === view.chosen.text) return "";
  const { suggestions, chosen } = view;
  return `Suggestion ${suggestions.indexOf(chosen) + 1} of ${suggestions.length}: ${chosen.rest.trim()}`;
}
