// A Tercet server's client, for any editor.
//
// `Client` speaks the wire: requests, server-sent events, problems, feedback. `Completer` knows what typing means for
// suggestions: when to ask, which of them stay true while their words are typed, what is taken of them. Neither knows
// a page or an editor: an editor says what stands before its cursor, shows what it is given, puts in what is taken.

/**
 * @typedef {object} Sentence  One suggestion, as the server tells of it.
 * @property {string} value
 * @property {number|null} score  Mean log-probability of its tokens.
 * @property {number} seed
 * @property {string} model
 * @property {number} slot
 * @property {number} time  Seconds.
 * @property {number} tokens
 * @property {number} cached_tokens
 * @property {number} queue_ms
 * @property {number} prefill_ms
 * @property {number} decode_ms
 * @property {string} finish_reason
 * @property {{text: string, logprob: number, likeliest: [string, number][]}[]} [explanation]
 *
 * @typedef {object} Answer
 * @property {string} id
 * @property {string} model
 * @property {number} seed
 * @property {Sentence[]} sentences  Best first.
 * @property {number} time  Seconds.
 * @property {boolean} partial
 *
 * @typedef {object} Suggestion  A branch of an answer, as it may be shown now.
 * @property {number} branch
 * @property {string} text  All that has come of it.
 * @property {string} rest  What of that is not yet written.
 * @property {boolean} isWhole
 * @property {Sentence|null} sentence  Once it is whole.
 *
 * @typedef {object} View  What an editor is given to show.
 * @property {"idle"|"waiting"|"streaming"|"ready"|"empty"} status  `empty`: the model had nothing to add.
 * @property {Suggestion[]} suggestions
 * @property {Suggestion|null} chosen  One of them.
 * @property {boolean} isAsked  By a key; else by a pause.
 * @property {boolean} isTouched  One was chosen by a key.
 * @property {Problem|null} problem  Why the last request brought nothing.
 * @property {number|null} firstMs  From asking to the first words.
 * @property {number|null} totalMs  From asking to the whole answer.
 *
 * @typedef {Record<string, unknown>} Options  Fields of `POST /autocomplete`: length, temperature, …
 */

/** The server that this file came from. */
const HERE = new URL("..", import.meta.url).href;

/** The server reads a few hundred tokens of a document's end; more characters than these are not sent. */
const MAX_CONTEXT_CHARS = 8192;
/** A long document is cut at multiples of this, so that what is sent begins alike while its end is typed. */
const CUT_CHARS = 4096;

/** An answer that is whole so soon is put best first; later somebody has begun to read it as it stands. */
const UNREAD_MS = 250;

/** Suggestions that came by themselves so short a time ago are not what a key was pressed for. */
const UNSEEN_MS = 200;

const DEFAULT_NUM_SUGGESTIONS = 3;

/** A refusal (RFC 9457), or a connection that failed: then `status` is 0. */
export class Problem extends Error {
  /** @param {{status?: number, code?: string, title?: string, detail?: string}} body */
  constructor(body) {
    super(body.detail || body.title || "Something went wrong.");
    this.status = body.status ?? 0;
    this.code = body.code ?? "unknown";
  }
}

/**
 * Server-sent events from their bytes (WHATWG HTML § 9.2; of its fields only those that Tercet sends).
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<{name: string, data: any}>}
 */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (text + decoder.decode(value, { stream: true })).split("\n\n");
      text = blocks.pop() ?? "";
      for (const block of blocks) yield parseEvent(block);
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading wants no more of it
  }
}

/** @param {string} block */
function parseEvent(block) {
  let name = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return { name, data: JSON.parse(data) };
}

/** One writer's line to a server. */
export class Client {
  #url;
  #session;

  /**
   * @param {{url?: string, key?: string, session?: string}} [options]  A newer request of a session ends the older.
   */
  constructor({ url = HERE, key = "", session = randomName() } = {}) {
    this.#url = url.endsWith("/") ? url : `${url}/`;
    this.#session = session;
    /** Sent with every request, where there is one. */
    this.key = key;
  }

  /**
   * An answer at once.
   * @param {Options} request
   * @param {AbortSignal} [signal]
   * @returns {Promise<Answer>}
   */
  async complete(request, signal) {
    const response = await this.#post("autocomplete", { ...request, session: this.#session }, { signal });
    return response.json();
  }

  /**
   * An answer while it is being made: `token`, `sentence`, at last `done`.
   * @param {Options} request
   * @param {AbortSignal} [signal]  Aborting it ends the work on the server too.
   */
  async *stream(request, signal) {
    const body = { ...request, session: this.#session, stream: true };
    const response = await this.#post("autocomplete", body, { signal });
    let isWhole = false; // and then read on to the end, so that the connection can be used again
    for await (const event of events(/** @type {ReadableStream<Uint8Array>} */ (response.body))) {
      if (event.name === "error") throw new Problem(event.data);
      isWhole ||= event.name === "done";
      yield event;
    }
    if (!isWhole) throw new Problem({ code: "cut", detail: "The connection was cut before the answer was whole." });
  }

  /**
   * What became of a suggestion. Sent also while the page is being left; that it did not arrive matters to nobody.
   * @param {string} id
   * @param {number} index
   * @param {"accepted"|"rejected"|"ignored"} action
   * @param {number} [characters]
   */
  async feedback(id, index, action, characters = 0) {
    const told = { id, index, action, characters: Math.min(characters, 10_000) };
    await this.#post("feedback", told, { keepalive: true }).catch(() => {});
  }

  /** The models and slots, warm or not. */
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
    const response = await fetch(this.#url + path, { method: "POST", headers, body: JSON.stringify(body), ...init })
      .catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new Problem({ code: "unreachable", detail: "The server does not answer." });
      });
    if (response.ok) return response;
    const problem = await response.json().catch(() => ({ title: response.statusText }));
    throw new Problem({ ...problem, status: response.status });
  }
}

/** How a writer types, so that a pause can be told from the gap between two keys. */
export class Rhythm {
  #last = -Infinity;
  #mean = 180;
  #deviation = 45;

  /** @param {number} now  Milliseconds: a key was pressed. */
  note(now) {
    const gap = now - this.#last;
    this.#last = now;
    if (gap > 1000) return; // a pause, not a gap
    this.#deviation += 0.2 * (Math.abs(gap - this.#mean) - this.#deviation);
    this.#mean += 0.2 * (gap - this.#mean);
  }

  /** Longer than nearly all of the gaps; milliseconds. */
  get pauseMs() {
    return Math.min(Math.max(this.#mean + 4 * this.#deviation, 150), 1000);
  }
}

/** What has come of one branch. */
class Line {
  text = "";
  /** @type {Sentence|null} */
  sentence = null;
  isDropped = false;

  /** @param {number} branch */
  constructor(branch) {
    this.branch = branch;
  }
}

/** One request and what has come of it, while its suggestions are shown and until it is told what became of them. */
class Offer {
  abort = new AbortController();
  startedAt = performance.now();
  /** @type {number|null} */
  firstMs = null;
  /** @type {number|null} */
  totalMs = null;
  /** @type {Line[]} */
  lines = [];
  /** @type {Line|null} */
  chosen = null;
  /** @type {Answer|null} */
  answer = null;
  /** @type {Promise<Answer>|null} */
  explained = null;
  /** Written of it since it was asked for. */
  typed = "";
  /** Characters that were put in for the writer. */
  numTaken = 0;
  isTouched = false;
  /** @type {"accepted"|"rejected"|"ignored"|null} */
  fate = null;

  /**
   * @param {string} context  All that stood before the cursor.
   * @param {Options} request
   * @param {boolean} isAsked
   */
  constructor(context, request, isAsked) {
    this.context = context;
    this.request = request;
    this.isAsked = isAsked;
  }

  /** Those that what was typed has not ruled out, and that have more to say. */
  get visible() {
    return this.lines.filter(
      (line) => !line.isDropped && line.text.startsWith(this.typed) && line.text.length > this.typed.length,
    );
  }

  get numWanted() {
    return /** @type {number|undefined} */ (this.request.n_samples) ?? DEFAULT_NUM_SUGGESTIONS;
  }

  /** Whether its first words came longer ago than this. @param {number} ms */
  isOlderThan(ms) {
    return this.firstMs !== null && performance.now() - this.startedAt - this.firstMs > ms;
  }

  /**
   * Take in an event of the stream.
   * @param {{name: string, data: any}} event
   */
  hear({ name, data }) {
    if (name === "token") {
      this.firstMs ??= performance.now() - this.startedAt;
      this.#line(data.branch).text += data.text;
    } else if (name === "sentence") {
      const line = this.#line(data.branch);
      line.sentence = data;
      line.text = data.value;
    } else if (name === "done") {
      this.totalMs = performance.now() - this.startedAt;
      this.answer = /** @type {Answer} */ (data);
      this.#drop(() => true);
      if (this.totalMs < UNREAD_MS && !this.isTouched && !this.numTaken) this.#sort(this.answer);
    }
    if (!this.chosen || this.chosen.isDropped) this.chosen = this.visible[0] ?? null;
  }

  /** @param {number} branch */
  #line(branch) {
    let line = this.lines.find((one) => one.branch === branch);
    if (!line) {
      line = new Line(branch);
      this.lines.push(line); // as they come: what is being read stays where it is
      // One in place of others: of those that were asked for first, the ones that are not whole by now never will be.
      if (branch >= this.numWanted) this.#drop((one) => one.branch < this.numWanted);
    }
    return line;
  }

  /** @param {(line: Line) => boolean} isMeant */
  #drop(isMeant) {
    for (const line of this.lines) line.isDropped ||= !line.sentence && isMeant(line);
  }

  /** @param {Answer} answer */
  #sort(answer) {
    const rank = new Map(answer.sentences.map((sentence, index) => [sentence.seed, index]));
    /** @param {Line} line */
    const place = (line) => rank.get(line.sentence?.seed ?? -1) ?? Infinity;
    this.lines.sort((a, b) => place(a) - place(b));
    this.chosen = this.visible[0] ?? null;
  }
}

/**
 * Suggestions for one text.
 *
 * A request is made by `ask`, or by itself at a pause of typing; a newer one ends the older, and so does a key that
 * no suggestion goes on with. What is typed as a suggestion says keeps it, without a new request.
 */
export class Completer {
  /** @type {Offer|null} */
  #offer = null;
  /** @type {Offer|null} */
  #running = null;
  /** @type {Problem|null} */
  #problem = null;
  /** @type {Offer|null} */
  #last = null;
  #isEmpty = false;
  #isInserting = false;
  #known = "";
  #rhythm = new Rhythm();
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #timer;
  #context;
  #insert;
  #show;
  #options;

  /**
   * @param {object} editor
   * @param {() => string} editor.context  What stands before the cursor.
   * @param {(text: string) => void} editor.insert  Put text in at the cursor.
   * @param {(view: View) => void} editor.show
   * @param {() => Options} [editor.options]  Fields of the next request.
   * @param {Client} [editor.client]
   * @param {boolean} [editor.asksAtPauses]
   */
  constructor({ context, insert, show, options = () => ({}), client = new Client(), asksAtPauses = true }) {
    this.#context = context;
    this.#insert = insert;
    this.#show = show;
    this.#options = options;
    this.client = client;
    this.asksAtPauses = asksAtPauses;
  }

  /** Ask for suggestions now. */
  ask() {
    this.#request(true);
  }

  /**
   * The text has changed. Without an event it counts as typed.
   * @param {Event} [event]
   */
  changed(event) {
    const { inputType = "insertText", isComposing = false } = /** @type {InputEvent} */ (event ?? {});
    const isTyped = inputType.startsWith("insert");
    if (isTyped && !this.#isInserting) this.#rhythm.note(performance.now());
    this.#known = this.#context();
    this.#problem = null;
    this.#isEmpty = false;
    clearTimeout(this.#timer);
    if (this.#offer && !this.#follows(this.#offer, this.#known)) this.#close("ignored");
    if (this.asksAtPauses && isTyped && !isComposing && !this.#offer && this.#known.trim()) {
      this.#timer = setTimeout(() => this.#request(false), this.#rhythm.pauseMs);
    }
    this.#render();
  }

  /** The cursor may have moved: suggestions belong to where it was. */
  moved() {
    if (this.#context() !== this.#known) this.close();
  }

  /** Nobody wants them now. */
  close() {
    clearTimeout(this.#timer);
    this.#known = this.#context();
    if (!this.#offer) return;
    this.#close("ignored");
    this.#render();
  }

  /** The writer does not want these. */
  dismiss() {
    clearTimeout(this.#timer);
    this.#close("rejected");
    this.#render();
  }

  /** @param {number} step  1: the next one; −1: the one before. */
  choose(step) {
    const offer = this.#offer;
    if (!offer) return;
    const { visible } = offer;
    const at = visible.indexOf(/** @type {Line} */ (offer.chosen));
    offer.chosen = visible[(at + step + visible.length) % visible.length] ?? null;
    offer.isTouched = true;
    this.#render();
  }

  /** @param {number} [branch]  Take all of it; the chosen one where none is named. */
  accept(branch) {
    const offer = this.#offer;
    if (!offer) return;
    const line = branch === undefined ? offer.chosen : offer.lines.find((one) => one.branch === branch);
    if (!line) return;
    offer.chosen = line;
    const rest = line.text.slice(offer.typed.length);
    offer.numTaken += rest.length;
    this.#close("accepted");
    this.#put(rest);
  }

  /** Take the next word of the chosen one. */
  acceptWord() {
    const offer = this.#offer;
    if (!offer?.chosen) return;
    const word = firstWord(offer.chosen.text.slice(offer.typed.length));
    offer.numTaken += word.length;
    this.#put(word);
  }

  /**
   * A key was pressed. True where it was meant for the suggestions; then the editor must not act on it.
   * @param {KeyboardEvent} event
   */
  press(event) {
    if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return false;
    const act = this.#action(event.key);
    if (!act) return false;
    event.preventDefault();
    act();
    return true;
  }

  /**
   * The chosen suggestion's sentence, with what was likely at each token. The same request with the same seed gives
   * the same text; it is made once for all suggestions of an answer, once that is whole.
   * @param {number} numLikeliest
   * @returns {Promise<Sentence|null>}
   */
  async explain(numLikeliest) {
    const offer = this.#offer;
    const seed = offer?.chosen?.sentence?.seed;
    if (!offer?.answer || seed === undefined) return null;
    offer.explained ??= this.client.complete({ ...offer.request, explain: numLikeliest }, offer.abort.signal);
    const answer = await offer.explained;
    return answer.sentences.find((sentence) => sentence.seed === seed) ?? null;
  }

  /** @param {string} key */
  #action(key) {
    const offer = this.#offer;
    if (key === "Escape") return offer && (() => this.dismiss());
    if (key === "Tab") return this.#tab(offer);
    if (!offer?.visible.length) return null;
    switch (key) {
      case "Enter": // in a list that came by itself it is still a new line
        return offer.isAsked || offer.isTouched ? () => this.accept() : null;
      case "ArrowDown":
        return () => this.choose(1);
      case "ArrowUp":
        return () => this.choose(-1);
      case "ArrowRight":
        return () => this.acceptWord();
      default:
        return null;
    }
  }

  /** @param {Offer|null} offer */
  #tab(offer) {
    if (!offer) return () => this.ask();
    const isSeen = offer.visible.length > 0 && (offer.isAsked || offer.isOlderThan(UNSEEN_MS));
    if (isSeen) return () => this.accept();
    return () => {
      offer.isAsked = true; // a pause was a moment faster
      this.#render();
    };
  }

  /** @param {boolean} isAsked */
  async #request(isAsked) {
    clearTimeout(this.#timer);
    this.#close("ignored");
    this.#running?.abort.abort();
    const context = this.#context();
    // A seed of our own: the server's may be larger than a number here can tell apart.
    const request = { seed: randomSeed(), ...this.#options(), context: endOf(context) };
    const offer = new Offer(context, request, isAsked);
    this.#known = context;
    this.#problem = null;
    this.#isEmpty = false;
    this.#offer = this.#running = this.#last = offer;
    this.#render();
    try {
      for await (const event of this.client.stream(request, offer.abort.signal)) {
        offer.hear(event);
        if (offer === this.#offer) this.#heard(offer);
      }
      if (offer.fate) this.#report(offer);
    } catch (error) {
      this.#fail(offer, error);
    }
    if (this.#running === offer) this.#running = null;
  }

  /** @param {Offer} offer */
  #heard(offer) {
    if (offer.answer && !offer.visible.length) {
      this.#isEmpty = !offer.typed;
      this.#close("ignored");
    }
    this.#render();
  }

  /**
   * @param {Offer} offer
   * @param {unknown} error
   */
  #fail(offer, error) {
    if (offer !== this.#offer) return; // given up, or superseded: nobody waits for it
    this.#offer = null;
    this.#problem = error instanceof Problem ? error : new Problem({ detail: String(error) });
    this.#render();
  }

  /**
   * Whether the text goes on as one of the suggestions does.
   * @param {Offer} offer
   * @param {string} context
   */
  #follows(offer, context) {
    if (!context.startsWith(offer.context)) return false;
    offer.typed = context.slice(offer.context.length);
    if (!offer.typed) return true;
    const isKept = offer.lines.some((line) => !line.isDropped && line.text.startsWith(offer.typed));
    const { visible } = offer;
    if (offer.chosen && !visible.includes(offer.chosen) && visible.length) offer.chosen = visible[0] ?? null;
    return isKept && (visible.length > 0 || !offer.answer);
  }

  /**
   * The suggestions are no longer shown.
   * @param {"accepted"|"rejected"|"ignored"} fate
   */
  #close(fate) {
    const offer = this.#offer;
    if (!offer) return;
    this.#offer = null;
    offer.fate = offer.numTaken ? "accepted" : fate;
    if (offer.answer) this.#report(offer);
    // What was taken from an answer in the making can be told of once that is whole; a newer request ends it.
    else if (offer.fate !== "accepted") offer.abort.abort();
  }

  /** @param {Offer} offer */
  #report(offer) {
    const { answer, chosen, fate, numTaken } = offer;
    const seed = chosen?.sentence?.seed;
    const index = answer?.sentences.findIndex((sentence) => sentence.seed === seed) ?? -1;
    if (answer && fate && index >= 0) this.client.feedback(answer.id, index, fate, numTaken);
  }

  /** @param {string} text */
  #put(text) {
    this.#isInserting = true;
    this.#insert(text);
    this.#isInserting = false;
  }

  #render() {
    this.#show(this.view);
  }

  /** What is to be shown now. @returns {View} */
  get view() {
    const offer = this.#offer;
    const last = this.#last;
    const suggestions = (offer?.visible ?? []).map((line) => ({
      branch: line.branch,
      text: line.text,
      rest: line.text.slice(offer?.typed.length),
      isWhole: line.sentence !== null,
      sentence: line.sentence,
    }));
    return {
      status: this.#status(),
      suggestions,
      chosen: suggestions.find((one) => one.branch === offer?.chosen?.branch) ?? null,
      isAsked: offer?.isAsked ?? false,
      isTouched: offer?.isTouched ?? false,
      problem: this.#problem,
      firstMs: last?.firstMs ?? null,
      totalMs: last?.totalMs ?? null,
    };
  }

  /** @returns {View["status"]} */
  #status() {
    if (!this.#offer) return this.#isEmpty ? "empty" : "idle";
    if (this.#offer.answer) return "ready";
    return this.#offer.lines.length ? "streaming" : "waiting";
  }
}

/**
 * What is sent of a document.
 * @param {string} context
 */
export function endOf(context) {
  let start = Math.max(0, Math.floor((context.length - MAX_CONTEXT_CHARS) / CUT_CHARS) * CUT_CHARS);
  if (/[\udc00-\udfff]/.test(context[start] ?? "")) start += 1; // not the second half of a character
  return context.slice(start);
}

/**
 * The next word, with the space before it and the marks after it.
 * @param {string} text
 */
export function firstWord(text) {
  let word = "";
  let hasWord = false;
  for (const { segment, isWordLike } of new Intl.Segmenter(undefined, { granularity: "word" }).segment(text)) {
    if (hasWord && (isWordLike || !segment.trim())) break;
    word += segment;
    hasWord ||= Boolean(segment.trim());
  }
  return word;
}

function randomName() {
  const numbers = crypto.getRandomValues(new Uint32Array(4)); // randomUUID is for https alone
  return Array.from(numbers, (number) => number.toString(36)).join("");
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
