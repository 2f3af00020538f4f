// Decides when to request suggestions, which of them to show, which keys are theirs, and what to insert.
//
// It does not access the editor or the page: the editor passes functions that return the text around the caret, insert
// text and show a `View`. `Client` sends the HTTP requests.

import { Backoff } from "./backoff.js";
import { Client, Problem } from "./client.js";
import { FeedbackReports } from "./feedback_reports.js";
import { ACTIONS, chordOf, resolveKeys } from "./keys.js";
import { ListTiming } from "./list_timing.js";
import { isProse as isTextProse } from "./prose.js";
import { ShownSuggestions } from "./shown_suggestions.js";
import { SuggestionSession } from "./suggestion_session.js";
import {
  firstClause, firstSentence, firstWord, hasTextAfter, isSameText, replacesSpace, trimContext, trimSuffix, typedSince,
} from "./text.js";

/** @typedef {import("./client.js").RequestFields} RequestFields */
/** @typedef {import("./client.js").Sentence} Sentence */
/** @typedef {import("./feedback_reports.js").Outcome} Outcome */
/** @typedef {import("./keys.js").Action} Action */
/** @typedef {import("./keys.js").Keys} Keys */
/** @typedef {import("./shown_suggestions.js").Suggestion} Suggestion */
/** @typedef {import("./suggestion_session.js").Candidate} Candidate */
/** @typedef {import("./text.js").TextBefore} TextBefore */

/**
 * @typedef {"live"|"pauses"|"off"} Mode  When suggestions are requested unasked. `live`: likely next words, at every
 *   key that is not a deletion, and one idea when the writer stands still. `pauses`: three ideas, when typing pauses.
 *   `off`: never.
 */

/**
 * @typedef {object} View  What an editor shows.
 * @property {"idle"|"waiting"|"streaming"|"ready"|"empty"} status  `idle`: no suggestions; `waiting`: requested, no
 *   text yet; `streaming`: text is arriving; `ready`: complete; `empty`: requested by the writer, and the model had
 *   nothing to add.
 * @property {Suggestion[]} suggestions  In display order.
 * @property {Suggestion|null} chosen  The element of `suggestions` to show as ghost text.
 * @property {boolean} isListed  Show the list too. It may be true for a moment after the suggestions are gone, so that
 *   the list does not flicker.
 * @property {boolean} isExplicit  Requested by the writer, with a key or button.
 * @property {boolean} isChosenByUser  The writer moved the choice.
 * @property {Problem|null} problem  Why the last request failed.
 * @property {boolean} isUnfamiliar  The model does not know text like that before the caret, so it suggests nothing.
 * @property {number|null} firstMs  Latest request: milliseconds to the first text.
 * @property {number|null} totalMs  Latest request: milliseconds to the complete response.
 * @property {number} restMs  Milliseconds until unasked suggestions come back after dismissals; 0: they do not rest.
 * @property {Keys} keys  The keys of the suggestions, to be named where they are shown.
 */

/** A change of the text, as in `InputEvent`. @typedef {{inputType?: string, isComposing?: boolean}} Change */

/**
 * Whether a `keydown` event belongs to an input method: it composes, or just ended a composition with this key. Safari
 * ends the composition before the event; only the key code is the input method's then.
 * @param {KeyboardEvent} event
 */
export function isInputMethods({ isComposing, keyCode }) {
  return isComposing || keyCode === 229;
}

/**
 * A suggestion can be accepted only after it has been visible for this long: an earlier key was pressed before the
 * writer could have read it.
 */
const MIN_VISIBLE_MS = 200;

/** A text that ends with white space, or in a script that puts no spaces between words. */
const ENDS_WITHOUT_SPACE = /(?:\s|[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}])$/u;

/**
 * The word before the caret has a letter of a script that an input method converts, wide Latin letters included. Such a
 * composition is converted again and again before it stands.
 */
const ENDS_CONVERTED =
  /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}\p{sc=Bopomofo}\u3001-\u303F\u30FC\uFF01-\uFF9F]\S*$/u;

/** A dash takes the place of the space that came with a word, until another space is typed: word – word, word—word. */
const DASH = /^\p{Pd}$/u;

/** A comma at the end of an accepted text, with the space that may have come with it. */
const COMMA = /[,،，、] ?$/;

/** A mark that ends a clause takes the place of an accepted comma; another comma is the same. */
const REPLACES_COMMA = /^[.!?…;:؟؛。！？；：]/;

/** Of the text before the caret, enough to hold its last word. */
const MAX_WORD_CHARS = 100;

/** What plain keys do in a list. @type {Record<string, Action>} */
const LIST_KEYS = { Enter: "accept", ArrowDown: "next", ArrowUp: "previous", ArrowRight: "acceptWord" };

/** Keys that move the choice of a list. */
const MOVES_CHOICE = /^(?:Arrow|Page)(?:Up|Down)$/;

/** After a failure, unasked requests wait for this long, unless the server says how long. */
const RETRY_AFTER_MS = 1000;

/** A request whose answer has not begun, or not gone on, for this long is cancelled. */
const MAX_SILENCE_MS = 20_000;

/** In pauses mode, a writer who has pressed no key for this long pauses. */
const PAUSE_MS = 400;

/** A writer who has stood still for this long thinks, and is shown one idea, whatever the rhythm of their typing. */
const IDEA_DELAY_MS = 1200;

/** How probable likely next words have to be, by how often the writer wants some. */
export const MIN_PROBABILITIES = { eager: 0.3, normal: 0.5, quiet: 0.7 };

/** Identifies a text before the caret by its end. @param {TextBefore} before */
const placeOf = ({ end, text }) => `${end}\n${text.slice(-256)}`;

/** While a slow server still owes an answer, the request for an idea waits for this long, and again. */
const IDEA_WAIT_MS = 300;

/** Where the model knows the text, predictions ask again whether it does after this number of characters. */
const FAMILIARITY_CHARS = 24;

/** Suggestions for one text field. Only one request is in flight at a time; a newer one aborts it. */
export class Completer {
  /** The request of the writer or of a pause, whose suggestions are shown or awaited. @type {SuggestionSession|null} */
  #session = null;
  /** The request in flight. @type {SuggestionSession|null} */
  #inFlight = null;
  /** The last request. @type {SuggestionSession|null} */
  #latest = null;
  #shown = new ShownSuggestions();
  #list = new ListTiming(() => this.#render());
  #backoff = new Backoff();
  #reports;
  /** The suggestion that is being accepted word by word. @type {{candidate: Candidate, before: TextBefore, text: string}|null} */
  #accepted = null;
  /** The suggestion shown as ghost text. @type {Candidate|null} */
  #ghost = null;
  /** Stays until a request succeeds. @type {Problem|null} */
  #problem = null;
  #retryAtMs = -Infinity;
  /** The text for which a request failed last, or was not sent because of that. @type {TextBefore} */
  #beforeRetry = { end: 0, text: "" };
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #retryTimer;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #silenceTimer;
  /** The suggestion that was ghost text until another took its place. @type {{candidate: Candidate, untilMs: number}|null} */
  #previous = null;
  /** A word was accepted, and nothing was chosen or requested since: Enter and the plain arrow keys are the editor's. */
  #isWordTaken = false;
  #isResponseEmpty = false;
  #isUnfamiliar = false;
  /** The word before the caret is misspelled, so that an idea would go on with it. */
  #isMisspelled = false;
  /** Where the model was last asked whether it knows the text. */
  #familiarityEnd = -Infinity;
  /** The next Tab belongs to the editor, to leave the field. */
  #isTabFree = false;
  /** The last chord, if it was handled. It may be held down. */
  #heldChord = "";
  /** At the last edit or request: what is shown belongs to this text. @type {TextBefore} */
  #lastBefore = { end: 0, text: "" };
  /** The rest of the caret's line then. */
  #lastLine = "";
  /** The last key that moves a choice and was left to the editor. @type {KeyboardEvent|null} */
  #passedKey = null;
  #isComposing = false;
  /** The last composition that ended was converted, for example from Latin letters to Han. */
  #convertsLetters = false;
  /** The input method's last key is one of a keyboard; the keys of a touch screen have no place on one. */
  #composesByKeyboard = false;
  /** The text before the caret, if its last space or comma came with a suggestion, or a dash in its place. @type {TextBefore|null} */
  #beforeAccepted = null;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #pauseTimer;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #restTimer;
  /** Texts before the caret for which the writer was shown ideas, or dismissed suggestions. @type {Set<string>} */
  #seenPlaces = new Set();
  #getBefore;
  #getAfter;
  #insert;
  #show;
  #getRequestFields;
  #insertsSpace;
  #drawsGhost;
  #isEditable;
  #isOtherListUsed;
  #isProse;

  /**
   * @param {object} editor
   * @param {() => string} editor.context  Returns the text before the caret. With `position`, its end is enough: what
   *   follows `contextStart(position())` (text.js).
   * @param {() => number} [editor.position]  Returns the caret's position in the document, in UTF-16 code units. Default:
   *   the length of `context()`.
   * @param {() => string} [editor.after]  Returns the text after the caret, at least to the end of its line or 1,000
   *   characters of it. Before text on the same line (`hasTextAfter` in text.js) nothing is suggested unasked, and what is
   *   asked for fits before it. Default: none.
   * @param {(text: string, numReplaced: number) => void} editor.insert  Inserts text at the caret, in place of the
   *   `numReplaced` characters before it (a correction: a word), as one undo step. May call `changed` synchronously.
   * @param {(view: View) => void} editor.show  Shows suggestions; called after every change.
   * @param {() => RequestFields} [editor.options]  Returns further fields of the next request. Default: none.
   * @param {Client} [editor.client]  Default: a client of the server that served this module.
   * @param {Mode} [editor.mode]  Default: `live`.
   * @param {number} [editor.minProbability]  See the property. Default: that of `normal`.
   * @param {number} [editor.minUsefulness]  See the property. Default: 1.
   * @param {boolean} [editor.drawsGhost]  The editor draws the chosen suggestion as ghost text, so that a list of it
   *   alone would say nothing more. Default: true.
   * @param {boolean} [editor.insertsSpace]  Accepting a word also inserts a space; typing punctuation removes it. Requires
   *   that the editor calls `type`. Default: false.
   * @param {() => boolean} [editor.isEditable]  Whether the writer can change the text at present. Default: always.
   * @param {() => boolean} [editor.isOtherListUsed]  Whether an item is chosen in a list of the editor's own, whose keys are
   *   Tab, Enter, Escape and the arrows then. They are, too, after an arrow key that another listener handled without
   *   moving the caret. Default: never.
   * @param {boolean} [editor.proseOnly]  See the property. Default: true.
   * @param {"all"|"word"} [editor.tabTakes]  See the property. Default: `all`.
   * @param {Partial<Keys>} [editor.keys]  See the property. Default: those of keys.js.
   * @param {() => boolean} [editor.isProse]  Whether the caret is in prose. Default: as Markdown has it (prose.js), in
   *   `context()`.
   */
  constructor({
    context, position, after = () => "", insert, show, options = () => ({}), client = new Client(), mode = "live",
    minProbability = MIN_PROBABILITIES.normal, minUsefulness = 1, drawsGhost = true, insertsSpace = false,
    isEditable = () => true, isOtherListUsed = () => false, proseOnly = true, isProse = () => isTextProse(context()), tabTakes = "all", keys = {},
  }) {
    this.#getBefore = () => {
      const text = context();
      return { end: position ? position() : text.length, text };
    };
    this.#getAfter = after;
    this.#insert = insert;
    this.#show = show;
    this.#getRequestFields = options;
    this.#insertsSpace = insertsSpace;
    this.#drawsGhost = drawsGhost;
    this.#isEditable = isEditable;
    this.#isOtherListUsed = isOtherListUsed;
    this.#isProse = isProse;
    this.client = client;
    /** When suggestions are requested unasked. May be changed at any time. */
    this.mode = mode;
    /** Likely next words come to the last that is this probable, together with all before it. May be changed at any time. */
    this.minProbability = minProbability;
    /** Likely next words that should save fewer keys are not shown. May be changed at any time. */
    this.minUsefulness = minUsefulness;
    /** What Tab takes of a suggestion; the rest of it stays. May be changed at any time. */
    this.tabTakes = tabTakes;
    /** Chords of some actions, in place of the default ones (keys.js). May be changed at any time; `view` has all. */
    this.keys = keys;
    /** Request nothing unasked in code, front matter and mathematics. May be changed at any time. */
    this.proseOnly = proseOnly;
    /** The editor shows all suggestions all the time, as a strip does. May be changed at any time. */
    this.showsAll = false;
    this.#reports = new FeedbackReports(() => this.client, () => [this.#getBefore(), after()]);
  }

  /** Request suggestions for the text before the caret. Errors appear in the view's `problem`. */
  request() {
    if (!this.#isEditable()) return;
    this.#backoff.reset();
    void this.#requestIdeas(true);
  }

  /**
   * The writer is about to type this text. The space that accepting a word inserted gives way to marks that follow a word
   * (`replacesSpace` in text.js), and takes the place of a typed space. An accepted comma likewise: it gives way to marks that
   * end a clause, and takes the place of a typed comma.
   * @param {string} text  "\n" for a line break.
   * @returns {boolean}  True if the text was handled; the editor must not insert it.
   */
  type(text) {
    const before = this.#getBefore();
    if (!this.#isEditable() || !this.#beforeAccepted || !isSameText(this.#beforeAccepted, before)) return false;
    const [comma = ""] = before.text.match(COMMA) ?? [];
    if (comma && text === comma.trim()) return true;
    this.#beforeAccepted = null;
    if (comma && REPLACES_COMMA.test(text)) return this.#insert(text, comma.length), true;
    const last = before.text.slice(-1);
    if (last === comma) return false; // no space came with it
    if (DASH.test(last)) {
      if (text === " ") this.#insert(` ${last} `, 1);
      return text === " ";
    }
    if (text === " ") return true;
    if (!replacesSpace(before.text, text)) return false;
    this.#insert(text, 1);
    if (DASH.test(text)) this.#beforeAccepted = this.#getBefore();
    return true;
  }

  /**
   * The editor's text has changed: suggestions that no longer agree with it disappear. In live mode, insertions request
   * predictions; in pauses mode they start its delay. Deletions, undo, and compositions that an input method is going
   * to convert do neither; after a deletion, a pause brings an idea as after `returned`.
   * @param {Change} [change]  The `input` event, for example; `{}` at the end of a composition. Default: typing.
   */
  changed({ inputType = "insertText", isComposing = false } = {}) {
    if (!this.#isEditable()) return this.close();
    const before = this.#getBefore();
    const isFollowed = this.#isComposing && !this.#willBeConverted(this.#lastBefore.text);
    if (this.#isComposing && !isComposing) {
      this.#convertsLetters = ENDS_CONVERTED.test(before.text.slice(-MAX_WORD_CHARS));
      this.#composesByKeyboard = false;
    }
    this.#isComposing = isComposing;
    if (isFollowed && isSameText(before, this.#lastBefore)) return; // it ended, or was underlined anew, and nothing else changed
    const deleted = typedSince(before, this.#lastBefore);
    const isShorter = Boolean(deleted) || (isComposing && deleted === "");
    const isInsertion =
      inputType.startsWith("insert") && !isShorter && !(isComposing && this.#willBeConverted(before.text));
    this.#list.recordKey();
    const isFitting = this.#lastLine === this.#line; // else what is shown was to fit before another text
    this.#rememberText();
    this.#isResponseEmpty = this.#isMisspelled = false;
    this.#isTabFree = false;
    this.#stopPauseTimer();
    if (this.#inFlight && !this.#inFlight.isExplicit && this.#inFlight !== this.#session) this.#abort();
    const shown = this.#shown.chosen;
    if (!isFitting) this.#ghost = this.#previous = null; // of another text
    if (!isFitting || !(isInsertion || this.#session)) this.#closeAll("ignored");
    this.#follow();
    if (isInsertion && !this.#session && !(shown?.session.isIdea && this.#shown.chosen === shown)) this.#requestUnasked();
    else if (inputType.startsWith("delete") && !isComposing) this.returned();
    this.#render();
  }

  /** The caret may have moved. Closes the suggestions if it did, because they belong to its old position. */
  moved() {
    if (this.#isTextSame) return;
    this.close();
    this.returned();
  }

  /** The writer has come back to the field or to another text. At an end of the text or a paragraph, an idea comes, once. */
  returned() {
    if (!this.#isEditable() || this.#isBusy) return;
    this.#rememberText();
    const place = placeOf(this.#lastBefore);
    const isAtEnd = /\S.*$/.test(place) || !this.#getAfter().trim();
    if (isAtEnd && !this.#seenPlaces.has(place) && this.#mayRequest()) this.#thinkFor(IDEA_DELAY_MS);
  }

  /** Hide the suggestions and abort the request, for example when the editor loses focus. */
  close() {
    this.#stopPauseTimer();
    clearTimeout(this.#retryTimer);
    this.#rememberText();
    this.#isTabFree = false;
    this.#ghost = this.#previous = null; // of another text
    this.#closeAll("ignored");
    this.#list.close();
    this.#reports.flush();
    this.#render();
  }

  /**
   * The writer dismisses the suggestions: hide them and abort the request. Unasked suggestions rest for a while, and
   * longer with each dismissal in a row.
   */
  dismiss() {
    if (this.#closeIfChanged()) return;
    this.#stopPauseTimer();
    if (!this.#session?.isExplicit) this.#backoff.dismiss(performance.now());
    this.#seenPlaces.add(placeOf(this.#lastBefore));
    this.#showRest();
    this.#closeAll("rejected");
    this.#list.close();
    this.#render();
  }

  /**
   * Choose another suggestion. Does nothing if none are shown.
   * @param {number} step  1: the next; −1: the previous; wraps around.
   */
  choose(step) {
    if (this.#closeIfChanged() || !this.#shown.candidates.length) return;
    this.#shown.choose(step);
    this.#isWordTaken = false;
    this.#fixOrder();
    this.#render();
  }

  /**
   * Insert the rest of a suggestion and hide the others. Does nothing if it was not visible long enough to be read.
   * @param {number} [place]  Default: the chosen suggestion.
   */
  accept(place) {
    if (this.#closeIfChanged()) return;
    const candidate = place === undefined ? this.#readable : this.#shown.at(place);
    if (!candidate || !this.#isReadable(candidate)) return;
    this.#backoff.reset();
    const rest = this.#shown.rest(candidate);
    this.#recordAcceptance(candidate, rest);
    this.#closeAll("accepted");
    this.#list.close();
    const isWhole = candidate.sentence !== null && !candidate.isInsideWord; // while it streams, its last word may grow
    const hasSpace = isWhole && this.#needsSpaceAfter(rest);
    this.#insertText(rest, hasSpace, candidate.numReplaced);
  }

  /**
   * Insert the next word of the chosen suggestion. The suggestion stays open while text remains.
   * @param {(text: string) => string} [first]  Returns the beginning of a text that is inserted. Default: a word.
   */
  acceptWord(first = firstWord) {
    if (this.#closeIfChanged()) return;
    const candidate = this.#readable;
    if (!candidate || !this.#isReadable(candidate)) return;
    const rest = this.#shown.rest(candidate);
    const part = first(rest);
    if (part.length >= rest.trimEnd().length) { // before text on the same line, a suggestion may end with a space
      this.accept();
      return;
    }
    this.#backoff.reset();
    this.#isWordTaken = true;
    this.#fixOrder();
    this.#shown.show(candidate);
    const isSpaceNext = this.#insertsSpace && rest[part.length] === " " && !this.#isFollowedAfter(part);
    this.#recordAcceptance(candidate, isSpaceNext ? `${part} ` : part);
    this.#insertText(part, isSpaceNext);
  }

  /**
   * Handle a `keydown` event. Keys that accept, choose or dismiss are the editor's while there is nothing for them, unless
   * they are held. Once the writer requested or chose, Enter, ↑, ↓ and → do so too, until a word is accepted. Escape with
   * nothing to dismiss leaves the next Tab to the editor. A held key accepts nothing.
   * Keys of an input method, chords that type a character in the writer's layout, and all keys while the text is another
   * than the one that suggestions are shown for, belong to the editor.
   * @param {KeyboardEvent} event
   * @returns {boolean}  True if the key was handled; its default action is prevented, and the editor must ignore it.
   */
  press(event) {
    if (isInputMethods(event)) {
      this.#composesByKeyboard = event.key === "Process" || !["", "Unidentified"].includes(event.code);
      return false;
    }
    if (event.defaultPrevented || !this.#isEditable()) return false;
    const isChanged = this.#closeIfChanged();
    if (event.ctrlKey && (event.key === "n" || event.key === "p")) this.#passedKey = event; // as the arrows, on a Mac
    if (event.getModifierState?.("AltGraph")) return false;
    const chord = chordOf(event);
    const { keys } = this.view;
    const isPlain = !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey;
    const action = ACTIONS.find((each) => keys[each].includes(chord)) ?? this.#listAction(chord);
    if (!action && !isPlain && !event.altKey) return false;
    const isTabFree = this.#isTabFree;
    this.#isTabFree = false;
    if (chord === "Tab" && isTabFree) return false;
    const isChoosing = action === "next" || action === "previous" || MOVES_CHOICE.test(chord);
    if (event.repeat && chord === this.#heldChord && !isChoosing) {
      event.preventDefault();
      return true;
    }
    const isOtherLists = isPlain && (this.#passedKey?.defaultPrevented || this.#isOtherListUsed());
    const perform = isOtherLists ? null : this.#performer(action, isPlain);
    if (!perform) {
      if (isOtherLists ? ["Tab", "Enter", "Escape"].includes(event.key) : MOVES_CHOICE.test(event.key)) {
        this.#passedKey = isOtherLists ? null : event;
      }
      this.#isTabFree = chord === "Escape" && !isOtherLists && !isChanged;
      this.#heldChord = "";
      return false;
    }
    this.#heldChord = chord;
    event.preventDefault();
    if (!event.repeat || isChoosing) perform();
    return true;
  }

  /** Whether the next Tab is left to the editor, because Escape had nothing to dismiss. */
  get isTabFree() {
    return this.#isTabFree;
  }

  /**
   * The chosen suggestion with its `explanation`: the likeliest tokens at each position. The first call repeats the
   * request with the same seed, which gives the same text; further calls for the same response reuse the answer.
   * @param {number} numLikeliest  Alternatives per token, 1 to 10.
   * @returns {Promise<Sentence|null>}  Null if the response is incomplete or nothing is chosen.
   * @throws {Problem} If the request fails.
   */
  async explain(numLikeliest) {
    const chosen = this.#shown.chosen;
    const seed = chosen?.sentence?.seed;
    if (!chosen?.session.response || seed === undefined) return null;
    const { session } = chosen;
    session.explanation ??= this.client.complete(
      { ...session.request, explain: numLikeliest }, session.abortController.signal,
    );
    const response = await session.explanation;
    return response.sentences.find((sentence) => sentence.seed === seed) ?? null;
  }

  /** The current view, in the form passed to `show`. @returns {View} */
  get view() {
    const { suggestions, isChosenByUser, chosen } = this.#shown;
    return {
      status: this.#session?.status ?? (suggestions.length ? "ready" : this.#isResponseEmpty ? "empty" : "idle"),
      suggestions,
      chosen: suggestions.find(({ place }) => this.#shown.at(place) === chosen) ?? null,
      isListed: this.#list.isOpen,
      isExplicit: this.#session?.isExplicit ?? false,
      isChosenByUser,
      problem: this.#problem,
      isUnfamiliar: this.#isUnfamiliar,
      firstMs: this.#latest?.firstMs ?? null,
      totalMs: this.#latest?.totalMs ?? null,
      restMs: this.#backoff.restMs(performance.now()),
      keys: resolveKeys(this.keys, this.tabTakes),
    };
  }

  // ---- the text ----

  /** The rest of the caret's line. */
  get #line() {
    return this.#getAfter().split("\n", 1)[0] ?? "";
  }

  #rememberText() {
    this.#lastBefore = this.#getBefore();
    this.#lastLine = this.#line;
    this.#passedKey = null;
  }

  /** Whether the text is the one that suggestions are shown for. A program can change it without an event. */
  get #isTextSame() {
    return this.#isEditable() && isSameText(this.#getBefore(), this.#lastBefore) && this.#line === this.#lastLine;
  }

  /** Close what is shown or requested for another text. @returns {boolean}  Whether there was something. */
  #closeIfChanged() {
    const isChanged = this.#isBusy && !this.#isTextSame;
    if (isChanged) this.close();
    return isChanged;
  }

  // ---- keys ----

  /**
   * @param {Action|undefined} action
   * @param {boolean} isPlain  Its key has no modifier.
   * @returns {(() => void)|null}  Null: the key belongs to the editor.
   */
  #performer(action, isPlain) {
    if (action === "request") return () => this.request();
    if (action === "dismiss") return this.#isBusy ? () => this.dismiss() : null;
    const canAccept = this.#shown.candidates.length || this.#readable || (isPlain && this.#session);
    if (!action || !canAccept) return null;
    if (action === "next") return () => this.choose(1);
    if (action === "previous") return () => this.choose(-1);
    if (action === "acceptWord") return () => this.acceptWord();
    if (action === "acceptClause") return () => this.acceptWord(firstClause);
    if (action === "acceptSentence") return () => this.acceptWord(firstSentence);
    return () => this.accept(action === "accept" ? undefined : Number(action.slice(-1)) - 1);
  }

  /** What a plain key does once the writer requested suggestions or chose one. @param {string} key */
  #listAction(key) {
    const isUsed = this.#session?.isExplicit || this.#shown.isChosenByUser;
    return isUsed && !this.#isWordTaken && this.#shown.candidates.length ? LIST_KEYS[key] : undefined;
  }

  /** Whether there is something to dismiss: suggestions, a request, or one that is about to be sent. */
  get #isBusy() {
    return this.#shown.candidates.length > 0 || this.#inFlight !== null || this.#pauseTimer !== undefined;
  }

  /**
   * Whether what is being composed will be replaced by other letters. Touch keyboards compose every word letter by
   * letter, and it stands as it is shown. Input methods of Chinese, Japanese and Korean show their own scripts, or Latin
   * letters that a keyboard types, or that they have converted before.
   * @param {string} text  Text before the caret.
   */
  #willBeConverted(text) {
    return this.#composesByKeyboard || this.#convertsLetters || ENDS_CONVERTED.test(text.slice(-MAX_WORD_CHARS));
  }

  // ---- requests ----

  /** Whether something may be requested unasked for the present text. */
  #mayRequest() {
    const nowMs = performance.now();
    if (hasTextAfter(this.#getAfter()) || !this.#lastBefore.text.trim() || this.#backoff.restMs(nowMs)) return false;
    if (this.mode === "off" || (this.proseOnly && !this.#isProse())) return false;
    if (nowMs < this.#retryAtMs) this.#beforeRetry = this.#lastBefore;
    return nowMs >= this.#retryAtMs;
  }

  /** Show at each second how long the suggestions still rest, and that they do not any more. */
  #showRest() {
    clearTimeout(this.#restTimer);
    const restMs = this.#backoff.restMs(performance.now());
    if (restMs) this.#restTimer = setTimeout(() => (this.#showRest(), this.#render()), restMs % 1000 || 1000);
    else this.returned();
  }

  #requestUnasked() {
    if (!this.#mayRequest()) return;
    if (this.mode === "live") {
      void this.#requestPredictions();
      this.#thinkFor(IDEA_DELAY_MS);
    } else {
      this.#pauseTimer = setTimeout(() => this.#requestAtPause(), PAUSE_MS);
    }
  }

  #stopPauseTimer() {
    clearTimeout(this.#pauseTimer);
    this.#pauseTimer = undefined;
  }

  #requestAtPause() {
    this.#pauseTimer = undefined;
    if (!this.#isTextSame) return;
    void (this.mode === "live" ? this.#requestIdea() : this.#requestIdeas(false));
  }

  /** Request likely next words, and fill the free places with them. */
  async #requestPredictions() {
    const session = this.#start({ strategy: "predict", corrections: true, min_probability: this.minProbability }, false);
    await this.#complete(session, (candidates) => {
      this.#isMisspelled = session.response?.errors?.some(({ code }) => code === "misspelled") ?? false;
      const useful = candidates.filter(({ sentence }) => (sentence?.usefulness ?? Infinity) >= this.minUsefulness);
      this.#shown.merge(useful, session.numRequested);
    });
  }

  /**
   * Wait for a response that is not streamed.
   * @param {SuggestionSession} session
   * @param {(candidates: Candidate[]) => void} use
   */
  async #complete(session, use) {
    try {
      const response = await this.client.complete(session.request, session.abortController.signal);
      if (session !== this.#inFlight || this.#closeIfChanged()) return;
      this.#inFlight = null;
      session.applyResponse(response);
      this.#noteResponse(session);
      use(session.candidates);
    } catch (error) {
      this.#fail(session, error);
    }
    this.#render();
  }

  /** Request an idea if the writer stands still for so long, once a slow server has answered. @param {number} delayMs */
  #thinkFor(delayMs) {
    this.#pauseTimer = setTimeout(() => (this.#inFlight ? this.#thinkFor(IDEA_WAIT_MS) : this.#requestAtPause()), delayMs);
  }

  /**
   * The writer thinks: show one idea, to the end of its sentence, and list the others. What is on show stays, unless the
   * idea continues it or it is a fragment that was left standing.
   */
  async #requestIdea() {
    if (this.#session || this.#shown.isChosenByUser || this.#isMisspelled) return;
    const session = this.#start({}, false);
    session.isIdea = true;
    await this.#complete(session, (candidates) => {
      const isTaken = this.#accepted !== null && this.#accepted.candidate === this.#shown.chosen;
      this.#shown.addIdea(candidates, session.numRequested, isTaken);
    });
  }

  /**
   * Request sampled continuations, and show them while they stream in.
   * @param {boolean} isExplicit
   */
  async #requestIdeas(isExplicit) {
    this.#stopPauseTimer();
    this.#closeAll("ignored");
    const session = this.#start({}, isExplicit);
    this.#session = session;
    this.#rememberText();
    this.#shown.follow(session.before);
    this.#isResponseEmpty = false;
    this.#render();
    try {
      for await (const event of this.client.stream(session.request, session.abortController.signal)) {
        session.applyEvent(event);
        this.#expectMore(session);
        if (session.response) this.#noteResponse(session);
        if (session === this.#session) this.#showProgress(session);
      }
    } catch (error) {
      this.#fail(session, error);
    }
    this.#reports.end(session);
    if (this.#inFlight === session) this.#inFlight = null;
    this.#render();
  }

  /**
   * @param {RequestFields} fields
   * @param {boolean} isExplicit
   */
  #start(fields, isExplicit) {
    this.#abort();
    const before = this.#getBefore();
    const after = this.#getAfter();
    const suffix = trimSuffix(after);
    const isNear = Math.abs(before.end - this.#familiarityEnd) < FAMILIARITY_CHARS;
    const isChecked = this.#isUnfamiliar || !isNear || fields.strategy !== "predict";
    // Always send a seed, so that `explain` can repeat the request: a seed chosen by the server may exceed 2⁵³.
    const request = {
      seed: randomSeed(), strategy: "idea", ...(isChecked && { familiar_only: true }), ...this.#getRequestFields(), ...fields, context: trimContext(before),
      ...(suffix && { suffix }),
      // Predictions are more often what is missing before a text than ideas are.
      ...(hasTextAfter(after) && { strategy: "predict" }),
    };
    const session = new SuggestionSession(before, after, request, isExplicit);
    this.#inFlight = this.#latest = session;
    this.#expectMore(session);
    return session;
  }

  /** @param {SuggestionSession} session */
  #noteResponse({ request, response, before }) {
    this.#problem = null;
    if (request.strategy !== "predict") this.#seenPlaces.add(placeOf(before));
    if (!request.familiar_only) return;
    this.#isUnfamiliar = response?.errors?.some(({ code }) => code === "unfamiliar_context") ?? false;
    this.#familiarityEnd = before.end;
  }

  /** @param {SuggestionSession} session */
  #expectMore(session) {
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = setTimeout(() => {
      if (session !== this.#inFlight) return; // answered, or aborted
      const detail = `The server has said nothing for ${MAX_SILENCE_MS / 1000} seconds, so the request was cancelled.`;
      this.#fail(session, new Problem({ code: "silent", detail }));
      session.abortController.abort();
      this.#render();
    }, MAX_SILENCE_MS);
  }

  #abort() {
    this.#inFlight?.abortController.abort();
    this.#inFlight = null;
  }

  /** @param {SuggestionSession} session */
  #showProgress(session) {
    if (this.#closeIfChanged()) return;
    this.#shown.replace(session.candidates);
    if (session.response && !this.#shown.candidates.length) {
      this.#isResponseEmpty = session.isExplicit && isSameText(session.before, this.#lastBefore);
      this.#session = null;
    }
    this.#render();
  }

  /**
   * @param {SuggestionSession} session
   * @param {unknown} error
   */
  #fail(session, error) {
    if (session !== this.#inFlight) return; // aborted
    this.#inFlight = null;
    if (session === this.#session) this.#closeAll("ignored");
    const problem = error instanceof Problem ? error : new Problem({ detail: String(error) });
    // Requests that reach the server by two gateways may overtake each other; this is no problem of the writer's.
    if (problem.code !== "superseded") this.#problem = problem;
    const delayMs = problem.retryAfterS ? 1000 * problem.retryAfterS : RETRY_AFTER_MS;
    this.#retryAtMs = performance.now() + delayMs;
    clearTimeout(this.#retryTimer);
    // A writer who has stopped learns that the server is back without another key.
    this.#beforeRetry = session.before;
    if (!session.isExplicit) this.#retryTimer = setTimeout(() => this.#retry(), delayMs);
  }

  /** Request what could not be requested, unless the writer has gone elsewhere. */
  #retry() {
    const isStill = isSameText(this.#beforeRetry, this.#getBefore());
    if (!isStill || this.#inFlight || this.#shown.candidates.length) return;
    this.#stopPauseTimer();
    this.#requestUnasked();
  }

  // ---- what is shown ----

  /** After an insertion: keep what agrees with the document. */
  #follow() {
    const first = this.#shown.chosen;
    this.#shown.follow(this.#lastBefore);
    if (first && this.#shown.chosen !== first) this.#leave(first);
    if (!this.#session) return;
    if (this.#session.agreesWith(this.#lastBefore)) this.#shown.replace(this.#session.candidates);
    else this.#closeAll("ignored");
  }

  /** The suggestion that was shown as ghost text does not agree with the document any more. @param {Candidate} candidate */
  #leave(candidate) {
    if (this.#accepted?.candidate === candidate) this.#reportAccepted();
    else if (candidate.session !== this.#session && this.#isReadable(candidate)) this.#reports.report(candidate, "ignored");
  }

  /**
   * Hide all suggestions and report the outcome. A partly accepted suggestion counts as accepted.
   * @param {Outcome} outcome
   */
  #closeAll(outcome) {
    const { chosen } = this.#shown;
    const session = this.#session;
    if (this.#accepted) this.#reportAccepted();
    else if (chosen && (outcome === "rejected" || this.#isReadable(chosen))) this.#reports.report(chosen, outcome);
    this.#shown.clear();
    this.#isWordTaken = false;
    this.#session = null;
    // Feedback needs the id of the complete response, so an accepted request runs to its end.
    if (this.#inFlight && !(this.#inFlight === session && outcome === "accepted")) this.#abort();
  }

  /** @param {Candidate} candidate @param {string} text */
  #recordAcceptance(candidate, text) {
    if (this.#accepted?.candidate !== candidate) this.#reportAccepted();
    const { end, text: textBefore } = this.#getBefore();
    const { numReplaced } = candidate;
    const before = { end: end - numReplaced, text: textBefore.slice(0, textBefore.length - numReplaced) };
    this.#accepted ??= { candidate, before, text: "" };
    this.#accepted.text += text;
  }

  #reportAccepted() {
    const accepted = this.#accepted;
    this.#accepted = null;
    if (accepted) this.#reports.report(accepted.candidate, "accepted", accepted.text, accepted.before);
  }

  /** The writer uses this order. */
  #fixOrder() {
    if (this.#session) this.#session.isOrderFixed = true;
  }

  /**
   * What Tab accepts: the ghost text; or, if it has just changed, what stood there before, if it still agrees with the text.
   * @returns {Candidate|null}
   */
  get #readable() {
    const { chosen } = this.#shown;
    if (chosen && this.#isReadable(chosen)) return chosen;
    const previous = this.#previous;
    const wasJustThere = previous && performance.now() - previous.untilMs < MIN_VISIBLE_MS;
    return wasJustThere && this.#shown.rest(previous.candidate) ? previous.candidate : chosen;
  }

  /** Whether the writer can have read it. @param {Candidate} candidate */
  #isReadable({ shownAtMs }) {
    return shownAtMs !== null && performance.now() - shownAtMs >= MIN_VISIBLE_MS;
  }

  /** Whether a space comes with an accepted text. @param {string} text */
  #needsSpaceAfter(text) {
    return this.#insertsSpace && !ENDS_WITHOUT_SPACE.test(text) && !this.#isFollowedAfter(text);
  }

  /** Whether what is on the line after the caret follows a word without a space. @param {string} word  Accepted. */
  #isFollowedAfter(word) {
    const line = this.#line;
    return line !== "" && (!hasTextAfter(line) || replacesSpace(this.#getBefore().text + word, line));
  }

  /** @param {string} text  @param {boolean} hasSpace  A space comes with it. @param {number} [numReplaced] */
  #insertText(text, hasSpace, numReplaced = 0) {
    this.#insert(hasSpace ? `${text} ` : text, numReplaced);
    if (hasSpace || COMMA.test(text)) this.#beforeAccepted = this.#getBefore();
  }

  #render() {
    const { chosen, candidates } = this.#shown;
    const isAsked = (this.#session?.isExplicit ?? false) || this.#shown.isChosenByUser;
    const isMore = candidates.length > Number(this.#drawsGhost && !chosen?.numReplaced);
    const [line = "", ...below] = this.#getAfter().split("\n");
    const mayOpen = isMore && !hasTextAfter(line) && !below.join("").trim(); // a list would hide the text that follows
    this.#list.update(candidates[0] ?? null, isAsked ? "now" : mayOpen ? "still" : "never");
    const nowMs = performance.now();
    if (this.#ghost && this.#ghost !== chosen) {
      this.#previous = this.#isReadable(this.#ghost) ? { candidate: this.#ghost, untilMs: nowMs } : null;
    }
    this.#ghost = chosen;
    for (const candidate of this.#session?.candidates ?? candidates) {
      const isGhost = candidate === chosen && !chosen.numReplaced;
      const isVisible = candidates.includes(candidate) && (isGhost || this.#list.isOpen || this.showsAll);
      const wasJustThere = candidate === this.#previous?.candidate;
      if (!wasJustThere) candidate.shownAtMs = isVisible ? candidate.shownAtMs ?? nowMs : null;
    }
    this.#show(this.view);
  }
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
