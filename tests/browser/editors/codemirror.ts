// CodeMirror with its usual set-up, and Tab bound to indentation.

import { indentWithTab } from "@codemirror/commands";
import { Compartment, EditorState } from "@codemirror/state";
import { keymap } from "@codemirror/view";
import { basicSetup, EditorView } from "codemirror";
import { tercet } from "tercet-client/codemirror";
import { onKey, options, root } from "./options.js";

const readOnly = new Compartment();
const extensions = [basicSetup, keymap.of([indentWithTab]), EditorView.lineWrapping, tercet(options), readOnly.of([])];
const parent = document.createElement("main");
root.body.prepend(parent);
const view = new EditorView({ extensions, parent, root });
onKey("F8", () => view.destroy());
onKey("F9", () => view.dispatch({ effects: readOnly.reconfigure(EditorState.readOnly.of(true)) }));
