// Suggestions for a plain textarea: `attachTextarea` connects its events to a `Completer`, and can fill a list. It does
// not draw ghost text, which a textarea cannot show.

import { Completer } from "./completer.js";
import { adoptStyles, isLeaving, isOptionChosen, SuggestionList } from "./editor_adapter.js";
import { ProseDetector } from "./prose.js";
import { contextStart } from "./text.js";

/** @typedef {Partial<ConstructorParameters<typeof Completer>[0]>} CompleterOptions */

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
 * @param {number} [numReplaced]  Number of characters before the caret that the text replaces.
 */
export function insertText(textarea, text, numReplaced = 0) {
  textarea.focus();
  const end = textarea.selectionEnd;
  // Browsers merge an insertion with the typing before and after it, unless the selection was set in between.
  textarea.setSelectionRange(end - numReplaced, end);
  // execCommand is deprecated, but nothing else writes to the undo stack. Chromium, Firefox and Safari support it.
  if (!document.execCommand("insertText", false, text)) {
    textarea.setRangeText(text, end - numReplaced, end, "end");
    textarea.dispatchEvent(new InputEvent("input", { bubbles: true, inputType: "insertText", data: text }));
  }
  textarea.setSelectionRange(textarea.selectionEnd, textarea.selectionEnd);
}

/**
 * Suggest in a textarea. Tab, Enter, Escape and the arrow keys follow `Completer.press`, undo removes exactly what was
 * accepted, the keys of an IME are left to it, and Escape, then Tab, leaves the textarea.
 * @param {HTMLTextAreaElement} textarea
 * @param {CompleterOptions & {list?: HTMLElement, panel?: HTMLElement}} [options]  Options of `Completer`, and:
 *   `list`: an `ol` or `ul` that is filled with the suggestions while there are some to choose from; a click accepts.
 *   `panel`: moving the focus into this element does not close the suggestions. Default: the list.
 * @returns {{completer: Completer, detach: () => void}}  `detach` removes all listeners and aborts the request.
 */
export function attachTextarea(textarea, { list, panel = list, ...options } = {}) {
  const suggestionList = list && new SuggestionList(list, (place) => completer.accept(place));
  const context = () => textarea.value.slice(contextStart(textarea.selectionEnd), textarea.selectionEnd);
  const prose = new ProseDetector();
  const completer = new Completer({
    context,
    position: () => textarea.selectionEnd,
    after: () => textarea.value.slice(textarea.selectionEnd),
    insert: (text, numReplaced) => insertText(textarea, text, numReplaced),
    show: (view) => suggestionList?.show(view, context(), view.suggestions),
    drawsGhost: false,
    insertsSpace: true,
    isProse: () => prose.isProse(textarea.selectionEnd, (from, to) => textarea.value.slice(from, to)),
    isEditable: () => textarea.isConnected && !textarea.readOnly && !textarea.matches(":disabled"),
    isOtherListUsed: () => isOptionChosen(textarea, list),
    ...options,
  });
  const controller = new AbortController();
  const { signal } = controller;
  textarea.setAttribute("writingsuggestions", "false"); // the browser's own inline predictions
  textarea.addEventListener("keydown", (event) => void completer.press(event), { signal });
  textarea.addEventListener("beforeinput", (event) => {
    const text = event.inputType === "insertLineBreak" ? "\n" : event.data;
    const isTyped = event.inputType === "insertText" || event.inputType === "insertLineBreak";
    if (isTyped && text && !event.isComposing && completer.type(text)) event.preventDefault();
  }, { signal });
  textarea.addEventListener("input", (event) => completer.changed(/** @type {InputEvent} */ (event)), { signal });
  textarea.addEventListener("keyup", () => completer.moved(), { signal }); // the page's own listener may have set the value
  textarea.addEventListener("compositionend", () => completer.changed(), { signal });
  textarea.addEventListener("focus", () => completer.returned(), { signal });
  textarea.addEventListener("blur", (event) => {
    if (isLeaving(event, panel)) completer.close();
  }, { signal });
  document.addEventListener("selectionchange", () => {
    if (document.activeElement !== textarea) return;
    if (textarea.selectionStart === textarea.selectionEnd) completer.moved();
    else completer.close();
  }, { signal });
  if (list) adoptStyles(/** @type {Document|ShadowRoot} */ (list.getRootNode()));
  return { completer, detach: () => (controller.abort(), completer.close(), suggestionList?.destroy()) };
}
