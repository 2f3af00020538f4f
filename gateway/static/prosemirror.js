// Suggestions in ProseMirror: a plugin around `Completer`. It knows ProseMirror's transactions, selection, undo history
// and decorations; it does not know the server or when suggestions are requested.

import { closeHistory, isHistoryTransaction } from "prosemirror-history";
import { Fragment, Slice } from "prosemirror-model";
import { Plugin, PluginKey, TextSelection } from "prosemirror-state";
import { Decoration, DecorationSet } from "prosemirror-view";
import { completerOf, ghostElement, isOptionChosen, isTapOnGhost, ViewSuggestions } from "./editor_adapter.js";

/** @typedef {import("prosemirror-model").Node} Node */
/** @typedef {import("prosemirror-state").EditorState} EditorState */
/** @typedef {import("prosemirror-state").Transaction} Transaction */
/** @typedef {import("prosemirror-view").EditorView} EditorView */
/** @typedef {import("./editor_adapter.js").Options} Options */
/** @typedef {import("./editor_adapter.js").View} View */

/**
 * @typedef {object} PluginState
 * @property {View|null} shown
 * @property {string} inputType  Of the last change of the document, as in `InputEvent`; empty: not made at the caret.
 */

/** Space between the caret and the list. */
const LIST_GAP_PX = 4;

/** @type {PluginKey<PluginState>} */
const pluginKey = new PluginKey("tercet");

/** @type {WeakMap<EditorView, Suggestions>} */
const suggestionsOf = new WeakMap();

export { completerOf };

/**
 * A plugin that shows suggestions and handles their keys. Each view that uses it has a `Completer` of its own.
 * @param {Options} [options]
 * @returns {Plugin<PluginState>}
 * @throws {TypeError} Once a view uses it: if `client` is missing and this module was not served by a Tercet server.
 */
export function tercet(options = {}) {
  return new Plugin({
    key: pluginKey,
    state: {
      init: () => /** @type {PluginState} */ ({ shown: null, inputType: "" }),
      apply(transaction, { shown, inputType }) {
        // A transaction that a plugin appends to the writer's is not the writer's.
        const isEdit = transaction.docChanged && !transaction.getMeta("appendedTransaction");
        return {
          shown: transaction.getMeta(pluginKey) ?? shown,
          inputType: isEdit ? inputTypeOf(transaction) : inputType,
        };
      },
    },
    view(view) {
      const suggestions = new Suggestions(view, options);
      return { update: (now, previous) => suggestions.follow(now, previous), destroy: () => suggestions.destroy() };
    },
    props: {
      decorations: drawGhostText,
      handleTextInput: (view, from, to, text) => suggestionsOf.get(view)?.type(from, to, text) ?? false,
      handleDOMEvents: {
        // Not `handleKeyDown`: only here can a key be left to the browser and kept from the key maps of other plugins.
        keydown: (view, event) => suggestionsOf.get(view)?.press(event) ?? false,
        // A tap on ghost text leaves the caret, and an input method's composition, where they are.
        mousedown: (_, event) => isTapOnGhost(event) && (event.preventDefault(), true),
        click: (view, event) => isTapOnGhost(event) && (completerOf(view)?.accept(), true),
        compositionend: (view) => suggestionsOf.get(view)?.followComposition(),
        focus: (view) => completerOf(view)?.returned(),
        // Later, because an update that makes the editor read-only blurs it, and must end first.
        blur: (view) => queueMicrotask(() => completerOf(view)?.close()),
      },
    },
  });
}

/** Connects the completer with one editor view. */
class Suggestions extends ViewSuggestions {
  #view;
  #floating;
  #wasWritable = true;
  /** @type {{doc: Node, head: number, before: string, after: string}|null} */
  #cachedTexts = null;

  /**
   * @param {EditorView} view
   * @param {Options} options
   */
  constructor(view, { list, show = () => {}, ...options }) {
    const floating = new FloatingElement(view);
    const element = list ?? floating.element.appendChild(document.createElement("ol"));
    super(view, element, show, {
      isProse: () => !isInCode(view.state),
      isOtherListUsed: () => isOptionChosen(view.dom, element || null),
      ...options,
      context: () => this.#texts.before,
      after: () => this.#texts.after,
      insert: (text, numReplaced) => this.#insert(text, numReplaced),
      isEditable: () => this.#isWritableAtCaret && view.dom.isConnected,
    });
    this.#view = view;
    this.#floating = floating;
    suggestionsOf.set(view, this);
  }

  /**
   * The editor's state has changed.
   * @param {EditorView} view
   * @param {EditorState} previous
   */
  follow({ composing, state }, previous) {
    const isDocChanged = !state.doc.eq(previous.doc);
    const wasWritable = this.#wasWritable;
    this.#wasWritable = this.#isWritableAtCaret;
    if (!isDocChanged && state.selection.eq(previous.selection) && wasWritable === this.#wasWritable) return;
    if (isDocChanged) {
      this.wasComposing = composing;
      this.completer.changed({ inputType: pluginKey.getState(state)?.inputType ?? "", isComposing: composing });
    } else {
      this.completer.moved();
    }
  }

  /** @param {number} from  @param {number} to  @param {string} text  @returns {boolean} */
  type(from, to, text) {
    const isAtCaret = from === to && from === this.#view.state.selection.head;
    return !this.#view.composing && isAtCaret && this.completer.type(text);
  }

  destroy() {
    super.destroy();
    this.#floating.destroy();
    suggestionsOf.delete(this.#view);
  }

  get textBefore() {
    return this.#texts.before;
  }

  /** @param {View} shown  @param {string} message */
  draw(shown, message) {
    this.#floating.announce(message);
    this.#view.dispatch(this.#view.state.tr.setMeta(pluginKey, shown));
    this.#floating.place();
  }

  /** Text around the caret. Read once per document and caret: reading a long document takes a millisecond or more. */
  get #texts() {
    const { doc, selection } = this.#view.state;
    if (this.#cachedTexts?.doc !== doc || this.#cachedTexts.head !== selection.head) {
      const [before, after] = textsAround(doc, selection.head);
      this.#cachedTexts = { doc, head: selection.head, before, after };
    }
    return this.#cachedTexts;
  }

  /** Suggestions need a caret in a text block. */
  get #isWritableAtCaret() {
    const { editable, state } = this.#view;
    return editable && state.selection instanceof TextSelection && state.selection.empty;
  }

  /** @param {string} text  @param {number} numReplaced */
  #insert(text, numReplaced) {
    const { state } = this.#view;
    const { head } = state.selection;
    // `closeHistory` separates a change from the one before it. The second one separates the text from typing after it.
    const transaction = insertLines(state.tr, text.split("\n"), head - numReplaced, head);
    this.#view.dispatch(closeHistory(transaction).scrollIntoView());
    this.#view.dispatch(closeHistory(this.#view.state.tr));
  }
}

/** An element below the caret, with a message for screen readers. It stays below the caret when the page scrolls. */
class FloatingElement {
  #view;
  #window;
  #status = document.createElement("div");
  #listeners = new AbortController();

  /** @param {EditorView} view */
  constructor(view) {
    this.#view = view;
    this.#window = view.dom.ownerDocument.defaultView ?? window; // the editor may be in a frame
    this.element = document.createElement("div");
    // Its own width; at the right edge, the browser would give it only the space that is left there.
    Object.assign(this.element.style, { position: "fixed", zIndex: "1000", width: "max-content" });
    Object.assign(this.#status.style, { position: "absolute", clipPath: "inset(50%)", width: "1px", height: "1px" });
    this.#status.style.overflow = "hidden";
    this.#status.role = "status";
    this.element.append(this.#status);
    const { root } = view;
    ("body" in root ? root.body : root).append(this.element);
    const { signal } = this.#listeners;
    this.#window.addEventListener("scroll", () => this.place(), { capture: true, passive: true, signal });
    this.#window.addEventListener("resize", () => this.place(), { signal });
  }

  /** Move it below the caret, or above the line if there is room only there. */
  place() {
    if (this.#view.isDestroyed || !this.element.offsetHeight) return; // nothing is shown
    const { left, top, bottom } = this.#view.coordsAtPos(this.#view.state.selection.head);
    const { offsetHeight, offsetWidth, style } = this.element;
    const { innerHeight, innerWidth } = this.#window;
    const topAbove = top - LIST_GAP_PX - offsetHeight;
    const isAbove = topAbove >= 0 && bottom + LIST_GAP_PX + offsetHeight > innerHeight;
    style.left = `${Math.max(0, Math.min(left, innerWidth - offsetWidth))}px`;
    style.top = `${isAbove ? topAbove : bottom + LIST_GAP_PX}px`;
  }

  /** @param {string} message */
  announce(message) {
    if (message) this.#status.textContent = message;
  }

  destroy() {
    this.#listeners.abort();
    this.element.remove();
  }
}

/** @param {EditorState} state */
function isInCode({ storedMarks, selection: { $from } }) {
  return $from.parent.type.spec.code || (storedMarks ?? $from.marks()).some(({ type }) => type.spec.code || type.name === "code");
}

/** @param {Transaction} transaction  @returns {string} */
function inputTypeOf(transaction) {
  if (isHistoryTransaction(transaction)) return "historyUndo";
  const uiEvent = transaction.getMeta("uiEvent");
  if (uiEvent === "paste") return "insertFromPaste";
  if (uiEvent === "drop") return "insertFromDrop";
  const sizes = sizesAtCaret(transaction);
  if (sizes.some(({ inserted }) => inserted)) return "insertText";
  return sizes.some(({ deleted }) => deleted) ? "deleteContentBackward" : "";
}

/**
 * Sizes of the changes that end at the caret. ProseMirror does not mark typing; changes made elsewhere, for example by
 * another writer of the same document, are not the writer's.
 * @param {Transaction} transaction
 */
function sizesAtCaret({ mapping, selection }) {
  /** @type {{inserted: number, deleted: number}[]} */
  const sizes = [];
  mapping.maps.forEach((map, index) => {
    map.forEach((oldStart, oldEnd, newStart, newEnd) => {
      if (mapping.slice(index + 1).map(newEnd) !== selection.head) return;
      sizes.push({ inserted: newEnd - newStart, deleted: oldEnd - oldStart });
    });
  });
  return sizes;
}

/**
 * All text before and after a position; text blocks are separated by line breaks.
 * @param {Node} doc
 * @param {number} position
 */
function textsAround(doc, position) {
  return [
    doc.textBetween(0, position, "\n", leafText),
    doc.textBetween(position, doc.content.size, "\n", leafText),
  ];
}

/**
 * Replace text within a text block. Each line but the first begins a new block, except in code.
 * @param {Transaction} transaction
 * @param {string[]} lines
 * @param {number} from  A position in the document.
 * @param {number} to
 * @returns {Transaction}
 */
function insertLines(transaction, lines, from, to) {
  const { parent } = transaction.doc.resolve(from);
  if (lines.length === 1 || parent.type.spec.code) return transaction.insertText(lines.join("\n"), from, to);
  const { schema } = parent.type;
  const blocks = lines.map((line) => parent.type.create(parent.attrs, line ? schema.text(line) : null));
  return transaction.replace(from, to, new Slice(Fragment.from(blocks), 1, 1));
}

/**
 * What stands for a node without text, such as a line break, an image or a mention.
 * @param {Node} leaf
 * @returns {string}
 */
function leafText(leaf) {
  if (leaf.type.spec.leafText) return leaf.type.spec.leafText(leaf);
  if (!leaf.isInline) return "";
  return leaf.type.name === "hard_break" || leaf.type.name === "hardBreak" ? "\n" : " ";
}

/** @param {EditorState} state */
function drawGhostText(state) {
  const rest = pluginKey.getState(state)?.shown?.chosen?.rest;
  if (!rest || !state.selection.empty) return DecorationSet.empty;
  const widget = Decoration.widget(state.selection.head, () => ghostElement(rest), {
    key: `tercet ${rest}`, // an equal key keeps the element
    side: 1,
    ignoreSelection: true,
    marks: [], // the text is not in the document, so it has no link, code or bold style
  });
  return DecorationSet.create(state.doc, [widget]);
}
