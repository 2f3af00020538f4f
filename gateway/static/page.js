// The page: puts the paper, the panel, the settings and the client together, and tells what goes on.
// Each of them can be read by itself; what happens between them is here.

import { element, write } from "./dom.js";
import { describe, Panel } from "./panel.js";
import { Paper } from "./paper.js";
import { Settings } from "./settings.js";
import { forget, load, onForeignSave, save } from "./store.js";
import { Client, Completer } from "./tercet.js";

/** @typedef {import("./tercet.js").View} View */

const NUM_LIKELIEST = 3;
const SAVE_AFTER_MS = 300;
const LOOK_EVERY_MS = 10_000;
/** Kept in sight: the lines before the one that is being written, and room for those after it. */
const LINES_ABOVE_PX = 120;
const LINES_BELOW_PX = 80;
const KEY = "tercet.key";

/** @template {HTMLElement} T @param {string} id @param {new () => T} kind @returns {T} */
function find(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`The page has no ${kind.name} "${id}".`);
  return found;
}

const text = find("text", HTMLTextAreaElement);
const place = find("paper", HTMLDivElement);
const paper = new Paper(place, text, find("mirror", HTMLDivElement));
const panel = new Panel(find("panel", HTMLDivElement));
const settings = new Settings(find("settings", HTMLFormElement), useSettings);
const client = new Client({ key: sessionStorage.getItem(KEY) ?? "" });
const completer = new Completer({
  client,
  context: () => paper.context,
  insert: take,
  show,
  options: () => settings.options,
  asksAtPauses: settings.asksAtPauses,
});

/** The last that was shown. @type {View} */
let shown = completer.view;
let isDetailed = false;
/** Tab goes its own way once, after an Escape that had nothing to dismiss. */
let mayLeave = false;
/** Keys saved so far, and keys spent on the suggestions that are being shown. */
let numSaved = Number(load("saved")) || 0;
let numSpent = 0;

// ---- what is shown ----

/** @param {View} view */
function show(view) {
  const before = shown;
  shown = view;
  panel.show(view, paper.context);
  if (view.status === "ready" && before.status !== "ready" && !view.isTouched) panel.settle();
  draw();
  if (view.status !== "idle" || before.status !== "idle") keepInSight();
  text.ariaExpanded = String(panel.isOpen);
  const isSpoken = panel.isOpen && (view.isAsked || view.isTouched);
  if (isSpoken) text.setAttribute("aria-activedescendant", panel.chosenId);
  else text.removeAttribute("aria-activedescendant");
  if (view.chosen?.sentence !== before.chosen?.sentence || !panel.isOpen) void showDetails();
  tellLatency();
  if (view.status === "ready" && before.status !== "ready") announceSuggestions();
  if (view.status === "empty" && before.status !== "empty") announce("No suggestion: the model would end here.");
  if (view.problem && view.problem !== before.problem) tellProblem(view.problem);
}

/** The ghost and the panel, where the cursor is now. */
function draw() {
  paper.draw(shown.chosen?.rest ?? "");
  if (panel.isOpen) panel.placeUnder(paper.cursorBottom);
}

/** Scroll so far that the line being written, and the panel under it, can be read above the status line. */
function keepInSight() {
  const cursor = place.getBoundingClientRect().top + paper.cursorBottom;
  const bottom = panel.isOpen ? find("panel", HTMLDivElement).getBoundingClientRect().bottom : cursor + LINES_BELOW_PX;
  const hidden = bottom - find("ask", HTMLButtonElement).getBoundingClientRect().top + 16;
  const spare = cursor - LINES_ABOVE_PX; // the line itself stays in sight where the panel does not fit below it
  if (hidden > 0 && spare > 0) scrollBy({ top: Math.min(hidden, spare) });
}

function announceSuggestions() {
  const number = shown.suggestions.length;
  announce(`${number} ${number === 1 ? "suggestion" : "suggestions"}: ${shown.chosen?.rest ?? ""}`);
}

/** To a screen reader, and to nobody else. @param {string} news */
function announce(news) {
  write(find("news", HTMLDivElement), news);
}

function tellLatency() {
  const { status, problem, totalMs } = shown;
  const place = find("latency", HTMLSpanElement);
  place.classList.toggle("is-problem", Boolean(problem));
  if (problem) write(place, problem.message);
  else if (status === "waiting" || status === "streaming") write(place, "…");
  else if (status === "empty") write(place, "the model would end here");
  else write(place, totalMs === null ? "" : `${Math.round(totalMs).toLocaleString()} ms`);
}

/** @param {import("./tercet.js").Problem} problem */
function tellProblem(problem) {
  announce(problem.message);
  if (problem.status === 401) askForKey();
}

function tellSaved() {
  const number = numSaved.toLocaleString();
  write(find("saved", HTMLSpanElement), `${number} ${numSaved === 1 ? "keystroke" : "keystrokes"} saved`);
}

async function showDetails() {
  find("show-details", HTMLButtonElement).ariaExpanded = String(isDetailed);
  const chosen = shown.chosen?.sentence;
  if (!isDetailed || !chosen) return panel.showDetails([]);
  const sentence = await completer.explain(NUM_LIKELIEST).catch(() => null);
  if (chosen !== shown.chosen?.sentence || !isDetailed) return undefined; // another one by now
  panel.showDetails(sentence ? describe(sentence) : [element("p", "figures", "No details are to be had of this one.")]);
  draw();
  return keepInSight();
}

// ---- what is done ----

/** @param {string} words */
function take(words) {
  paper.insert(words);
  numSaved += Math.max(0, words.length - numSpent);
  numSpent = 0;
  save("saved", numSaved);
  tellSaved();
  announce(`Taken: ${words}`);
}

function toggleDetails() {
  isDetailed = !isDetailed;
  void showDetails();
}

function useSettings() {
  completer.asksAtPauses = settings.asksAtPauses;
  completer.close();
}

function dismiss() {
  text.focus();
  completer.dismiss();
  announce("Dismissed.");
}

/** @param {KeyboardEvent} event */
function press(event) {
  const isDetailsKey = (event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "i";
  if (isDetailsKey && panel.isOpen) {
    event.preventDefault();
    toggleDetails();
    return;
  }
  if (event.key === "Tab" && mayLeave) return;
  const isLetter = event.key.length === 1;
  numSpent = panel.isOpen ? numSpent + Number(!isLetter) : Number(event.key === "Tab");
  const isOurs = completer.press(event);
  if (event.key === "Escape" && isOurs) announce("Dismissed.");
  mayLeave = event.key === "Escape" && !isOurs;
  if (mayLeave) announce("Tab leaves the text now.");
}

function changed(/** @type {Event} */ event) {
  mayLeave = false;
  completer.changed(event);
  keepInSight();
  keepSoon();
}

function moved() {
  if (document.activeElement !== text) return;
  if (text.selectionStart !== text.selectionEnd) completer.close();
  else completer.moved();
  draw();
}

// ---- the text, kept in this browser ----

/** @type {ReturnType<typeof setTimeout>|undefined} */
let keeping;

function keepSoon() {
  clearTimeout(keeping);
  keeping = setTimeout(keep, SAVE_AFTER_MS);
}

function keep() {
  clearTimeout(keeping);
  if (!text.value) forget("text");
  else if (!save("text", text.value)) announce("The text cannot be kept in this browser.");
}

function clear() {
  paper.clear();
  keep();
  announce("Cleared. Undo brings it back.");
}

// ---- the server ----

async function look() {
  if (document.hidden) return;
  try {
    const { models, slots } = await client.ready();
    const warm = slots.filter((/** @type {{state: string}} */ slot) => slot.state === "warm").length;
    write(find("slots", HTMLSpanElement), `${warm} of ${slots.length} ${slots.length === 1 ? "slot" : "slots"} ready`);
    settings.offer(models);
  } catch {
    write(find("slots", HTMLSpanElement), "no server");
  }
}

function askForKey() {
  const wasRefused = Boolean(client.key);
  const form = find("key-form", HTMLFormElement);
  const label = /** @type {HTMLElement} */ (form.querySelector("label"));
  const words = wasRefused ? "The server refused that key" : "This server asks for a key";
  write(label, words);
  form.hidden = false;
  find("key", HTMLInputElement).select();
}

/** @param {SubmitEvent} event */
function useKey(event) {
  event.preventDefault();
  client.key = find("key", HTMLInputElement).value;
  sessionStorage.setItem(KEY, client.key); // until the tab is closed, and no longer
  find("key-form", HTMLFormElement).hidden = true;
  text.focus();
  completer.ask();
}

// ---- from the start ----

/** A press on one of these leaves the cursor where it is. @param {string} id @param {() => void} act */
function onPress(id, act) {
  const button = find(id, HTMLButtonElement);
  button.addEventListener("pointerdown", (event) => event.preventDefault());
  button.addEventListener("mousedown", (event) => event.preventDefault());
  button.addEventListener("click", act);
}

function listen() {
  text.addEventListener("keydown", press);
  text.addEventListener("input", changed);
  text.addEventListener("compositionend", changed);
  text.addEventListener("blur", (event) => {
    mayLeave = false;
    const isWithin = event.relatedTarget instanceof Node && place.contains(event.relatedTarget);
    if (!isWithin && !document.hidden && document.hasFocus()) completer.close();
  });
  document.addEventListener("selectionchange", moved);
  find("details", HTMLElement).addEventListener("keydown", (event) => {
    if (event.key === "Escape") dismiss();
  });
  const list = find("suggestions", HTMLUListElement);
  list.addEventListener("mousedown", (event) => event.preventDefault());
  list.addEventListener("click", (event) => {
    const option = event.target instanceof Element ? event.target.closest("li") : null;
    if (option) completer.accept(Number(option.dataset.branch));
  });
  onPress("ask", () => (text.focus(), completer.ask()));
  onPress("take", () => completer.accept());
  onPress("take-word", () => completer.acceptWord());
  onPress("show-details", toggleDetails);
  onPress("dismiss", dismiss);
  onPress("clear", clear);
  find("key-form", HTMLFormElement).addEventListener("submit", useKey);
  addEventListener("resize", draw);
  addEventListener("pagehide", () => (keep(), completer.close()));
  document.addEventListener("visibilitychange", () => (document.hidden ? keep() : void look()));
  onForeignSave("text", (value) => {
    if (!document.hasFocus()) paper.replace(value ?? "");
  });
}

function begin() {
  text.value = load("text") ?? "";
  text.setSelectionRange(text.value.length, text.value.length);
  listen();
  draw();
  keepInSight();
  tellSaved();
  void look();
  setInterval(look, LOOK_EVERY_MS);
}

begin();
