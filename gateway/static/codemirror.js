// Suggestions in CodeMirror 6: an extension around `Completer`. It knows CodeMirror's transactions, selection, undo
// history and decorations; it does not know the server or when suggestions are requested.

import { isolateHistory } from "@codemirror/commands";
import { StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView, showTooltip, ViewPlugin, WidgetType } from "@codemirror/view";
import { Completer, isInputMethods } from "./completer.js";
import { adoptStyles, announcement, ghostElement, isLeaving, isTapOnGhost, SuggestionList } from "./editor_adapter.js";
import { ProseDetector } from "./prose.js";
import { contextStart } from "./text.js";

/** @typedef {import("@codemirror/state").EditorState} EditorState */
/** @typedef {import("@codemirror/state").Extension} Extension */
/** @typedef {import("@codemirror/view").ViewUpdate} ViewUpdate */
/** @typedef {import("./editor_adapter.js").Options} Options */
/** @typedef {import("./editor_adapter.js").View} View */

/** The input types that correspond to CodeMirror's user events. The first that matches counts. */
const INPUT_TYPES = [
  { userEvent: "input.paste", inputType: "insertFromPaste" },
  { userEvent: "input.drop", inputType: "insertFromDrop" },
  { userEvent: "input", inputType: "insertText" },
  { userEvent: "delete", inputType: "deleteContentBackward" },
  { userEvent: "undo", inputType: "historyUndo" },
  { userEvent: "redo", inputType: "historyRedo" },
];

/** What is read of the text after the caret. The server reads less of a line. */
const MAX_AFTER_CHARS = 1000;

/** @type {import("@codemirror/state").StateEffectType<View>} */
const setView = StateEffect.define();

/** What is shown. @type {StateField<View|null>} */
const shownView = StateField.define({
  create: () => /** @type {View|null} */ (null),
  update: (shown, transaction) => transaction.effects.find((effect) => effect.is(setView))?.value ?? shown,
  provide: (field) => EditorView.decorations.compute([field, "selection"], (state) => drawGhostText(state)),
});

/** @type {WeakMap<EditorView, Completer>} */
const completers = new WeakMap();

/**
 * An extension that shows suggestions and handles their keys. Each view that uses it has a `Completer` of its own.
 * @param {Options} [options]
 * @returns {Extension}
 * @throws {TypeError} Once a view uses it: if `client` is missing and this module was not served by a Tercet server.
 */
export function tercet({ list, panel = list || undefined, show = () => {}, ...options } = {}) {
  const plugin = ViewPlugin.define((view) => new Suggestions(view, list || null, show, options), {
    provide: (self) => [
      EditorView.updateListener.of((update) => update.view.plugin(self)?.follow(update)),
      EditorView.inputHandler.of((view, from, to, text) => view.plugin(self)?.type(from, to, text) ?? false),
    ],
    eventHandlers: {
      // A tap on ghost text leaves the caret, and an input method's composition, where they are.
      mousedown: isTapOnGhost,
      click(event) {
        if (isTapOnGhost(event)) this.completer.accept();
      },
    },
    eventObservers: {
      // Without the image in the flow (editor_adapter.js), browsers insert two line breaks for one. Nothing is painted until then.
      beforeinput({ data }, { dom }) {
        if (data && !data.includes("\n")) return;
        dom.toggleAttribute("data-tercet-input", true);
        requestAnimationFrame(() => dom.removeAttribute("data-tercet-input"));
      },
      blur(event) {
        // Later, because an update that makes the editor read-only blurs it, and must end first.
        if (isLeaving(event, panel)) queueMicrotask(() => this.completer.close());
      },
      focus() { this.completer.returned(); },
      compositionend() {
        this.followComposition();
      },
    },
  });
  return [plugin, shownView, list === undefined ? showTooltip.compute([shownView, "selection"], tooltip) : []];
}

/**
 * The completer of a view, for an editor's own commands: `completerOf(view)?.request()`.
 * @param {EditorView} view
 * @returns {Completer|undefined}  Undefined if the view does not use the extension.
 */
export function completerOf(view) {
  return completers.get(view);
}

/** Connects the completer with one editor view. */
class Suggestions {
  #view;
  #list;
  #show;
  #listeners = new AbortController();
  #isDestroyed = false;
  /** The last change belonged to an IME composition. */
  #wasComposing = false;

  /**
   * @param {EditorView} view
   * @param {HTMLElement|null} list
   * @param {(view: View) => void} show
   * @param {Options} options
   */
  constructor(view, list, show, options) {
    this.#view = view;
    this.#show = show;
    this.#list = list && new SuggestionList(list, (place) => this.completer.accept(place));
    const caret = () => view.state.selection.main.head;
    const prose = new ProseDetector();
    this.completer = new Completer({
      insertsSpace: true,
      isProse: () => prose.isProse(caret(), (from, to) => view.state.sliceDoc(from, to)),
      ...options,
      // Slices: reading a whole novel at each key takes longer than drawing the key.
      context: () => view.state.sliceDoc(contextStart(caret()), caret()),
      position: caret,
      after: () => view.state.sliceDoc(caret(), caret() + MAX_AFTER_CHARS),
      insert: (text, numReplaced) => this.#insert(text, numReplaced),
      show: (shown) => this.#draw(shown),
      isEditable: () => isWritableAtCaret(view.state) && view.state.facet(EditorView.editable) && view.dom.isConnected,
    });
    completers.set(view, this.completer);
    adoptStyles(/** @type {Document|ShadowRoot} */ (view.root));
    // In the capture phase, because CodeMirror's handlers cannot both leave a key to the browser and stop its key maps.
    const { signal } = this.#listeners;
    view.contentDOM.addEventListener("keydown", (event) => this.#press(event), { capture: true, signal });
  }

  /** @param {ViewUpdate} update */
  follow({ docChanged, selectionSet, startState, state, transactions, view }) {
    if (!docChanged && !selectionSet && startState.readOnly === state.readOnly) return;
    if (docChanged) {
      const transaction = transactions.findLast((candidate) => candidate.docChanged);
      const match = INPUT_TYPES.find(({ userEvent }) => transaction?.isUserEvent(userEvent));
      this.#wasComposing = view.composing;
      // A change without a user event was made by a program or another writer.
      this.completer.changed({ inputType: match?.inputType ?? "", isComposing: view.composing });
    } else {
      this.completer.moved();
    }
  }

  /** A composition has ended, perhaps without another change. CodeMirror reads its text from the DOM first. */
  followComposition() {
    setTimeout(() => {
      if (this.#isDestroyed || !this.#wasComposing) return;
      this.#wasComposing = false;
      this.completer.changed({ inputType: "insertText", isComposing: false });
    });
  }

  /** @param {number} from  @param {number} to  @param {string} text  @returns {boolean} */
  type(from, to, text) {
    const { composing, state } = this.#view;
    const isAtCaret = from === to && from === state.selection.main.head;
    return !composing && isAtCaret && this.completer.type(text);
  }

  destroy() {
    this.#isDestroyed = true;
    this.#listeners.abort();
    this.completer.close();
    this.#list?.destroy();
    completers.delete(this.#view);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    if (event.target !== this.#view.contentDOM) return;
    // After Escape, Tab leaves the editor: a key map that indents with it must not see it.
    const isTabFree = event.key === "Tab" && this.completer.isTabFree && !isInputMethods(event);
    if (this.completer.press(event) || isTabFree) event.stopImmediatePropagation();
    else if (isLineBreak(event)) this.completer.type("\n");
  }

  /** @param {string} text  @param {number} numReplaced */
  #insert(text, numReplaced) {
    const { state } = this.#view;
    const { head } = state.selection.main;
    // The editor's own key map breaks the line: there it may continue a list.
    const insert = state.toText(text === "\n" ? "" : text);
    const from = head - numReplaced;
    const isTyped = numReplaced === 1 || numReplaced === 2;
    this.#view.dispatch({
      changes: { from, to: head, insert },
      selection: { anchor: from + insert.length },
      // Typing right after an accepted text would join its undo step. What replaces a space or a comma is typed.
      annotations: isTyped ? [] : isolateHistory.of("full"),
      userEvent: isTyped ? "input.type" : "input.complete",
      scrollIntoView: true,
    });
  }

  /** @param {View} shown */
  #draw(shown) {
    const context = textBefore(this.#view.state);
    this.#list?.show(shown, context);
    this.#show(shown);
    if (this.#isDestroyed) return; // an update that removes the extension is under way
    const previous = this.#view.state.field(shownView);
    if (!isVisible(previous) && !isVisible(shown)) return; // typing costs no further update while nothing is shown
    const text = announcement(shown, previous, context);
    this.#view.dispatch({ effects: [setView.of(shown), ...(text ? [EditorView.announce.of(text)] : [])] });
  }
}

/** Suggestions need one caret and no selected text. @param {EditorState} state */
function isWritableAtCaret({ readOnly, selection }) {
  return !readOnly && selection.ranges.length === 1 && selection.main.empty;
}

/** @param {KeyboardEvent} event */
function isLineBreak(event) {
  return event.key === "Enter" && !event.altKey && !event.ctrlKey && !event.metaKey && !isInputMethods(event);
}

/** @param {View|null} view */
function isVisible(view) {
  return Boolean(view?.chosen || view?.isListed);
}

/** @param {EditorState} state */
function drawGhostText(state) {
  const rest = state.field(shownView)?.chosen?.rest;
  if (!rest || !isWritableAtCaret(state)) return Decoration.none;
  const widget = Decoration.widget({ widget: new GhostText(rest), side: 1 });
  return Decoration.set(widget.range(state.selection.main.head));
}

/** The end of the text before the caret. @param {EditorState} state  @returns {string} */
function textBefore({ doc, selection }) {
  const { from, text } = doc.lineAt(selection.main.head);
  return text.slice(0, selection.main.head - from);
}

/** @param {EditorState} state  @returns {import("@codemirror/view").Tooltip|null} */
function tooltip(state) {
  if (!state.field(shownView)?.isListed) return null;
  return { pos: state.selection.main.head, create: createTooltip };
}

/** @param {EditorView} view  @returns {import("@codemirror/view").TooltipView} */
function createTooltip(view) {
  const list = new SuggestionList(document.createElement("ol"), (place) => completers.get(view)?.accept(place));
  list.show(view.state.field(shownView), textBefore(view.state));
  const dom = document.createElement("div");
  Object.assign(dom.style, { border: "none", background: "none" }); // CodeMirror's, which know no color scheme
  dom.append(list.element);
  return { dom, update: ({ state }) => list.show(state.field(shownView), textBefore(state)) };
}

class GhostText extends WidgetType {
  /** @param {string} text */
  constructor(text) {
    super();
    this.text = text;
  }

  toDOM() {
    return ghostElement(this.text);
  }

  /** @param {GhostText} other */
  eq(other) {
    return other.text === this.text;
  }

  /** @param {HTMLElement} element */
  updateDOM(element) {
    element.textContent = this.text;
    return true;
  }

  get lineBreaks() {
    return this.text.split("\n").length - 1;
  }

  ignoreEvent() {
    return false; // a click on it sets the caret
  }
}
