// What the adapters for textareas, CodeMirror and ProseMirror share: options, ghost text, a list of the suggestions that
// takes clicks, and the connection of a completer with a view. It does not know any editor or the server.

import { Completer } from "./completer.js";
import { isInputMethods } from "./composition.js";
import { describeKeys } from "./keys.js";

/** @typedef {Completer["view"]} View */

/**
 * @typedef {object} DisplayOptions
 * @property {HTMLElement|false} [list]  Filled with the suggestions; false: no list. Default: a list at the caret.
 * @property {HTMLElement} [panel]  The suggestions stay while the focus is in it. Default: the list.
 * @property {(view: View) => void} [show]  Also called after every change, for other displays.
 *
 * @typedef {ConstructorParameters<typeof Completer>[0]} CompleterOptions
 *
 * @typedef {Omit<CompleterOptions, "context"|"position"|"after"|"insert"|"show"|"isEditable"> & DisplayOptions} Options
 *   `Completer`'s options, except for those that the adapter provides.
 */

// A site's own rules for these classes win, because these have no specificity. A Content-Security-Policy does not
// restrict a style sheet made by a script. Colors are those of Tercet's own editor, and follow the page's color scheme.
// Ghost text wraps as the text around it does. CodeMirror's image before a widget allows a line break in the middle of a
// word; out of the flow it does not, so lines break where they will once the text is typed.
const STYLES = `
  :where(.tercet-ghost) { color: color-mix(in srgb, currentColor 62%, transparent) }
  :where(.cm-editor:not([data-tercet-input]) .cm-widgetBuffer:has(+ .tercet-ghost)) { position: absolute }
  :where(.tercet-list) {
    margin: 0; padding: 6px; max-width: min(36em, 90vw); box-sizing: border-box; list-style-position: outside;
    border: 1px solid light-dark(#e4dfd3, #3a3733); border-radius: 10px;
    background: light-dark(#fffefb, #242220); color: light-dark(#26231e, #e8e3d8);
    box-shadow: 0 12px 32px -12px light-dark(#3c2f1a2e, #000a); font: 15px/1.5 system-ui, sans-serif; text-align: start;
  }
  :where(.tercet-list:empty) { display: none }
  :where(.tercet-list li) {
    margin-inline-start: 28px; padding: 5px 10px 5px 6px; border-radius: 5px; cursor: pointer; overflow-wrap: anywhere;
  }
  :where(.tercet-list li::marker) { color: light-dark(#6d675c, #a29b8e); font-size: 12px }
  :where(.tercet-list li:hover, .tercet-list [aria-current=true]) { background: light-dark(#f4ede1, #302c27) }
  :where(.tercet-list [aria-current=true]) { box-shadow: inset 2px 0 light-dark(#9a3c25, #e39a7f) }
  :where(.tercet-typed) { color: light-dark(#6d675c, #a29b8e) }
  @media (hover: hover) {
    :where(.tercet-list:not(:empty))::after {
      content: var(--tercet-keys) / ""; display: block;
      margin: 4px -6px -2px; padding: 4px 12px 0; border-top: 1px solid light-dark(#e4dfd3, #3a3733);
      color: light-dark(#6d675c, #a29b8e); font-size: 12px;
    }
  }
  @media (forced-colors: active) {
    :where(.tercet-ghost) { color: GrayText }
    :where(.tercet-list [aria-current=true]) { outline: 2px solid Highlight }
  }
`;

/** How much of a text's end is looked at for the word before the caret. */
const MAX_WORD_CHARS = 24;

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
 * Whether an item is chosen in another list of the field, as ARIA says it (`combobox`).
 * @param {Element} field
 * @param {HTMLElement|null} [own]  The list of suggestions.
 */
export function isOptionChosen(field, own) {
  const id = field.getAttribute("aria-activedescendant");
  return Boolean(id) && field.getAttribute("aria-expanded") !== "false" && !own?.querySelector(`#${CSS.escape(id ?? "")}`);
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

/**
 * The part of a word before the caret, if the suggestion completes that word; else empty. A list shows it before the
 * rest, because a part of a word alone cannot be read. A correction is all in it.
 * @param {string} context  The end of the text before the caret.
 * @param {View["suggestions"][0]} suggestion
 * @returns {string}
 */
export function typedPrefix(context, { rest, text, isCorrection }) {
  if (isCorrection) return `correct to: ${text}`;
  return /^\s/.test(rest) ? "" : context.slice(-MAX_WORD_CHARS).match(/\S*$/)?.[0] ?? "";
}

/** What a list shows beside ghost text: alternatives to it, or all once the writer requested or chose. @param {View} view */
export function listedBesideGhost({ suggestions, chosen, isExplicit, isChosenByUser }) {
  return isExplicit || isChosenByUser ? suggestions : suggestions.filter((each) => each !== chosen || each.isCorrection);
}

/** Whether a click is a tap on ghost text, which accepts it. A mouse sets the caret there. @param {Event} event */
export function isTapOnGhost({ target }) {
  return target instanceof Element && Boolean(target.closest(".tercet-ghost")) && matchMedia("(pointer: coarse)").matches;
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

  /**
   * @param {View|null} view
   * @param {string} context  The end of the text before the caret.
   * @param {View["suggestions"]} [listed]  Default: for an editor that draws ghost text.
   */
  show(view, context, listed = view ? listedBesideGhost(view) : []) {
    const suggestions = view?.isListed ? listed : [];
    if (view?.isListed && !suggestions.length) return; // a list that stays for a moment, so that it does not flicker
    const items = suggestions.map((suggestion) => {
      const item = document.createElement("li");
      item.value = suggestion.place + 1;
      item.dir = "auto";
      const typed = document.createElement("span");
      typed.className = "tercet-typed";
      typed.textContent = typedPrefix(context, suggestion);
      item.append(typed, suggestion.rest.trim());
      item.ariaCurrent = String(suggestion === view?.chosen);
      return item;
    });
    if (view) this.element.style.setProperty("--tercet-keys", JSON.stringify(describeKeys(view.keys)));
    this.element.replaceChildren(...items);
  }

  /** Empty the element and stop listening. */
  destroy() {
    this.#listeners.abort();
    this.element.classList.remove("tercet-list");
    this.element.replaceChildren();
  }
}

/** By the editor's view. @type {WeakMap<object, ViewSuggestions>} */
const adapters = new WeakMap();

/**
 * The completer of an editor's view, for commands of its own: `completerOf(view)?.request()`.
 * @param {object} view
 * @returns {Completer|undefined}  Undefined if the view does not use the adapter.
 */
export function completerOf(view) {
  return adapters.get(view)?.completer;
}

/** Connects a completer with one view of an editor that draws ghost text. A subclass knows the editor. */
export class ViewSuggestions {
  isDestroyed = false;
  /** The last change belonged to an IME composition. */
  wasComposing = false;
  /** @type {View|null} */
  #shown = null;
  #show;

  /**
   * @param {{root: object}} view  The editor's.
   * @param {HTMLElement|false|null} list
   * @param {(view: View) => void} show
   * @param {Omit<CompleterOptions, "show">} options
   */
  constructor(view, list, show, options) {
    this.#show = show;
    this.list = list ? new SuggestionList(list, (place) => this.completer.accept(place)) : null;
    this.completer = new Completer({ insertsSpace: true, ...options, show: (shown) => this.#receive(shown) });
    adapters.set(view, this);
    adoptStyles(/** @type {Node} */ (view.root));
  }

  /** The end of the text before the caret. @returns {string} */
  get textBefore() {
    throw new Error("abstract");
  }

  /** Draw what is shown, and let a screen reader say a message. @param {View} _shown  @param {string} _message  Empty: none. */
  draw(_shown, _message) {
    throw new Error("abstract");
  }

  /** A composition has ended, perhaps without another change. The editor reads its text from the DOM first. */
  followComposition() {
    setTimeout(() => {
      if (this.isDestroyed || !this.wasComposing) return;
      this.wasComposing = false;
      this.completer.changed({ inputType: "insertText", isComposing: false });
    });
  }

  /** @param {KeyboardEvent} event  @returns {boolean}  True: the editor must ignore the key. */
  press(event) {
    // After Escape, Tab leaves the editor: a key map that indents with it must not see it.
    const isTabFree = event.key === "Tab" && this.completer.isTabFree && !isInputMethods(event);
    return this.completer.press(event) || isTabFree;
  }

  destroy() {
    this.isDestroyed = true;
    this.completer.close();
    this.list?.destroy();
  }

  /** @param {View} shown */
  #receive(shown) {
    this.list?.show(shown, this.textBefore);
    this.#show(shown);
    if (this.isDestroyed) return; // an update that removes the adapter is under way
    const previous = this.#shown;
    this.#shown = shown;
    const isVisible = [previous, shown].some((each) => each?.chosen || each?.isListed);
    // Typing costs no further update while nothing is shown.
    if (isVisible) this.draw(shown, announcement(shown, previous, this.textBefore));
  }
}

/**
 * What a screen reader should say about a view: the chosen suggestion, if the writer requested suggestions or chose
 * one. Automatic suggestions must not interrupt the writing.
 * @param {View|null} view
 * @param {View|null} previous  The view before it.
 * @param {string} context  The end of the text before the caret.
 * @returns {string}  Empty: nothing.
 */
export function announcement(view, previous, context) {
  if (!view?.chosen || view.status !== "ready" || !(view.isExplicit || view.isChosenByUser)) return "";
  if (previous?.status === "ready" && previous.chosen?.text === view.chosen.text) return "";
  const { suggestions, chosen } = view;
  const text = typedPrefix(context, chosen) + chosen.rest.trim();
  return `Suggestion ${suggestions.indexOf(chosen) + 1} of ${suggestions.length}: ${text}`;
}
