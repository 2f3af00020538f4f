// HTTP client for a Tercet server: requests, server-sent events, problem responses and feedback.
// It does not know editors, typing or when to send a request.

/**
 * @typedef {object} Sentence  One suggestion in a response.
 * @property {string} value  Text to insert at the caret.
 * @property {number|null} score  Mean log-probability of its tokens.
 * @property {number} seed
 * @property {string} model
 * @property {number} slot  Slot that generated it.
 * @property {number} time  Seconds from the start of the request.
 * @property {number} tokens  Number of generated tokens.
 * @property {number} cached_tokens  Prompt tokens that were already in the prefix cache.
 * @property {number} queue_ms
 * @property {number} prefill_ms
 * @property {number} decode_ms
 * @property {string} finish_reason
 * @property {number} [usefulness]  Expected keystrokes saved. Only of the strategy `predict`.
 * @property {{text: string, probability: number}[]} [words]  Of a prediction: its words, and how likely all words up to each
 *   come next.
 * @property {number} [probability]  That of the last of `words`.
 * @property {number} [replaces]  Of a correction: the characters before the caret whose place `value` takes.
 * @property {{text: string, logprob: number, likeliest: [string, number][]}[]} [explanation]  One entry per token,
 *   with the likeliest alternatives and their log-probabilities. Only in responses to requests with `explain`.
 *
 * @typedef {object} AutocompleteResponse
 * @property {string} id  Identifies the response in feedback.
 * @property {string} model
 * @property {number} seed  Repeating the request with this seed returns the same sentences.
 * @property {Sentence[]} sentences  Best first.
 * @property {number} time  Seconds.
 * @property {boolean} partial  Some branches failed or ran out of time.
 * @property {{branch: number, code: string, detail: string}[]} [errors]  Why a branch has no sentence.
 *
 * @typedef {Record<string, unknown>} RequestFields  Fields of `POST /autocomplete`: `length`, `temperature`, …
 *
 * @typedef {{name: string, data: any}} ServerEvent  One server-sent event with its parsed JSON data.
 */

/**
 * Base URL of the Tercet server that served this file. Undefined in a bundle or package, which has another path; a
 * bundle that is no module has no `import.meta.url` either.
 */
const [, SERVER_URL] = /^(https?:.*\/)static\/client\.js$/.exec(import.meta.url ?? "") ?? [];

/** The server rejects feedback with a larger count. */
const MAX_FEEDBACK_CHARS = 10_000;

/** A server that is away for longer is asked all the same. */
const MAX_RETRY_AFTER_S = 60;

/** A problem response (RFC 9457), or a failed connection. */
export class Problem extends Error {
  /**
   * @param {{status?: number, code?: string, title?: string, detail?: string}} body  `detail` becomes the message.
   * @param {number} [retryAfterS]  When the server wants to be asked again, in seconds; 0: it does not say.
   */
  constructor(body, retryAfterS = 0) {
    super(body.detail || body.title || "The request failed.");
    /** HTTP status; 0 if no response arrived. */
    this.status = body.status ?? 0;
    /**
     * Machine-readable code from the server. The client adds `unreachable` (no connection), `forbidden_origin` (the
     * server does not list this page's origin), `cut` (the stream ended early) and `unknown` (the response had no code).
     */
    this.code = body.code ?? "unknown";
    this.retryAfterS = retryAfterS;
  }
}

/**
 * Parse a stream of server-sent events (WHATWG HTML § 9.2, limited to the fields that Tercet sends). Leaving the loop
 * early cancels the stream.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<ServerEvent>}
 * @throws {SyntaxError} If an event's data is not JSON.
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (buffer + decoder.decode(value, { stream: true })).split("\n\n");
      buffer = blocks.pop() ?? "";
      for (const block of blocks) yield parseEvent(block);
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted stream rejects, and there is nothing left to clean up
  }
}

/** @param {string} block  Lines of one event. @returns {ServerEvent} */
function parseEvent(block) {
  let name = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return { name, data: JSON.parse(data) };
}

/** Sends one editing session's requests to a Tercet server. */
export class Client {
  #url;
  #sessionId;
  /** Of the last request. Two can overtake each other on their way. */
  #sequence = 0;

  /**
   * @param {object} [options]
   * @param {string} [options.url]  Base URL of the server. Default: the Tercet server that served this module. Required
   *   where none did, for example in a bundle.
   * @param {string} [options.key]  API key.
   * @param {string} [options.session]  Session id, random by default. The server cancels a session's request when a
   *   newer request of the same session arrives.
   * @throws {TypeError} If `url` is required and missing.
   */
  constructor({ url = SERVER_URL, key = "", session = randomId() } = {}) {
    if (!url) throw new TypeError("Client requires `url`, because no Tercet server served this module.");
    this.#url = url.endsWith("/") ? url : `${url}/`;
    this.#sessionId = session;
    /** API key, sent with every POST request; empty: none. May be changed at any time. */
    this.key = key;
  }

  /**
   * Request suggestions and wait for the whole response.
   * @param {RequestFields} request
   * @param {AbortSignal} [signal]  Aborting closes the connection, which cancels the generation on the server.
   * @returns {Promise<AutocompleteResponse>}
   * @throws {Problem} If the server refuses the request or cannot be reached.
   * @throws {DOMException} `AbortError`, if `signal` was aborted.
   */
  async complete(request, signal) {
    const response = await this.#post("autocomplete", this.#inSession(request), { signal });
    return response.json();
  }

  /**
   * Request suggestions and yield them while they are generated: events named `token` (text delta of a branch),
   * `sentence` (a branch is complete) and finally `done` (the whole response).
   * @param {RequestFields} request
   * @param {AbortSignal} [signal]  Aborting closes the connection, which cancels the generation on the server.
   * @returns {AsyncGenerator<ServerEvent>}
   * @throws {Problem} If the server refuses the request, cannot be reached, sends an `error` event, or closes the
   *   connection before `done`.
   * @throws {DOMException} `AbortError`, if `signal` was aborted.
   */
  async *stream(request, signal) {
    const body = { ...this.#inSession(request), stream: true };
    const response = await this.#post("autocomplete", body, { signal });
    let isComplete = false;
    // Read to the end of the stream even after `done`, so that the browser can reuse the connection.
    for await (const event of readEvents(/** @type {ReadableStream<Uint8Array>} */ (response.body))) {
      if (event.name === "error") throw new Problem(event.data);
      isComplete ||= event.name === "done";
      yield event;
    }
    if (!isComplete) {
      throw new Problem({ code: "cut", detail: "The connection closed before the response was complete." });
    }
  }

  /** @param {RequestFields} request */
  #inSession(request) {
    this.#sequence += 1;
    return { ...request, session: this.#sessionId, sequence: this.#sequence };
  }

  /**
   * Report what the writer did with a suggestion. The request outlives the page (`keepalive`). Failures are ignored:
   * lost feedback must not disturb writing.
   * @param {string} id  Id of the response.
   * @param {number} index  Index of the sentence in the response.
   * @param {"accepted"|"rejected"|"ignored"} action
   * @param {number} [numChars]  Number of characters that were inserted for the writer.
   * @param {number} [numKept]  Number of these that are still in the document later. Sent with a second report.
   * @returns {Promise<void>}  Never rejects.
   */
  async feedback(id, index, action, numChars = 0, numKept) {
    const kept = numKept === undefined ? {} : { kept: Math.min(numKept, MAX_FEEDBACK_CHARS) };
    const body = { id, index, action, characters: Math.min(numChars, MAX_FEEDBACK_CHARS), ...kept };
    await this.#post("feedback", body, { keepalive: true }).catch(() => {});
  }

  /**
   * Models and slots from `GET /health/ready`, warm or not.
   * @returns {Promise<any>}  Rejects if the server cannot be reached.
   */
  async ready() {
    const response = await fetch(`${this.#url}health/ready`, { cache: "no-store" });
    return response.json();
  }

  /**
   * @param {string} path
   * @param {object} body
   * @param {RequestInit} init
   */
  async #post(path, body, init) {
    /** @type {Record<string, string>} */
    const headers = { "Content-Type": "application/json" };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    // For load balancers, which do not read bodies. A header cannot have every character that a session may have.
    if (/^[!-~]+$/.test(this.#sessionId)) headers["X-Session-Id"] = this.#sessionId;
    const response = await fetch(this.#url + path, { method: "POST", headers, body: JSON.stringify(body), ...init })
      .catch(async (error) => {
        if (error.name === "AbortError") throw error;
        throw await this.#connectionProblem();
      });
    if (response.ok) return response;
    const problem = await response.json().catch(() => ({ title: response.statusText }));
    const retryAfterS = Number(response.headers.get("Retry-After")) || 0;
    throw new Problem({ ...problem, status: response.status }, Math.min(Math.max(retryAfterS, 0), MAX_RETRY_AFTER_S));
  }

  /**
   * Why a request got no response that this page may read: pages of any origin may read the server's static files, pages
   * of listed origins all else.
   * @returns {Promise<Problem>}
   */
  async #connectionProblem() {
    const origin = globalThis.location?.origin;
    if (origin && origin !== new URL(this.#url, globalThis.location.href).origin) {
      const response = await fetch(`${this.#url}static/tercet.js`, { method: "HEAD", cache: "no-store" }).catch(() => null);
      if (response?.ok) {
        const detail = `The server does not accept pages of ${origin}: add this origin to its setting TERCET_ORIGINS.`;
        return new Problem({ status: 403, code: "forbidden_origin", detail });
      }
    }
    return new Problem({ code: "unreachable", detail: "The server is not responding." });
  }
}

function randomId() {
  // Not crypto.randomUUID(): browsers offer it only in secure contexts, and Tercet is often served over plain HTTP.
  const numbers = crypto.getRandomValues(new Uint32Array(4));
  return Array.from(numbers, (number) => number.toString(36)).join("");
}
