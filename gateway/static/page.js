// The page: connects the editor, the suggestion panel, the settings and the completer, and shows the status line.
// The other modules do not know each other; everything that involves two of them is here.

import { undo } from "@codemirror/commands";
import { openSearchPanel } from "@codemirror/search";
import { EditorView } from "@codemirror/view";
import { completerOf, tercet } from "./codemirror.js";
import { Documents } from "./documents.js";
import { DocumentsPopover, numWords } from "./documents_popover.js";
import { counted, createElement, setText } from "./dom.js";
import { KeyField } from "./key_field.js";
import { KeyTable } from "./key_table.js";
import { labelOf, resolveKeys } from "./keys.js";
import { Notice } from "./notice.js";
import { OpenDocument } from "./open_document.js";
import { returnFocusTo } from "./popover_focus.js";
import { SavedKeystrokes } from "./saved_keystrokes.js";
import { ServerStatus } from "./server_status.js";
import { Settings } from "./settings.js";
import { load, save } from "./store.js";
import { renderDetails, SuggestionPanel } from "./suggestion_panel.js";
import { Client, MIN_PROBABILITIES } from "./tercet.js";
import { TextEditor } from "./text_editor.js";
import { expandOnGesture, followKeyboard, touch } from "./touch_strip.js";

/** @typedef {import("./tercet.js").View} View */
/** @typedef {import("./server_status.js").Status["models"]} Models */

/** Alternatives per token in the details. */
const NUM_LIKELIEST = 3;
/** Scrolling keeps this much visible above the caret, for the preceding lines. */
const MARGIN_ABOVE_PX = 120;
/** Scrolling keeps this much visible below the caret, so that a list that opens unasked needs no scrolling. */
const MARGIN_BELOW_PX = 190;
/** Height of the status line. */
const STATUS_PX = 48;
/** Space between the panel and the status line. */
const MARGIN_STATUS_PX = 16;
/** Of the text before the caret, enough to hold the word that a suggestion completes. */
const MAX_WORD_CHARS = 100;
const HINT = "Start writing. Likely words appear as you type, and an idea when you pause.";
/** The element that has the text. */
const TEXT_ATTRIBUTES = {
  "id": "text",
  "aria-label": "Text",
  "aria-autocomplete": "both",
  "aria-controls": "suggestions",
  "aria-describedby": "hint",
  "aria-placeholder": HINT,
  "autocapitalize": "sentences",
  "autocorrect": "on",
  "spellcheck": "true",
  "writingsuggestions": "false", // the browser's own inline predictions
};
const UNFAMILIAR = "the model does not know text like this, so it suggests nothing";
const IS_LOCAL = /^(?:(?:.+\.)?localhost|127(?:\.\d+){3}|\[::1\])$/.test(location.hostname);
/** Ghost texts of a browser that are followed by their key, and how long one is visible until it counts as seen. */
const NUM_TAB_HINTS = 3;
const SEEN_MS = 200;
/** Words are counted once the writer has stood still for this long: in a novel it takes some milliseconds. */
const COUNT_DELAY_MS = 700;

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 * @throws {Error} If the page has no such element.
 */
function find(id, type) {
  const element = document.getElementById(id);
  if (!(element instanceof type)) throw new Error(`The page has no ${type.name} with the id "${id}".`);
  return element;
}

const container = find("editor", HTMLDivElement);
const panelElement = find("panel", HTMLDivElement);
const panel = new SuggestionPanel(panelElement);
const settings = new Settings(find("settings", HTMLFormElement), applySettings);
const keyTable = new KeyTable(find("shortcuts", HTMLElement), applySettings);
const keyField = new KeyField(find("key-form", HTMLFormElement), find("key-note", HTMLElement), applyKey, useKey);
const client = new Client({ key: keyField.key });
const savedKeystrokes = new SavedKeystrokes(showSavedKeys);
const hint = createElement("span", "", describePage([]));
/** Keys pressed to use the current suggestions, subtracted from the characters that they insert. */
let numSpentKeys = 0;
container.addEventListener("keydown", handleKey, { capture: true }); // before the completer does
const editor = new TextEditor(container, {
  attributes: TEXT_ATTRIBUTES,
  hint: () => hint,
  margins: () => ({
    top: Math.min(MARGIN_ABOVE_PX, innerHeight / 4),
    bottom: Math.min(MARGIN_BELOW_PX, innerHeight / 4) + STATUS_PX,
  }),
  changed: handleChange,
  extensions: [
    tercet({ client, list: false, panel: container, show: showView, options: () => settings.requestFields }),
    savedKeystrokes.extension(takeSpentKeys),
    EditorView.updateListener.of(({ transactions }) => transactions.forEach(announceAcceptance)),
  ],
});
const completer = /** @type {import("./tercet.js").Completer} */ (completerOf(editor.view));
const documents = new Documents();
const notice = new Notice(find("notice", HTMLDivElement), announce);
const openDocument = new OpenDocument({
  documents,
  editor,
  show: showDocument,
  notify: (message) => notice.show(message),
});
const documentsPopover = new DocumentsPopover({
  popover: find("documents", HTMLElement),
  button: find("current-document", HTMLButtonElement),
  editor,
  documents,
  openDocument,
  notice,
  clear: clearText,
});
const server = new ServerStatus(client, showServer);

/** The view shown last. @type {View} */
let currentView = completer.view;
let areDetailsOpen = false;
let numTabHints = Number(load("tabHints"));
/** @type {ReturnType<typeof setTimeout>|undefined} */
let hintTimer;

// ---- suggestions ----

/** @param {View} view */
function showView(view) {
  const previous = currentView;
  currentView = view;
  const becameReady = view.status === "ready" && previous.status !== "ready";
  panel.show(view, editor.textBefore(MAX_WORD_CHARS), touch.matches);
  if (becameReady && !view.isChosenByUser) panel.resetPosition();
  // Unasked suggestions must neither scroll the page nor make a screen reader interrupt the typing.
  const isAnnounced = panel.isOpen && (view.isExplicit || view.isChosenByUser);
  placePanel(isAnnounced);
  if (isAnnounced) editor.view.contentDOM.setAttribute("aria-activedescendant", panel.chosenId);
  else editor.view.contentDOM.removeAttribute("aria-activedescendant");
  if (view.chosen?.sentence !== previous.chosen?.sentence || !panel.isOpen) void showDetails();
  if (view.chosen?.text !== previous.chosen?.text) showTabHint(view.chosen);
  showProgress();
  if (view.problem?.code === "unreachable" && view.problem !== previous.problem) server.reportUnreachable();
  if (view.status === "streaming" || becameReady) server.reportReachable();
  if (becameReady) showKeyProblem("");
  if (view.isUnfamiliar && !previous.isUnfamiliar) announce(UNFAMILIAR);
  if (view.status === "empty" && previous.status !== "empty") announce(`No suggestions: ${describeEmpty()}.`);
  if (view.problem && view.problem !== previous.problem) showProblem(view.problem);
}

/** Show which key accepts the ghost text (style.css), if it is one of the first. @param {View["chosen"]} chosen */
function showTabHint(chosen) {
  clearTimeout(hintTimer);
  const isShown = Boolean(chosen) && numTabHints < NUM_TAB_HINTS && !touch.matches;
  container.classList.toggle("has-tab-hint", isShown);
  container.style.setProperty("--accept-key", JSON.stringify(acceptKey()));
  if (isShown) hintTimer = setTimeout(() => save("tabHints", numTabHints += 1), SEEN_MS);
}

/**
 * Place the panel below the ghost text. While text follows, it is docked above the status line: what is suggested is read
 * in its place, and must not be hidden.
 * @param {boolean} isScrolled  Scroll to make room for it.
 */
function placePanel(isScrolled) {
  if (!panel.isOpen) return;
  panelElement.classList.toggle("is-docked", editor.textAfter !== "none");
  editor.measureCaret((caretBottomPx) => {
    const caretTop = caretBottomPx - container.getBoundingClientRect().top;
    panel.placeAt(caretTop);
    if (isScrolled) scrollToPanel(caretTop);
  });
}

/** Scroll down until the panel is above the status line. @param {number} caretBottomPx  From the container's top. */
function scrollToPanel(caretBottomPx) {
  if (isDocked()) return;
  const caretBottom = container.getBoundingClientRect().top + caretBottomPx;
  const hiddenPx =
    panelElement.getBoundingClientRect().bottom + MARGIN_STATUS_PX - find("suggest", HTMLButtonElement).getBoundingClientRect().top;
  const maxScrollPx = caretBottom - MARGIN_ABOVE_PX; // the caret stays visible even if the panel does not fit
  if (hiddenPx > 0 && maxScrollPx > 0) scrollBy({ top: Math.min(hiddenPx, maxScrollPx) });
}

/** Whether the panel is docked above the status line (style.css). */
function isDocked() {
  return getComputedStyle(panelElement).position === "fixed";
}

/** Write a message to the live region, which only screen readers present. @param {string} message */
function announce(message) {
  setText(find("announcements", HTMLDivElement), message);
}

function showProgress() {
  const { status, problem, totalMs, restMs, isUnfamiliar } = currentView;
  const output = find("message", HTMLSpanElement);
  const isAwaited = status === "waiting" || status === "streaming";
  // Whether the server responds is said by `showServer` alone.
  const message = problem && problem.code !== "unreachable" ? describe(problem) : "";
  output.classList.toggle("is-problem", Boolean(message));
  find("server", HTMLSpanElement).hidden = Boolean(message); // it is not ready, whatever its health check says
  if (message || isAwaited) setText(output, message || "…");
  else if (restMs) setText(output, `suggestions rest for ${Math.ceil(restMs / 1000)} s`);
  else setText(output, isUnfamiliar || status === "empty" ? describeEmpty() : "");
  setText(find("latency", HTMLSpanElement), totalMs === null || isAwaited ? "…" : `${Math.round(totalMs).toLocaleString()} ms`);
}

function describeEmpty() {
  if (currentView.isUnfamiliar) return UNFAMILIAR;
  return editor.textAfter === "line" ? "nothing fits here" : "the model predicts the end of the text";
}

/** @param {import("./tercet.js").Problem} problem */
function showProblem(problem) {
  announce(describe(problem));
  if (problem.status === 401) showKeyProblem(describe(problem));
}

/** @param {import("./tercet.js").Problem} problem  @returns {string}  What it is, and what to do. */
function describe(problem) {
  if (problem.status !== 401) return problem.message;
  return client.key ? "The server rejected this API key." : "This server requires an API key.";
}

/** Show a message at the field for the key and offer to go there. The focus stays in the text. @param {string} message */
function showKeyProblem(message) {
  keyField.showProblem(message);
  find("enter-key", HTMLButtonElement).hidden = !message;
}

/** @param {number} number */
function showSavedKeys(number) {
  setText(find("saved", HTMLSpanElement), counted(number, "keystroke"));
}

/** @type {ReturnType<typeof setTimeout>|undefined} */
let countTimer;

function countLater() {
  clearTimeout(countTimer);
  countTimer = setTimeout(countWords, COUNT_DELAY_MS);
}

function countWords() {
  setText(find("word-count", HTMLSpanElement), counted(numWords(editor.text), "word"));
}

async function showDetails() {
  find("show-details", HTMLButtonElement).ariaExpanded = String(areDetailsOpen);
  const chosen = currentView.chosen?.sentence;
  if (!areDetailsOpen || !chosen) {
    panel.showDetails([]);
    return;
  }
  const sentence = await completer.explain(NUM_LIKELIEST).catch(() => null);
  if (chosen !== currentView.chosen?.sentence || !areDetailsOpen) return; // changed during the request
  if (sentence) panel.showDetails(renderDetails(sentence));
  else panel.showDetails([createElement("p", "statistics", "No details are available for this suggestion.")]);
  placePanel(true);
}

// ---- actions ----

function takeSpentKeys() {
  const num = numSpentKeys;
  numSpentKeys = 0;
  return num;
}

/** @param {import("@codemirror/state").Transaction} transaction */
function announceAcceptance(transaction) {
  if (!transaction.isUserEvent("input.complete")) return;
  transaction.changes.iterChanges((_, __, ___, ____, inserted) => announce(`Accepted: ${inserted.toString()}`));
}

/** Show nothing but the text, until the pointer or the focus is at the top or bottom. */
function toggleFocusMode() {
  const isOn = document.body.classList.toggle("is-focus-mode");
  find("focus-mode", HTMLButtonElement).ariaPressed = String(isOn);
  editor.focus();
}

function toggleDetails() {
  areDetailsOpen = !areDetailsOpen;
  void showDetails();
}

function applySettings() {
  const { eagerness } = settings;
  completer.mode = eagerness === "pauses" || eagerness === "off" ? eagerness : "live";
  const level = /** @type {keyof typeof MIN_PROBABILITIES} */ (eagerness);
  completer.minProbability = MIN_PROBABILITIES[level] ?? completer.minProbability;
  completer.proseOnly = settings.isProseOnly;
  completer.tabTakes = settings.tabTakes;
  completer.keys = keyTable.own;
  keyTable.show(completer.view.keys);
  completer.showsAll = touch.matches;
  completer.close();
}

function dismiss() {
  editor.focus();
  completer.dismiss();
  announce("Dismissed.");
}

/** @param {KeyboardEvent} event */
function handleKey(event) {
  if (event.target !== editor.view.contentDOM) return;
  const isDetailsKey = (event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "i";
  if (isDetailsKey && panel.isOpen) {
    event.preventDefault();
    event.stopPropagation();
    toggleDetails();
    return;
  }
  if (event.key === "Escape") {
    // Once the completer has handled it.
    setTimeout(() => announce(completer.isTabFree ? "Press Tab to leave the text field." : "Dismissed."));
  }
  if (["Alt", "Control", "Meta", "Shift"].includes(event.key)) return;
  const isChord = event.altKey || event.ctrlKey;
  const numKeys = isChord ? 2 : Number(event.key.length > 1);
  const isAsking = isChord && (event.key === "Enter" || event.key === " ");
  if (currentView.chosen) numSpentKeys += numKeys;
  else numSpentKeys = isAsking ? numKeys : 0;
}

/** @param {boolean} isWriters */
function handleChange(isWriters) {
  if (isWriters) openDocument.changed();
  else if (document.hasFocus()) completer.returned(); // another document
  if (!editor.isEmpty) find("model-line", HTMLParagraphElement).hidden = true;
  countLater();
}

// ---- the text in the browser's storage ----

function showDocument() {
  documentsPopover.show();
  const { isSaved } = documents;
  const message = isSaved ? "" : "Not saved: this browser refuses storage. Download it to keep it.";
  const button = find("download", HTMLButtonElement);
  if (button.hidden && message) announce(message);
  setText(find("storage", HTMLSpanElement), message);
  button.hidden = isSaved;
}

function clearText() {
  if (editor.isEmpty) return;
  openDocument.save();
  const cleared = openDocument.document;
  editor.clear();
  openDocument.save();
  notice.show("Cleared.", () => restoreText(cleared));
}

/**
 * Bring back a cleared text. What was written since then stays, after it.
 * @param {import("./documents.js").TextDocument} cleared
 */
function restoreText(cleared) {
  const { id, text } = cleared;
  if (id !== openDocument.document.id) openDocument.open(documents.read(id) ?? { ...cleared, text: "" });
  const added = editor.text;
  editor.focus();
  if (!added) undo(editor.view);
  if (editor.text === text) return;
  editor.replace(added ? `${text}\n\n${added}` : text);
  openDocument.changed();
}

// ---- the server ----

/** @param {import("./server_status.js").Status} status */
function showServer({ isReachable, numWarm, numSlots, version, models }) {
  const output = find("server", HTMLSpanElement);
  output.classList.toggle("is-problem", !isReachable);
  if (isReachable) setText(output, numWarm ? "the model is ready" : "the model is loading");
  else setText(output, `The server is not responding.${documents.isSaved ? " Your text is safe in this browser." : ""}`);
  setText(find("slots", HTMLSpanElement), `${numWarm} of ${counted(numSlots, "slot")} ready`);
  if (!isReachable) return;
  setText(find("version", HTMLSpanElement), `Tercet ${version}`);
  settings.setModels(models);
  showModel(models);
  setText(hint, describePage(models));
}

/** The key that takes a suggestion, or a word of it. */
function acceptKey() {
  const { accept, acceptWord } = resolveKeys(keyTable.own, settings.tabTakes);
  return labelOf(accept[0] ?? acceptWord[0]);
}

/** What a writer reads first. The page's policy allows requests to its server only. @param {Models} models */
function describePage(models) {
  const isHere = IS_LOCAL && !models.some(({ source }) => source === "remote");
  const place = isHere ? "Nothing leaves this computer." : `Your text is sent to ${location.host} and to no other site.`;
  return `${HINT} ${touch.matches ? "A tap" : acceptKey()} takes them. ${place}`;
}

/**
 * Say on the first screen which model writes, and how to get a better one.
 * @param {Models} models
 */
function showModel(models) {
  const model = models.find((each) => each.model === settings.requestFields.model_size) ?? models[0];
  const line = find("model-line", HTMLParagraphElement);
  line.hidden = !editor.isEmpty || !model;
  if (line.hidden || line.dataset.model === model.model) return;
  line.dataset.model = model.model;
  const size = model.bytes ? `, a file of ${Math.round(model.bytes / 1e6).toLocaleString()} MB` : "";
  line.replaceChildren(`The suggestions come from a language model: ${model.model}${size}. `);
  if (model.source !== "embedded") return;
  line.append("It is a small model, for a first try. ", createElement("code", "", "TERCET_MODELS=smollm2 make serve"));
  line.append(" serves a better one: 135 million parameters, a download of 93 MB, 2 GB of memory.");
}

/** @param {string} key */
function applyKey(key) {
  client.key = key;
  showKeyProblem("");
}

/** Try a new key at once, with the writer back in the text. */
function useKey() {
  find("settings", HTMLFormElement).hidePopover();
  completer.request();
}

// ---- start ----

/**
 * Handle clicks on a button without moving the focus and the caret from the text.
 * @param {string} id
 * @param {() => void} action
 */
function onClick(id, action) {
  const button = find(id, HTMLButtonElement);
  button.addEventListener("pointerdown", (event) => event.preventDefault());
  button.addEventListener("mousedown", (event) => event.preventDefault());
  button.addEventListener("click", action);
}

function addListeners() {
  find("details", HTMLElement).addEventListener("keydown", ({ key }) => key === "Escape" && dismiss());
  const list = find("suggestions", HTMLOListElement);
  list.addEventListener("mousedown", (event) => event.preventDefault());
  expandOnGesture(list, () => panel.expand());
  list.addEventListener("click", (event) => {
    const option = event.target instanceof Element ? event.target.closest("li") : null;
    if (option) completer.accept(Number(option.dataset.place));
  });
  touch.addEventListener("change", applySettings);
  returnFocusTo(editor);
  if (visualViewport) followKeyboard(visualViewport);
  onClick("suggest", () => (editor.focus(), completer.request()));
  onClick("accept", () => completer.accept());
  onClick("accept-word", () => completer.acceptWord());
  onClick("show-details", toggleDetails);
  onClick("dismiss", dismiss);
  onClick("find", () => openSearchPanel(editor.view));
  onClick("focus-mode", toggleFocusMode);
  onClick("download", () => documentsPopover.download("md"));
  find("enter-key", HTMLButtonElement).addEventListener("click", () => {
    find("settings", HTMLFormElement).showPopover();
    keyField.focus();
  });
  addEventListener("resize", () => placePanel(false));
  addEventListener("pagehide", () => completer.close());
  addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey || event.key.toLowerCase() !== "s") return;
    event.preventDefault();
    void documentsPopover.saveToDisk();
  });
  // CodeMirror draws only what is on the screen.
  addEventListener("beforeprint", () => setText(find("print", HTMLDivElement), editor.text));
  addEventListener("afterprint", () => setText(find("print", HTMLDivElement), ""));
}

async function start() {
  addListeners();
  await documents.open();
  history.scrollRestoration = "manual"; // the position of the document is restored
  const document = documents.current;
  if (document) openDocument.open(document);
  else showDocument();
  applySettings();
  countLater();
  editor.focus();
  // Only secure contexts have service workers. Elsewhere the page needs its server.
  navigator.serviceWorker?.register("service_worker.js").catch(() => {});
}

void start();
