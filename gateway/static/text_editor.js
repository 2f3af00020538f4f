// The page's editor: CodeMirror with what a writer of prose expects of it. It does not know suggestions, which an extension
// brings, nor documents or the server.

import { history, historyKeymap, insertNewline, standardKeymap } from "@codemirror/commands";
import { defineLanguageFacet, HighlightStyle, Language, syntaxHighlighting } from "@codemirror/language";
import { search, searchKeymap } from "@codemirror/search";
import { Compartment, Transaction } from "@codemirror/state";
import { Decoration, EditorView, keymap, placeholder, ViewPlugin } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { parser } from "@lezer/markdown";
import { continueMarkup, toggleEmphasis } from "./markdown_commands.js";
import { hasTextAfter } from "./text.js";

/** @typedef {import("@codemirror/state").Extension} Extension */
/** @typedef {import("@codemirror/view").ViewUpdate} ViewUpdate */

/**
 * The page's policy allows styles with this nonce (gateway/api/page.py). It is no secret: what the page shows is text, and
 * without scripts or requests to other hosts a style can do no harm.
 */
const STYLE_NONCE = "codemirror";

/** Markdown, without the languages of its code blocks. */
const markdown = new Language(defineLanguageFacet(), parser, [], "markdown");

const lightly = HighlightStyle.define([
  { tag: tags.heading, fontWeight: "600" },
  { tag: tags.emphasis, fontStyle: "italic" },
  { tag: tags.strong, fontWeight: "600" },
  { tag: tags.strikethrough, textDecoration: "line-through" },
  { tag: [tags.processingInstruction, tags.url, tags.labelName], color: "var(--muted)" },
]);

/** Each line runs in the direction of its first letter. */
const lineDirections = ViewPlugin.define((view) => ({
  decorations: directLines(view),
  /** @param {ViewUpdate} update */
  update(update) {
    if (update.docChanged || update.viewportChanged) this.decorations = directLines(update.view);
  },
}), { decorations: ({ decorations }) => decorations });

const autoDirection = Decoration.line({ attributes: { dir: "auto" } });

/** @param {EditorView} view */
function directLines({ state, visibleRanges }) {
  const ranges = [];
  for (const { from, to } of visibleRanges) {
    for (let at = from; at <= to;) {
      const line = state.doc.lineAt(at);
      ranges.push(autoDirection.range(line.from));
      at = line.to + 1;
    }
  }
  return Decoration.set(ranges);
}

export class TextEditor {
  #history = new Compartment();
  #isReplacing = false;

  /**
   * @param {HTMLElement} parent
   * @param {object} options
   * @param {Record<string, string>} options.attributes  Of the element that has the text.
   * @param {() => HTMLElement} options.hint  Shown while there is no text.
   * @param {() => {top: number, bottom: number}} options.margins  Kept visible above and below the caret, in pixels.
   * @param {(isWriters: boolean) => void} options.changed  Called after the text has changed; `isWriters`: by the writer.
   * @param {Extension} options.extensions  Further ones; they come first.
   */
  constructor(parent, { attributes, hint, margins, changed, extensions }) {
    this.view = new EditorView({
      parent,
      extensions: [
        extensions,
        this.#history.of(history()),
        // A Tab that comes too late for a suggestion must not move the focus.
        keymap.of([{ key: "Tab", run: () => true }, { key: "Enter", run: continueMarkup }, { key: "Enter", run: insertNewline }]),
        keymap.of([{ key: "Mod-b", run: toggleEmphasis("**") }, { key: "Mod-i", run: toggleEmphasis("*") }]),
        keymap.of([...standardKeymap, ...historyKeymap]),
        keymap.of(searchKeymap),
        search({ top: true }),
        markdown,
        syntaxHighlighting(lightly),
        placeholder(hint),
        lineDirections,
        EditorView.perLineTextDirection.of(true),
        EditorView.lineWrapping,
        EditorView.contentAttributes.of(attributes),
        EditorView.scrollMargins.of(margins),
        EditorView.cspNonce.of(STYLE_NONCE),
        EditorView.updateListener.of(({ docChanged }) => {
          if (docChanged) changed(!this.#isReplacing);
        }),
      ],
    });
  }

  /** @returns {string} */
  get text() {
    return this.view.state.doc.toString();
  }

  /** Whether there is no text. */
  get isEmpty() {
    return this.view.state.doc.length === 0;
  }

  /** The selection's ends, as positions in UTF-16 code units. @returns {[number, number]} */
  get selection() {
    const { from, to } = this.view.state.selection.main;
    return [from, to];
  }

  /**
   * The end of the text before the caret.
   * @param {number} maxChars
   */
  textBefore(maxChars) {
    const { head } = this.view.state.selection.main;
    return this.view.state.sliceDoc(Math.max(0, head - maxChars), head);
  }

  /** Where the next text after the caret is: on its line, below it, or nowhere near. @returns {"line"|"below"|"none"} */
  get textAfter() {
    const { head } = this.view.state.selection.main;
    const after = this.view.state.sliceDoc(head, head + 1000);
    if (hasTextAfter(after)) return "line";
    return after.includes("\n") && after.slice(after.indexOf("\n")).trim() ? "below" : "none";
  }

  /**
   * Replace the whole text, and forget the undo steps of the previous one: applied to another text, they would garble it.
   * @param {string} text
   * @param {[number, number]} [selection]  Default: the end.
   */
  replace(text, selection = [text.length, text.length]) {
    const { view } = this;
    const { length } = view.state.doc;
    const insert = view.state.toText(text);
    const [anchor, head] = selection.map((position) => Math.min(position, insert.length));
    this.#isReplacing = true;
    view.dispatch({ effects: this.#history.reconfigure([]) });
    view.dispatch({
      changes: { from: 0, to: length, insert },
      selection: { anchor, head },
      annotations: Transaction.addToHistory.of(false),
    });
    view.dispatch({ effects: this.#history.reconfigure(history()) });
    this.#isReplacing = false;
  }

  /** Delete all text, as one undo step, and focus the editor. */
  clear() {
    this.view.dispatch({ changes: { from: 0, to: this.view.state.doc.length }, userEvent: "delete" });
    this.focus();
  }

  /** The browser may have moved its selection in the task that calls this, which the editor learns later. */
  focus() {
    const { anchor, head } = this.view.state.selection.main;
    const [start, end] = [this.view.domAtPos(anchor), this.view.domAtPos(head)];
    getSelection()?.setBaseAndExtent(start.node, start.offset, end.node, end.offset);
    this.view.focus();
  }

  /** Scroll to the caret, if it is not on the screen. */
  showCaret() {
    this.view.dispatch({ scrollIntoView: true });
  }

  /**
   * Call a function with the bottom of the ghost text, or else of the caret's line, once that is laid out.
   * @param {(bottomPx: number) => void} place  Called with pixels from the viewport's top.
   */
  measureCaret(place) {
    this.view.requestMeasure({
      key: this,
      read: (view) => {
        const ghost = Array.from(view.contentDOM.querySelector(".tercet-ghost")?.getClientRects() ?? []).at(-1);
        return ghost?.bottom ?? view.coordsAtPos(view.state.selection.main.head)?.bottom ?? null;
      },
      write: (bottomPx) => {
        if (bottomPx !== null) place(bottomPx);
      },
    });
  }
}
