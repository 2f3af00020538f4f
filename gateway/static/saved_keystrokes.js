// The number of keystrokes that suggestions have saved: counted up by an insertion, down when it is undone. It does not
// know the server, nor when suggestions are shown.

import { invertedEffects } from "@codemirror/commands";
import { StateEffect } from "@codemirror/state";
import { EditorView } from "@codemirror/view";
import { load, save } from "./store.js";

const ITEM = "saved";

/** Undo or redo of insertions that saved this many keystrokes; less than 0 for undo. @type {import("@codemirror/state").StateEffectType<number>} */
const recount = StateEffect.define();

export class SavedKeystrokes {
  #show;

  /** @param {(number: number) => void} show  Called with the number at once, and after each change. */
  constructor(show) {
    this.#show = show;
    show(this.#total);
  }

  /**
   * An extension that counts the insertions of suggestions, which are of the user event `input.complete`.
   * @param {() => number} numSpentKeys  Called when a suggestion is inserted; returns the keys pressed for it.
   * @returns {import("@codemirror/state").Extension}
   */
  extension(numSpentKeys) {
    /** @type {WeakMap<import("@codemirror/state").Transaction, number>} */
    const counts = new WeakMap();
    /** @param {import("@codemirror/state").Transaction} transaction */
    const count = (transaction) => {
      let saved = counts.get(transaction);
      if (saved === undefined) {
        saved = 0;
        if (transaction.isUserEvent("input.complete")) {
          const numInserted = transaction.newDoc.length - transaction.startState.doc.length;
          if (numInserted > 0) saved = Math.max(0, numInserted - numSpentKeys());
        }
        for (const effect of transaction.effects) if (effect.is(recount)) saved += effect.value;
        counts.set(transaction, saved);
      }
      return saved;
    };
    return [
      invertedEffects.of((transaction) => (count(transaction) ? [recount.of(-count(transaction))] : [])),
      EditorView.updateListener.of(({ transactions }) => {
        const saved = transactions.reduce((sum, transaction) => sum + count(transaction), 0);
        if (saved) this.#add(saved);
      }),
    ];
  }

  /** The stored number, which other windows change too. */
  get #total() {
    return Number(load(ITEM)) || 0;
  }

  /** @param {number} number */
  #add(number) {
    const total = Math.max(0, this.#total + number);
    save(ITEM, total);
    this.#show(total);
  }
}
