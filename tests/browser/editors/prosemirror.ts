// ProseMirror with history, and Tab bound to a command that inserts a tab.

import { baseKeymap } from "prosemirror-commands";
import { history, redo, undo } from "prosemirror-history";
import { keymap } from "prosemirror-keymap";
import { schema } from "prosemirror-schema-basic";
import { type Command, EditorState } from "prosemirror-state";
import { EditorView } from "prosemirror-view";
import { tercet } from "tercet-client/prosemirror";
import { onKey, options, root } from "./options.js";

const insertTab: Command = (state, dispatch) => {
  dispatch?.(state.tr.insertText("\t"));
  return true;
};
const keys = keymap({ "Mod-z": undo, "Mod-y": redo, Tab: insertTab });
const plugins = [keys, keymap(baseKeymap), history(), tercet(options)];
const parent = document.createElement("main");
root.body.prepend(parent);
const view = new EditorView(parent, { state: EditorState.create({ schema, plugins }) });
onKey("F8", () => view.destroy());
onKey("F9", () => view.setProps({ editable: () => false }));
