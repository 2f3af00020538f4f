// The documentation page: lists the operations of the server's OpenAPI document, searches them, and opens each with its
// fields, its answers and a form to try it. It does not know what a schema or a request looks like.

import { createElement, setText } from "./dom.js";
import { KeyField } from "./key_field.js";
import { renderText, SchemaView } from "./schema_view.js";
import { TryForm } from "./try_form.js";

/** @typedef {import("./schema_view.js").Json} Json */

/**
 * @typedef {object} Entry  An operation in the list.
 * @property {HTMLDetailsElement} element
 * @property {string} words  What the search looks through, in lower case.
 */

const search = /** @type {HTMLInputElement} */ (document.querySelector("#search"));
const list = /** @type {HTMLElement} */ (document.querySelector("#operations"));
const found = /** @type {HTMLElement} */ (document.querySelector("#found"));
const keyForm = /** @type {HTMLFormElement} */ (document.querySelector("#key-form"));
const keyNote = /** @type {HTMLElement} */ (document.querySelector("#key-note"));
// A message stays until the next answer: if it vanished when the field loses the focus, the click that took the focus
// would miss its button.
const keyField = new KeyField(keyForm, keyNote, () => {}, () => {});

/** @returns {Promise<void>} */
async function load() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`The server answered ${response.status}.`);
  const api = await response.json();
  const schemas = new SchemaView(api.components);
  renderText(/** @type {HTMLElement} */ (document.querySelector("#about")), api.info.description);
  keyForm.hidden = !api.security;
  /** @type {Entry[]} */
  const entries = [];
  for (const { name } of api.tags) {
    const section = document.createElement("section");
    section.append(createElement("h2", "", name));
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        if (operation.tags[0] !== name) continue;
        const needsKey = Boolean(api.security) && operation.security?.length !== 0;
        const entry = renderEntry(path, method.toUpperCase(), operation, needsKey, schemas);
        section.append(entry.element);
        entries.push(entry);
      }
    }
    list.append(section);
  }
  search.addEventListener("input", () => filter(entries));
  filter(entries);
  openFromAddress();
  addEventListener("hashchange", openFromAddress);
}

/**
 * @param {string} path
 * @param {string} method
 * @param {Json} operation
 * @param {boolean} needsKey
 * @param {SchemaView} schemas
 * @returns {Entry}
 */
function renderEntry(path, method, operation, needsKey, schemas) {
  const element = document.createElement("details");
  element.id = operation.operationId;
  const summary = document.createElement("summary");
  const title = createElement("h3", "", "");
  title.append(createElement("span", "method", method), " ", createElement("code", "", path));
  summary.append(title, " ", createElement("span", "summary", operation.summary));
  element.append(summary);
  element.addEventListener("toggle", () => {
    if (!element.open) return;
    history.replaceState(null, "", `#${element.id}`);
    // Filled in when it is first opened: most operations never are.
    if (!element.querySelector(".operation")) {
      element.append(renderOperation(path, method, operation, needsKey, schemas));
    }
  });
  const fields = schemas.namesIn(operation);
  const words = [method, path, operation.summary, operation.description, operation.tags[0], ...fields];
  return { element, words: words.join(" ").toLowerCase() };
}

/**
 * @param {string} path
 * @param {string} method
 * @param {Json} operation
 * @param {boolean} needsKey
 * @param {SchemaView} schemas
 * @returns {HTMLElement}
 */
function renderOperation(path, method, operation, needsKey, schemas) {
  const body = createElement("div", "operation", "");
  if (operation.description) {
    const description = document.createElement("div");
    renderText(description, operation.description);
    body.append(description);
  }
  const form = new TryForm(method, path, operation, () => (needsKey ? keyField.key : ""), showKeyProblem);
  body.append(createElement("h4", "", "Try it"), form.element);
  if (operation.parameters) {
    body.append(createElement("h4", "", "Parameters"), schemas.renderParameters(operation.parameters));
  }
  for (const { schema } of Object.values(operation.requestBody?.content ?? {})) {
    body.append(createElement("h4", "", "Request body"), schemas.render(schema));
  }
  body.append(createElement("h4", "", "Answers"));
  for (const [status, answer] of Object.entries(operation.responses)) body.append(renderAnswer(status, answer, schemas));
  return body;
}

/** @param {string} status  @param {Json} answer  @param {SchemaView} schemas  @returns {HTMLElement} */
function renderAnswer(status, answer, schemas) {
  const { description, content = {} } = schemas.resolve(answer);
  const element = document.createElement("details");
  const summary = createElement("summary", "answer", "");
  const text = document.createElement("span");
  renderText(text, description);
  summary.append(createElement("code", "", status), " ", text);
  element.append(summary);
  for (const [mediaType, { schema }] of Object.entries(content)) {
    element.append(createElement("h5", "", mediaType), schemas.render(schema));
  }
  return element;
}

/** @param {number} status  Of an answer to a request with a key, or without the one that it needs. */
function showKeyProblem(status) {
  if (status !== 401) keyField.showProblem("");
  else keyField.showProblem(keyField.key ? "The server rejected this API key." : "This request requires an API key.");
}

/** Show the operations that contain every word of the search. @param {Entry[]} entries */
function filter(entries) {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let numFound = 0;
  for (const entry of entries) {
    entry.element.hidden = !words.every((word) => entry.words.includes(word));
    if (!entry.element.hidden) numFound += 1;
  }
  for (const section of list.children) {
    /** @type {HTMLElement} */ (section).hidden = !section.querySelector("details[id]:not([hidden])");
  }
  setText(found, numFound === 1 ? "1 operation" : `${numFound} operations`);
}

/** Open the operation that the address names. */
function openFromAddress() {
  const element = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!(element instanceof HTMLDetailsElement)) return;
  element.open = true;
  element.scrollIntoView();
}

addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof Element && event.target.matches("input, textarea, select");
  if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  search.focus();
  search.select();
});

load().catch((error) => setText(found, `The OpenAPI document could not be loaded. ${error.message}`));
