// The page: connects the textarea, the suggestion panel, the settings and the completer, and shows the status line.
// The other modules do not know each other; everything that involves two of them is here.

import { Documents } from "./documents.js";
import { DocumentsPopover } from "./documents_popover.js";
import { createElement, setText } from "./dom.js";
import { KeyField } from "./key_field.js";
import { MirroredTextarea } from "./mirrored_textarea.js";
import { Notice } from "./notice.js";
import { OpenDocument } from "./open_document.js";
import { SavedKeystrokes } from "./saved_keystrokes.js";
import { ServerStatus } from "./server_status.js";
import { Settings } from "./settings.js";
import { renderDetails, SuggestionPanel } from "./suggestion_panel.js";
import { attachTextarea, Client, textBefore } from "./tercet.js";

/** @typedef {import("./tercet.js").View} View */

/** Alternatives per token in the details. */
const NUM_LIKELIEST = 3;
/** Scrolling keeps this much visible above the caret, for the preceding lines. */
const MARGIN_ABOVE_PX = 120;
/** Scrolling keeps this much visible below the caret, so that a list that opens unasked needs no scrolling. */
const MARGIN_BELOW_PX = 190;
/** Space between the panel and the status line. */
const MARGIN_STATUS_PX = 16;
/**
 * Live suggestions expected to save fewer keystrokes are held back, by eagerness.
 * @type {Record<string, number>}
 */
const MIN_USEFULNESS = { eager: 0, normal: 1, quiet: 2 };

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

const textarea = find("text", HTMLTextAreaElement);
const container = find("editor", HTMLDivElement);
const panelElement = find("panel", HTMLDivElement);
const editor = new MirroredTextarea(container, textarea, find("mirror", HTMLDivElement));
const panel = new SuggestionPanel(panelElement);
const settings = new Settings(find("settings", HTMLFormElement), applySettings);
const keyField = new KeyField(find("key-form", HTMLFormElement), find("key-note", HTMLElement), applyKey, useKey);
const client = new Client({ key: keyField.key });
textarea.addEventListener("keydown", handleKey); // before the completer does
const { completer } = attachTextarea(textarea, {
  client,
  panel: container,
  insert: insertSuggestion,
  show: showView,
  options: () => settings.requestFields,
});
const documents = new Documents();
const notice = new Notice(find("notice", HTMLDivElement), announce);
const openDocument = new OpenDocument({
  documents,
  textarea,
  replaceText: (text) => editor.replace(text),
  show: showDocument,
  notify: (message) => notice.show(message),
});
const documentsPopover = new DocumentsPopover({
  popover: find("documents", HTMLElement),
  button: find("current-document", HTMLButtonElement),
  textarea,
  documents,
  openDocument,
  notice,
});
const savedKeystrokes = new SavedKeystrokes(textarea, showSavedKeys);
const server = new ServerStatus(client, showServer);

/** The view shown last. @type {View} */
let currentView = completer.view;
let areDetailsOpen = false;
/** Keys pressed to use the current suggestions, subtracted from the characters that they insert. */
let numSpentKeys = 0;

// ---- suggestions ----

/** @param {View} view */
function showView(view) {
  const previous = currentView;
  currentView = view;
  const becameReady = view.status === "ready" && previous.status !== "ready";
  panel.show(view, textBefore(textarea));
  if (becameReady && !view.isChosenByUser) panel.resetPosition();
  renderAtCaret();
  // Unasked suggestions must neither scroll the page nor make a screen reader interrupt the typing.
  const isAnnounced = panel.isOpen && (view.isExplicit || view.isChosenByUser);
  if (isAnnounced) scrollToCaret();
  if (isAnnounced) textarea.setAttribute("aria-activedescendant", panel.chosenId);
  else textarea.removeAttribute("aria-activedescendant");
  if (view.chosen?.sentence !== previous.chosen?.sentence || !panel.isOpen) void showDetails();
  showProgress();
  if (view.problem?.code === "unreachable" && view.problem !== previous.problem) server.reportUnreachable();
  if (view.status === "streaming" || becameReady) server.reportReachable();
  if (becameReady) {
    showKeyProblem("");
    if (view.isExplicit) announceSuggestions();
  }
  if (view.status === "empty" && previous.status !== "empty") {
    announce("No suggestions: the model predicts the end of the text.");
  }
  if (view.problem && view.problem !== previous.problem) showProblem(view.problem);
}

/** Draw the ghost text at the caret and the panel below it. */
function renderAtCaret() {
  editor.render(currentView.chosen?.rest ?? "");
  if (panel.isOpen) panel.placeAt(editor.caretBottom);
}

/** Scroll down until the caret's line and the room for the panel, or the panel itself, are above the status line. */
function scrollToCaret() {
  const caretBottom = container.getBoundingClientRect().top + editor.caretBottom;
  const panelBottom = panel.isOpen && !isDocked() ? panelElement.getBoundingClientRect().bottom : 0;
  const bottom = Math.max(panelBottom, caretBottom + MARGIN_BELOW_PX);
  const hiddenPx = bottom - find("suggest", HTMLButtonElement).getBoundingClientRect().top + MARGIN_STATUS_PX;
  const maxScrollPx = caretBottom - MARGIN_ABOVE_PX; // the caret stays visible even if the panel does not fit
  if (hiddenPx > 0 && maxScrollPx > 0) scrollBy({ top: Math.min(hiddenPx, maxScrollPx) });
}

/** Whether the panel is docked above the status line, as on touch screens (style.css). */
function isDocked() {
  return getComputedStyle(panelElement).position === "fixed";
}

function announceSuggestions() {
  const { suggestions, chosen } = currentView;
  announce(`${suggestions.length} ${suggestions.length === 1 ? "suggestion" : "suggestions"}: ${chosen?.rest ?? ""}`);
}

/** Write a message to the live region, which only screen readers present. @param {string} message */
function announce(message) {
  setText(find("announcements", HTMLDivElement), message);
}

function showProgress() {
  const { status, problem, totalMs, restMs } = currentView;
  const output = find("message", HTMLSpanElement);
  // Whether the server responds is said by `showServer` alone.
  const message = problem && problem.code !== "unreachable" ? describe(problem) : "";
  output.classList.toggle("is-problem", Boolean(message));
  if (status === "waiting" || status === "streaming") setText(output, "…");
  else if (restMs && !message) setText(output, `suggestions rest for ${Math.ceil(restMs / 1000)} s`);
  else if (status === "empty") setText(output, "the model predicts the end of the text");
  else setText(output, message);
  const isComplete = totalMs !== null && status !== "waiting" && status !== "streaming";
  setText(find("latency", HTMLSpanElement), isComplete ? `${Math.round(totalMs).toLocaleString()} ms` : "…");
}

/** @param {import("./tercet.js").Problem} problem */
function showProblem(problem) {
  announce(describe(problem));
  if (problem.status === 401) showKeyProblem(describe(problem));
}

/** @param {import("./tercet.js").Problem} problem  @returns {string} */
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
  const unit = number === 1 ? "keystroke" : "keystrokes";
  setText(find("saved", HTMLSpanElement), `${number.toLocaleString()} ${unit} saved`);
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
  renderAtCaret();
  scrollToCaret();
}

// ---- actions ----

/** @param {string} text @param {number} numReplaced */
function insertSuggestion(text, numReplaced) {
  if (numReplaced) {
    editor.insert(text, numReplaced); // typed punctuation in place of a space
    return;
  }
  savedKeystrokes.record(() => editor.insert(text, 0), Math.max(0, text.length - numSpentKeys));
  numSpentKeys = 0;
  announce(`Accepted: ${text}`);
}

function toggleDetails() {
  areDetailsOpen = !areDetailsOpen;
  void showDetails();
}

function applySettings() {
  const { eagerness } = settings;
  completer.mode = eagerness === "pauses" || eagerness === "off" ? eagerness : "live";
  completer.minUsefulness = MIN_USEFULNESS[eagerness] ?? 0;
  completer.close();
}

function dismiss() {
  textarea.focus();
  completer.dismiss();
  announce("Dismissed.");
}

/** @param {KeyboardEvent} event */
function handleKey(event) {
  const isDetailsKey = (event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "i";
  if (isDetailsKey && panel.isOpen) {
    event.preventDefault();
    toggleDetails();
    return;
  }
  const isCharacter = event.key.length === 1 && !event.altKey;
  const numKeys = Number(!isCharacter) * (event.altKey ? 2 : 1); // a chord counts as two
  numSpentKeys = currentView.chosen ? numSpentKeys + numKeys : Number(event.key === "Tab");
}

/** Announce what a key did that the completer has handled. @param {KeyboardEvent} event */
function announceKey(event) {
  if (event.key !== "Escape") return;
  announce(completer.isTabFree ? "Press Tab to leave the text field." : "Dismissed.");
}

function handleInput() {
  scrollToCaret();
  openDocument.changed();
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
  if (!textarea.value) return;
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
  const { value } = textarea;
  textarea.focus();
  if (!value) document.execCommand("undo");
  // Not `editor.insert`: browsers take seconds to insert a long text with many lines.
  if (textarea.value !== text) openDocument.replaceText(value ? `${text}\n\n${value}` : text);
}

// ---- the server ----

/** @param {import("./server_status.js").Status} status */
function showServer({ isReachable, numWarm, numSlots, models }) {
  const output = find("server", HTMLSpanElement);
  output.classList.toggle("is-problem", !isReachable);
  if (!isReachable) setText(output, "The server is not responding.");
  else setText(output, numWarm ? "ready" : "the model is loading");
  setText(find("slots", HTMLSpanElement), `${numWarm} of ${numSlots} ${numSlots === 1 ? "slot" : "slots"} ready`);
  if (isReachable) settings.setModels(models);
}

function enterKey() {
  find("settings", HTMLFormElement).showPopover();
  keyField.focus();
}

/** @param {string} key */
function applyKey(key) {
  client.key = key;
  showKeyProblem("");
}

/** Try a new key at once, with the writer back in the text. */
function useKey() {
  find("settings", HTMLFormElement).hidePopover();
  textarea.focus();
  completer.request();
}

// ---- start ----

/**
 * Handle clicks on a button without moving the focus and the caret from the textarea.
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
  textarea.addEventListener("keydown", announceKey);
  textarea.addEventListener("input", handleInput);
  document.addEventListener("selectionchange", renderAtCaret);
  find("details", HTMLElement).addEventListener("keydown", (event) => {
    if (event.key === "Escape") dismiss();
  });
  const list = find("suggestions", HTMLOListElement);
  list.addEventListener("mousedown", (event) => event.preventDefault());
  list.addEventListener("click", (event) => {
    const option = event.target instanceof Element ? event.target.closest("li") : null;
    if (option) completer.accept(Number(option.dataset.place));
  });
  onClick("suggest", () => (textarea.focus(), completer.request()));
  onClick("accept", () => completer.accept());
  onClick("accept-word", () => completer.acceptWord());
  onClick("show-details", toggleDetails);
  onClick("dismiss", dismiss);
  onClick("clear", clearText);
  onClick("download", () => documentsPopover.download("md"));
  find("enter-key", HTMLButtonElement).addEventListener("click", enterKey);
  addEventListener("resize", renderAtCaret);
  addEventListener("pagehide", () => completer.close());
}

function start() {
  addListeners();
  history.scrollRestoration = "manual"; // the position of the document is restored
  const document = documents.current;
  if (document) openDocument.open(document);
  else showDocument();
  applySettings();
  renderAtCaret();
  // Only secure contexts have service workers. Elsewhere the page needs its server.
  navigator.serviceWorker?.register("service_worker.js").catch(() => {});
}

start();
