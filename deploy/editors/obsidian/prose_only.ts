// Turns unasked suggestions off while the caret is in code, front matter or mathematics.

import type { Extension } from "@codemirror/state";
import { ViewPlugin, type ViewUpdate } from "@codemirror/view";
import { ProseDetector } from "tercet-client";
import { completerOf } from "tercet-client/codemirror";

/** @param mode  The completer's in prose. */
export function proseOnly(mode: "live" | "pauses" | "off"): Extension {
  return ViewPlugin.fromClass(
    class {
      #detector = new ProseDetector();

      /** Before the suggestions are updated: they follow in a listener. */
      update({ docChanged, state, view }: ViewUpdate): void {
        const completer = completerOf(view);
        if (!docChanged || !completer) return;
        const isProse = this.#detector.isProse(state.selection.main.head, (from, to) => state.sliceDoc(from, to));
        completer.mode = isProse ? mode : "off";
      }
    },
  );
}
