// The one bundle that the editor page is served with: what its modules import of CodeMirror. An import map in index.html
// gives it the names of the packages, so the page uses the same adapter as other people's editors.
export { history, historyKeymap, insertNewline, invertedEffects, isolateHistory, standardKeymap, undo } from "@codemirror/commands";
export { defineLanguageFacet, HighlightStyle, Language, syntaxHighlighting } from "@codemirror/language";
export { openSearchPanel, search, searchKeymap } from "@codemirror/search";
export { Compartment, StateEffect, StateField, Transaction } from "@codemirror/state";
export { Decoration, EditorView, keymap, placeholder, showTooltip, ViewPlugin, WidgetType } from "@codemirror/view";
export { tags } from "@lezer/highlight";
export { parser } from "@lezer/markdown";
