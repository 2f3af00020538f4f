// ProseMirror with history, a plugin that takes the keys of its list, and Tab bound to a command that inserts a tab.

import { baseKeymap, setBlockType } from "prosemirror-commands";
import { history, redo, undo } from "prosemirror-history";
import { keymap } from "prosemirror-keymap";
import { schema } from "prosemirror-schema-basic";
import { type Command, EditorState, Plugin, TextSelection } from "prosemirror-state";
import { EditorView } from "prosemirror-view";
import { tercet } from "tercet-client/prosemirror";
import { onKey, options, root } from "./options.js";

const insertTab: Command = (state, dispatch) => {
  dispatch?.(state.tr.insertText("\t"));
  return true;
};
const keys = keymap({ "Mod-z": undo, "Mod-y": redo, Tab: insertTab });
const list = { isOpen: false, isChosen: false };
const mentions = new Plugin({
  props: {
    handleKeyDown: (_, { key }) => {
      list.isChosen ||= list.isOpen && key === "ArrowDown";
      const isTaken = list.isChosen && /^(Arrow|Tab|Enter|Escape)/.test(key);
      if (isTaken) Object.assign(window, { taken: key });
      return isTaken;
    },
  },
});
const plugins = [mentions, keys, keymap(baseKeymap), history(), tercet(options)];
const parent = document.createElement("main");
root.body.prepend(parent);
const view = new EditorView(parent, { state: EditorState.create({ schema, plugins }) });
onKey("F5", () => setBlockType(schema.nodes.code_block)(view.state, view.dispatch));
onKey("F6", () => (list.isOpen = true));
onKey("F7", () => {
  const { head } = view.state.selection;
  const transaction = view.state.tr.insertText(" more", head);
  view.dispatch(transaction.setSelection(TextSelection.create(transaction.doc, head)));
});
onKey("F8", () => view.destroy());
onKey("F9", () => view.setProps({ editable: () => false }));
