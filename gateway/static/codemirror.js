// Suggestions in CodeMirror 6: an extension around `Completer`. It knows CodeMirror's transactions, selection, undo
// history and decorations; it does not know the server or when suggestions are requested.

import { isolateHistory } from "@codemirror/commands";
import { StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView, showTooltip, ViewPlugin, WidgetType } from "@codemirror/view";
import { isInputMethods } from "./composition.js";
import { completerOf, ghostElement, isLeaving, isTapOnGhost, SuggestionList, ViewSuggestions } from "./editor_adapter.js";
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

export { completerOf };

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

/** Connects the completer with one editor view. */
class Suggestions extends ViewSuggestions {
  #view;
  #listeners = new AbortController();

  /**
   * @param {EditorView} view
   * @param {HTMLElement|null} list
   * @param {(view: View) => void} show
   * @param {Options} options
   */
  constructor(view, list, show, options) {
    const caret = () => view.state.selection.main.head;
    const prose = new ProseDetector();
    super(view, list, show, {
      isProse: () => prose.isProse(caret(), (from, to) => view.state.sliceDoc(from, to)),
      ...options,
      // Slices: reading a whole novel at each key takes longer than drawing the key.
      context: () => view.state.sliceDoc(contextStart(caret()), caret()),
      position: caret,
      after: () => view.state.sliceDoc(caret(), caret() + MAX_AFTER_CHARS),
      insert: (text, numReplaced) => this.#insert(text, numReplaced),
      isEditable: () => isWritableAtCaret(view.state) && view.state.facet(EditorView.editable) && view.dom.isConnected,
    });
    this.#view = view;
    // In the capture phase, because CodeMirror's handlers cannot both leave a key to the browser and stop its key maps.
    const { signal } = this.#listeners;
    view.contentDOM.addEventListener("keydown", (event) => this.#handleKey(event), { capture: true, signal });
  }

  /** @param {ViewUpdate} update */
  follow({ docChanged, selectionSet, startState, state, transactions, view }) {
    if (!docChanged && !selectionSet && startState.readOnly === state.readOnly) return;
    if (docChanged) {
      const transaction = transactions.findLast((candidate) => candidate.docChanged);
      const match = INPUT_TYPES.find(({ userEvent }) => transaction?.isUserEvent(userEvent));
      this.wasComposing = view.composing;
      // A change without a user event was made by a program or another writer.
      this.completer.changed({ inputType: match?.inputType ?? "", isComposing: view.composing });
    } else {
      this.completer.moved();
    }
  }

  /** @param {number} from  @param {number} to  @param {string} text  @returns {boolean} */
  type(from, to, text) {
    const { composing, state } = this.#view;
    const isAtCaret = from === to && from === state.selection.main.head;
    return !composing && isAtCaret && this.completer.type(text);
  }

  destroy() {
    this.#listeners.abort();
    super.destroy();
  }

  get textBefore() {
    return textBefore(this.#view.state);
  }

  /** @param {View} shown  @param {string} message */
  draw(shown, message) {
    this.#view.dispatch({ effects: [setView.of(shown), ...(message ? [EditorView.announce.of(message)] : [])] });
  }

  /** @param {KeyboardEvent} event */
  #handleKey(event) {
    if (event.target !== this.#view.contentDOM) return;
    if (this.press(event)) event.stopImmediatePropagation();
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
}

/** Suggestions need one caret and no selected text. @param {EditorState} state */
function isWritableAtCaret({ readOnly, selection }) {
  return !readOnly && selection.ranges.length === 1 && selection.main.empty;
}

/** @param {KeyboardEvent} event */
function isLineBreak(event) {
  return event.key === "Enter" && !event.altKey && !event.ctrlKey && !event.metaKey && !isInputMethods(event);
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
  const list = new SuggestionList(document.createElement("ol"), (place) => completerOf(view)?.accept(place));
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
