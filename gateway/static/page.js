// The page: connects the textarea, the suggestion panel, the settings and the completer, and shows the status line.
// The other modules do not know each other; everything that involves two of them is here.

import { createElement, setText } from "./dom.js";
import { KeyField } from "./key_field.js";
import { MirroredTextarea } from "./mirrored_textarea.js";
import { Settings } from "./settings.js";
import { load, remove, save, watch } from "./store.js";
import { renderDetails, SuggestionPanel } from "./suggestion_panel.js";
import { attachTextarea, Client, textBefore } from "./tercet.js";

/** @typedef {import("./tercet.js").View} View */

/** Alternatives per token in the details. */
const NUM_LIKELIEST = 3;
const SAVE_DELAY_MS = 300;
const HEALTH_INTERVAL_MS = 10_000;
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

/** The view shown last. @type {View} */
let currentView = completer.view;
let areDetailsOpen = false;
let numSavedKeys = Number(load("saved")) || 0;
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
  showLatency();
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

function showLatency() {
  const { status, problem, totalMs, restMs } = currentView;
  const output = find("latency", HTMLSpanElement);
  output.classList.toggle("is-problem", Boolean(problem));
  if (problem) setText(output, describe(problem));
  else if (status === "waiting" || status === "streaming") setText(output, "…");
  else if (restMs) setText(output, `resting for ${Math.ceil(restMs / 1000)} s`);
  else if (status === "empty") setText(output, "the model predicts the end of the text");
  else setText(output, totalMs === null ? "" : `${Math.round(totalMs).toLocaleString()} ms`);
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

function showSavedKeys() {
  const number = numSavedKeys.toLocaleString();
  setText(find("saved", HTMLSpanElement), `${number} ${numSavedKeys === 1 ? "keystroke" : "keystrokes"} saved`);
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
  editor.insert(text, numReplaced);
  if (numReplaced) return; // typed punctuation in place of a space
  numSavedKeys += Math.max(0, text.length - numSpentKeys);
  numSpentKeys = 0;
  save("saved", numSavedKeys);
  showSavedKeys();
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
  scheduleSave();
}

// ---- the text in the browser's storage ----

/** @type {ReturnType<typeof setTimeout>|undefined} */
let saveTimer;

function scheduleSave() {
  clearTimeout(saveTimer);
  saveTimer = setTimeout(saveText, SAVE_DELAY_MS);
}

function saveText() {
  clearTimeout(saveTimer);
  if (!textarea.value) remove("text");
  else if (!save("text", textarea.value)) announce("The text cannot be saved in this browser.");
}

function clearText() {
  editor.clear();
  saveText();
  announce("Text cleared. Undo restores it.");
}

// ---- the server ----

async function checkHealth() {
  if (document.hidden) return;
  const output = find("slots", HTMLSpanElement);
  try {
    const { models, slots } = await client.ready();
    const numWarm = slots.filter((/** @type {{state: string}} */ slot) => slot.state === "warm").length;
    setText(output, `${numWarm} of ${slots.length} ${slots.length === 1 ? "slot" : "slots"} ready`);
    settings.setModels(models);
  } catch {
    setText(output, "server unreachable");
  }
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
  find("enter-key", HTMLButtonElement).addEventListener("click", enterKey);
  addEventListener("resize", renderAtCaret);
  addEventListener("pagehide", () => (saveText(), completer.close()));
  document.addEventListener("visibilitychange", () => (document.hidden ? saveText() : void checkHealth()));
  watch("text", (value) => {
    if (!document.hasFocus()) editor.replace(value ?? "");
  });
}

function start() {
  textarea.value = load("text") ?? "";
  textarea.setSelectionRange(textarea.value.length, textarea.value.length);
  addListeners();
  applySettings();
  scrollToCaret();
  showSavedKeys();
  void checkHealth();
  setInterval(checkHealth, HEALTH_INTERVAL_MS);
}

start();
