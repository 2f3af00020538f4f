// Where the focus goes when a popover closes. It does not know what is in a popover, nor in the text.

import { touch } from "./touch_strip.js";

/**
 * When a popover closes, the focus returns to the text, unless the writer has moved it to another control. On a touch
 * screen, where that opens the keyboard, only if it left the text for a control.
 * @param {import("./text_editor.js").TextEditor} editor
 */
export function returnFocusTo(editor) {
  let isLeftForControl = false;
  const focusIfLost = () => document.activeElement === document.body && editor.focus();
  editor.view.contentDOM.addEventListener("blur", ({ relatedTarget }) => (isLeftForControl = relatedTarget !== null));
  addEventListener("pointerdown", () => removeEventListener("click", focusIfLost), { capture: true });
  document.addEventListener("beforetoggle", ({ newState, target }) => {
    if (newState === "open" || (touch.matches && !isLeftForControl)) return;
    const { id } = /** @type {Element} */ (target);
    if (document.activeElement?.matches(`body, #${id}, #${id} *, [popovertarget=${id}]`)) editor.focus();
    addEventListener("click", focusIfLost, { once: true }); // the click that closes it may take the focus away after this
  }, { capture: true });
}
