// CodeMirror with its usual set-up, Tab bound to indentation, and completions of words that begin with zz, bound to Tab.

import { acceptCompletion, completeFromList } from "@codemirror/autocomplete";
import { indentWithTab } from "@codemirror/commands";
import { Compartment, EditorState } from "@codemirror/state";
import { keymap } from "@codemirror/view";
import { basicSetup, EditorView } from "codemirror";
import { tercet } from "tercet-client/codemirror";
import { onKey, options, root } from "./options.js";

const readOnly = new Compartment();
const autocomplete = completeFromList(["zzone", "zztwo"]);
const words = EditorState.languageData.of(() => [{ autocomplete }]);
const keys = keymap.of([{ key: "Tab", run: acceptCompletion }, indentWithTab]);
const extensions = [basicSetup, words, keys, EditorView.lineWrapping, tercet(options), readOnly.of([])];
const parent = document.createElement("main");
root.body.prepend(parent);
const view = new EditorView({ extensions, parent, root });
onKey("F7", () => view.dispatch({ changes: { from: view.state.doc.length, insert: " more" } }));
onKey("F8", () => view.destroy());
onKey("F9", () => view.dispatch({ effects: readOnly.reconfigure(EditorState.readOnly.of(true)) }));
