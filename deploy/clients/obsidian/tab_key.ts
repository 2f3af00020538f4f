// Leaves Tab to Obsidian, which indents lists with it, unless a suggestion is shown: after Escape, too, where Tab leaves
// other editors. Tab is that of a list of Obsidian's, for links or tags, while one is open.

import { type EditorView, runScopeHandlers, ViewPlugin } from "@codemirror/view";
import { completerOf } from "tercet-client/codemirror";

export const tabKey = ViewPlugin.fromClass(
  class {
    #listeners = new AbortController();

    constructor(view: EditorView) {
      // On an ancestor and in the capture phase, so that it runs before the listener of the suggestions.
      const options = { capture: true, signal: this.#listeners.signal };
      view.scrollDOM.addEventListener("keydown", (event) => press(view, event), options);
    }

    destroy(): void {
      this.#listeners.abort();
    }
  },
);

/** Whether an entry is chosen in a list of Obsidian's, in the window that has the focus. */
export function isListUsed(): boolean {
  return activeDocument.querySelector(".suggestion-container .is-selected") !== null;
}

function press(view: EditorView, event: KeyboardEvent): void {
  const { key, altKey, ctrlKey, metaKey, shiftKey, isComposing } = event;
  if (key !== "Tab" || altKey || ctrlKey || metaKey || shiftKey || isComposing || isListUsed()) return;
  if (completerOf(view)?.view.chosen) return;
  event.stopPropagation();
  if (runScopeHandlers(view, event, "editor")) event.preventDefault();
}
