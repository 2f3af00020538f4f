// The two functions that `Completer` needs to work with a plain textarea. They do not know suggestions or the server.

/**
 * All text before the caret, or before the end of the selection.
 * @param {HTMLTextAreaElement} textarea
 * @returns {string}
 */
export function textBefore(textarea) {
  return textarea.value.slice(0, textarea.selectionEnd);
}

/**
 * Insert text at the caret and focus the textarea. The insertion is one step of the native undo stack, and the
 * textarea dispatches an `input` event.
 * @param {HTMLTextAreaElement} textarea
 * @param {string} text
 */
export function insertText(textarea, text) {
  textarea.focus();
  endUndoStep(textarea);
  // execCommand is deprecated, but nothing else writes to the undo stack. Chromium, Firefox and Safari support it.
  if (!document.execCommand("insertText", false, text)) {
    const end = textarea.selectionEnd;
    textarea.setRangeText(text, end, end, "end");
    textarea.dispatchEvent(new InputEvent("input", { bubbles: true, inputType: "insertText", data: text }));
  }
  endUndoStep(textarea);
}

/**
 * Browsers merge an insertion with the typing before and after it, unless the selection was set in between, even to its
 * current position.
 * @param {HTMLTextAreaElement} textarea
 */
function endUndoStep(textarea) {
  textarea.setSelectionRange(textarea.selectionEnd, textarea.selectionEnd);
}
