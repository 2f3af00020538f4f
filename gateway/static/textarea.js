// What a plain textarea needs to take suggestions in. Knows no server and no suggestions.

/**
 * What stands before the cursor.
 * @param {HTMLTextAreaElement} textarea
 */
export function textBefore(textarea) {
  return textarea.value.slice(0, textarea.selectionEnd);
}

/**
 * Put text in at the cursor, as one step of the textarea's own undo.
 * @param {HTMLTextAreaElement} textarea
 * @param {string} text
 */
export function insertText(textarea, text) {
  textarea.focus();
  endUndoStep(textarea);
  // Deprecated, and the only way to the undo stack; Chromium, Firefox and Safari have it.
  if (!document.execCommand("insertText", false, text)) {
    const end = textarea.selectionEnd;
    textarea.setRangeText(text, end, end, "end");
    textarea.dispatchEvent(new InputEvent("input", { bubbles: true, inputType: "insertText", data: text }));
  }
  endUndoStep(textarea);
}

/**
 * Browsers join what is put in to the typing before and after it, unless the cursor was set in between, if only to
 * where it is.
 * @param {HTMLTextAreaElement} textarea
 */
function endUndoStep(textarea) {
  textarea.setSelectionRange(textarea.selectionEnd, textarea.selectionEnd);
}
