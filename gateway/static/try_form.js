// A form that sends one request of an operation and shows the answer as it arrives. It knows no schema: the server says
// what is wrong with a request.

import { createElement, setText } from "./dom.js";

/** @typedef {import("./schema_view.js").Json} Json */

/** Of a longer answer, only the beginning is shown. */
const MAX_SHOWN_CHARS = 100_000;
const SHOWN_HEADERS = ["content-type", "location", "retry-after", "server-timing", "x-request-id"];
/** Addresses are relative to the page, which may be under a path of a proxy. */
const BASE = new URL(".", location.href);

export class TryForm {
  #method;
  #path;
  #getKey;
  #onStatus;
  /** @type {Map<Json, HTMLInputElement>} */
  #inputs = new Map();
  /** @type {HTMLTextAreaElement|null} */
  #body = null;
  #status = createElement("p", "status", "");
  #headers = createElement("p", "note", "");
  #answer = createElement("pre", "answer-body", "");
  #controller = new AbortController();

  /**
   * @param {string} method
   * @param {string} path  URI template.
   * @param {Json} operation
   * @param {() => string} getKey  The API key to send; empty: none.
   * @param {(status: number) => void} onStatus  Called with the status of each answer.
   */
  constructor(method, path, operation, getKey, onStatus) {
    this.#method = method;
    this.#path = path;
    this.#getKey = getKey;
    this.#onStatus = onStatus;
    this.element = document.createElement("form");
    this.element.className = "try";
    for (const parameter of operation.parameters ?? []) this.#addInput(parameter);
    for (const content of Object.values(operation.requestBody?.content ?? {})) this.#addBody(content.examples ?? {});
    const send = createElement("button", "", "Send");
    const actions = createElement("p", "form-actions", "");
    actions.append(send);
    this.#status.role = "status";
    this.#answer.tabIndex = 0;
    this.#answer.role = "region";
    this.#answer.ariaLabel = "Answer";
    this.#answer.hidden = true;
    this.element.append(actions, this.#status, this.#headers, this.#answer);
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
  }

  /** @param {Json} parameter */
  #addInput(parameter) {
    const input = document.createElement("input");
    input.required = parameter.required;
    const example = Object.keys(parameter.examples ?? {})[0] ?? "";
    // An optional parameter changes the request, so it is sent only if the reader writes it.
    if (parameter.required) input.value = example;
    else input.placeholder = example;
    this.#inputs.set(parameter, input);
    this.#addField(parameter.name, input);
  }

  /** @param {Record<string, {value: Json}>} examples */
  #addBody(examples) {
    const body = document.createElement("textarea");
    body.rows = 6;
    body.spellcheck = false;
    const texts = Object.values(examples).map(({ value }) => JSON.stringify(value, null, 2));
    body.value = texts[0] ?? "{}";
    if (texts.length > 1) {
      const select = document.createElement("select");
      select.append(...Object.keys(examples).map((name, index) => new Option(name, String(index))));
      select.addEventListener("change", () => (body.value = texts[Number(select.value)]));
      this.#addField("Example", select);
    }
    this.#addField("Body", body);
    this.#body = body;
  }

  /** @param {string} name  @param {HTMLElement} control */
  #addField(name, control) {
    const label = createElement("label", "control", name);
    label.append(control);
    this.element.append(label);
  }

  /** @returns {Request} */
  #request() {
    let path = this.#path;
    const query = new URLSearchParams();
    const headers = new Headers();
    for (const [{ name, in: place }, { value }] of this.#inputs) {
      if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(value));
      else if (value && place === "query") query.set(name, value);
      else if (value) headers.set(name, value);
    }
    if (this.#getKey()) headers.set("Authorization", `Bearer ${this.#getKey()}`);
    if (this.#body) headers.set("Content-Type", "application/json");
    const url = new URL(`.${path}`, BASE);
    url.search = String(query);
    this.#controller.abort();
    this.#controller = new AbortController();
    const { signal } = this.#controller;
    return new Request(url, { method: this.#method, headers, body: this.#body?.value, cache: "no-store", signal });
  }

  async #send() {
    const startedAt = performance.now();
    const request = this.#request();
    setText(this.#status, "Sending…");
    setText(this.#headers, "");
    this.#show("");
    try {
      const response = await fetch(request);
      this.#onStatus(response.status);
      const shown = SHOWN_HEADERS.filter((name) => response.headers.has(name));
      setText(this.#headers, shown.map((name) => `${name}: ${response.headers.get(name)}`).join("\n"));
      const text = await this.#read(response);
      if (response.headers.get("content-type")?.includes("json")) this.#show(JSON.stringify(JSON.parse(text), null, 2));
      const ms = Math.round(performance.now() - startedAt);
      setText(this.#status, `${response.status} ${response.statusText} in ${ms.toLocaleString("en")} ms`);
    } catch (error) {
      // A later request of this form has taken its place.
      if (request.signal.aborted) return;
      setText(this.#status, `The request failed. ${/** @type {Error} */ (error).message}`);
    }
  }

  /** Show an answer while it arrives. @param {Response} response  @returns {Promise<string>} */
  async #read(response) {
    let text = "";
    if (!response.body) return text;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      text += part.value;
      this.#show(text);
    }
    return text;
  }

  /** @param {string} text */
  #show(text) {
    this.#answer.hidden = !text;
    setText(this.#answer, text.length > MAX_SHOWN_CHARS ? `${text.slice(0, MAX_SHOWN_CHARS)}…` : text);
  }
}
