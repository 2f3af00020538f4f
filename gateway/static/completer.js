// Decides when to request suggestions, which of them to show, which keys are theirs, and what to insert.
//
// It does not access the editor or the page: the editor passes functions that return the text around the caret, insert
// text and show a `View`. `Client` sends the HTTP requests.

import { CaretText } from "./caret_text.js";
import { Client } from "./client.js";
import { Composition, isInputMethods } from "./composition.js";
import { FeedbackReports } from "./feedback_reports.js";
import { KeyHandler } from "./key_handler.js";
import { resolveKeys } from "./keys.js";
import { ListTiming } from "./list_timing.js";
import { isProse as isTextProse } from "./prose.js";
import { Requests } from "./requests.js";
import { isReadable, ShownSuggestions } from "./shown_suggestions.js";
import { Spacing } from "./spacing.js";
import { firstClause, firstSentence, firstWord, hasTextAfter, isSameText, typedSince } from "./text.js";
import { Unasked } from "./unasked.js";

/** @typedef {import("./client.js").RequestFields} RequestFields */
/** @typedef {import("./client.js").Sentence} Sentence */
/** @typedef {import("./feedback_reports.js").Outcome} Outcome */
/** @typedef {import("./keys.js").Action} Action */
/** @typedef {import("./keys.js").Keys} Keys */
/** @typedef {import("./shown_suggestions.js").Suggestion} Suggestion */
/** @typedef {import("./suggestion_session.js").Candidate} Candidate */
/** @typedef {import("./suggestion_session.js").SuggestionSession} SuggestionSession */

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
 * @property {import("./client.js").Problem|null} problem  Why the last request failed.
 * @property {boolean} isUnfamiliar  The model does not know text like that before the caret, so it suggests nothing.
 * @property {number|null} firstMs  Latest request: milliseconds to the first text.
 * @property {number|null} totalMs  Latest request: milliseconds to the complete response.
 * @property {number} restMs  Milliseconds until unasked suggestions come back after dismissals; 0: they do not rest.
 * @property {Keys} keys  The keys of the suggestions, to be named where they are shown.
 */

/** A change of the text, as in `InputEvent`. @typedef {{inputType?: string, isComposing?: boolean}} Change */

/** How probable likely next words have to be, by how often the writer wants some. */
export const MIN_PROBABILITIES = { eager: 0.3, normal: 0.5, quiet: 0.7 };

/** Suggestions for one text field. Only one request is in flight at a time; a newer one aborts it. */
export class Completer {
  /** The request of the writer or of a pause, whose suggestions are shown or awaited. @type {SuggestionSession|null} */
  #session = null;
  #shown = new ShownSuggestions();
  #list = new ListTiming(() => this.#render());
  #composition = new Composition();
  #text;
  #requests;
  #unasked;
  #spacing;
  #keys;
  #reports;
  /** A word was accepted, and nothing was chosen or requested since: Enter and the plain arrow keys are the editor's. */
  #isWordTaken = false;
  #isResponseEmpty = false;
  #show;
  #insertsSpace;
  #drawsGhost;

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
    this.#text = new CaretText({ context, position, after, isEditable });
    this.#spacing = new Spacing(this.#text, insert);
    this.#show = show;
    this.#insertsSpace = insertsSpace;
    this.#drawsGhost = drawsGhost;
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
    this.#reports = new FeedbackReports(() => this.client, () => [this.#text.before, this.#text.after]);
    this.#requests = new Requests(this.#text, {
      client: () => this.client,
      fields: options,
      isOutdated: () => this.#closeIfChanged(),
      failed: (session) => {
        if (session === this.#session) this.#closeAll("ignored");
        this.#render();
      },
      retry: () => {
        if (!this.#shown.candidates.length) this.#unasked.request();
      },
    });
    this.#unasked = new Unasked({
      completer: this,
      text: this.#text,
      requests: this.#requests,
      shown: this.#shown,
      reports: this.#reports,
      isProse,
      isAsked: () => this.#session !== null,
      requestIdeas: () => void this.#requestIdeas(false),
      render: () => this.#render(),
    });
    this.#keys = new KeyHandler({
      keys: () => this.view.keys,
      isListUsed: () => this.#isListUsed,
      isOtherListUsed,
      performer: (action, isPlain) => this.#performer(action, isPlain),
    });
  }

  /** Request suggestions for the text before the caret. Errors appear in the view's `problem`. */
  request() {
    if (!this.#text.isEditable) return;
    this.#unasked.use();
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
    return this.#text.isEditable && this.#spacing.type(text);
  }

  /**
   * The editor's text has changed: suggestions that no longer agree with it disappear. In live mode, insertions request
   * predictions; in pauses mode they start its delay. Deletions, undo, and compositions that an input method is going
   * to convert do neither; after a deletion, a pause brings an idea as after `returned`.
   * @param {Change} [change]  The `input` event, for example; `{}` at the end of a composition. Default: typing.
   */
  changed({ inputType = "insertText", isComposing = false } = {}) {
    if (!this.#text.isEditable) return this.close();
    const { before } = this.#text;
    const previous = this.#text.last;
    const stood = this.#composition.change(isComposing, before.text, previous.text);
    if (stood && isSameText(before, previous)) return; // it ended, or was underlined anew, and nothing else changed
    const deleted = typedSince(before, previous);
    const isShorter = Boolean(deleted) || (isComposing && deleted === "");
    const isInsertion =
      inputType.startsWith("insert") && !isShorter && !(isComposing && this.#composition.willBeConverted(before.text));
    this.#list.recordKey();
    const isFitting = this.#text.isLineSame; // else what is shown was to fit before another text
    this.#rememberText();
    this.#isResponseEmpty = this.#keys.isTabFree = false;
    this.#unasked.edit();
    const { inFlight } = this.#requests;
    if (inFlight && !inFlight.isExplicit && inFlight !== this.#session) this.#requests.abort();
    const shown = this.#shown.chosen;
    if (!isFitting) this.#shown.forgetGhost(); // of another text
    if (!isFitting || !(isInsertion || this.#session)) this.#closeAll("ignored");
    this.#follow();
    if (isInsertion && !this.#session && !(shown?.session.isIdea && this.#shown.chosen === shown)) this.#unasked.request();
    else if (inputType.startsWith("delete") && !isComposing) this.returned();
    this.#render();
  }

  /** The caret may have moved. Closes the suggestions if it did, because they belong to its old position. */
  moved() {
    if (this.#text.isSame) return;
    this.close();
    this.returned();
  }

  /** The writer has come back to the field or to another text. At an end of the text or a paragraph, an idea comes, once. */
  returned() {
    if (!this.#text.isEditable || this.#isBusy) return;
    this.#rememberText();
    this.#unasked.visit();
  }

  /** Hide the suggestions and abort the request, for example when the editor loses focus. */
  close() {
    this.#unasked.stop();
    this.#requests.stopRetry();
    this.#rememberText();
    this.#keys.isTabFree = false;
    this.#shown.forgetGhost(); // of another text
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
    this.#unasked.dismiss(!this.#session?.isExplicit);
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
    const candidate = place === undefined ? this.#shown.readable : this.#shown.at(place);
    if (!candidate || !isReadable(candidate)) return;
    this.#unasked.use();
    const rest = this.#shown.rest(candidate);
    this.#reports.take(candidate, rest);
    this.#closeAll("accepted");
    this.#list.close();
    const isWhole = candidate.sentence !== null && !candidate.isInsideWord; // while it streams, its last word may grow
    const hasSpace = isWhole && this.#insertsSpace && this.#spacing.isNeededAfter(rest);
    this.#spacing.insert(rest, hasSpace, candidate.numReplaced);
  }

  /**
   * Insert the next word of the chosen suggestion. The suggestion stays open while text remains.
   * @param {(text: string) => string} [first]  Returns the beginning of a text that is inserted. Default: a word.
   */
  acceptWord(first = firstWord) {
    if (this.#closeIfChanged()) return;
    const candidate = this.#shown.readable;
    if (!candidate || !isReadable(candidate)) return;
    const rest = this.#shown.rest(candidate);
    const part = first(rest);
    if (part.length >= rest.trimEnd().length) { // before text on the same line, a suggestion may end with a space
      this.accept();
      return;
    }
    this.#unasked.use();
    this.#isWordTaken = true;
    this.#fixOrder();
    this.#shown.show(candidate);
    const isSpaceNext = this.#insertsSpace && rest[part.length] === " " && !this.#spacing.isFollowedAfter(part);
    this.#reports.take(candidate, isSpaceNext ? `${part} ` : part);
    this.#spacing.insert(part, isSpaceNext);
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
    if (isInputMethods(event)) this.#composition.press(event);
    if (isInputMethods(event) || event.defaultPrevented || !this.#text.isEditable) return false;
    return this.#keys.press(event, this.#closeIfChanged());
  }

  /** Whether the next Tab is left to the editor, because Escape had nothing to dismiss. */
  get isTabFree() {
    return this.#keys.isTabFree;
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
    const { isUnfamiliar, latest, problem } = this.#requests;
    return {
      status: this.#session?.status ?? (suggestions.length ? "ready" : this.#isResponseEmpty ? "empty" : "idle"),
      suggestions,
      chosen: suggestions.find(({ place }) => this.#shown.at(place) === chosen) ?? null,
      isListed: this.#list.isOpen,
      isExplicit: this.#session?.isExplicit ?? false,
      isChosenByUser,
      problem,
      isUnfamiliar,
      firstMs: latest?.firstMs ?? null,
      totalMs: latest?.totalMs ?? null,
      restMs: this.#unasked.restMs,
      keys: resolveKeys(this.keys, this.tabTakes),
    };
  }

  // ---- the text ----

  #rememberText() {
    this.#text.remember();
    this.#keys.forget();
  }

  /** Close what is shown or requested for another text. @returns {boolean}  Whether there was something. */
  #closeIfChanged() {
    const isChanged = this.#isBusy && !this.#text.isSame;
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
    const canAccept = this.#shown.candidates.length || this.#shown.readable || (isPlain && this.#session);
    if (!action || !canAccept) return null;
    if (action === "next") return () => this.choose(1);
    if (action === "previous") return () => this.choose(-1);
    if (action === "acceptWord") return () => this.acceptWord();
    if (action === "acceptClause") return () => this.acceptWord(firstClause);
    if (action === "acceptSentence") return () => this.acceptWord(firstSentence);
    return () => this.accept(action === "accept" ? undefined : Number(action.slice(-1)) - 1);
  }

  /** Whether plain keys are those of the list: the writer requested suggestions or chose one. */
  get #isListUsed() {
    const isUsed = this.#session?.isExplicit || this.#shown.isChosenByUser;
    return Boolean(isUsed) && !this.#isWordTaken && this.#shown.candidates.length > 0;
  }

  /** Whether there is something to dismiss: suggestions, a request, or one that is about to be sent. */
  get #isBusy() {
    return this.#shown.candidates.length > 0 || this.#requests.inFlight !== null || this.#unasked.isWaiting;
  }

  // ---- requests ----

  /**
   * Request sampled continuations, and show them while they stream in.
   * @param {boolean} isExplicit
   */
  async #requestIdeas(isExplicit) {
    this.#unasked.stop();
    this.#closeAll("ignored");
    const session = this.#requests.start({}, isExplicit);
    this.#session = session;
    this.#rememberText();
    this.#shown.follow(session.before);
    this.#isResponseEmpty = false;
    this.#render();
    for await (const _ of this.#requests.stream(session)) {
      this.#unasked.noteIdeas(session);
      if (session === this.#session) this.#showProgress(session);
    }
    this.#reports.end(session);
    this.#render();
  }

  /** @param {SuggestionSession} session */
  #showProgress(session) {
    if (this.#closeIfChanged()) return;
    this.#shown.replace(session.candidates);
    if (session.response && !this.#shown.candidates.length) {
      this.#isResponseEmpty = session.isExplicit && isSameText(session.before, this.#text.last);
      this.#session = null;
    }
    this.#render();
  }

  // ---- what is shown ----

  /** After an insertion: keep what agrees with the document. */
  #follow() {
    const first = this.#shown.chosen;
    this.#shown.follow(this.#text.last);
    if (first && this.#shown.chosen !== first) this.#leave(first);
    if (!this.#session) return;
    if (this.#session.agreesWith(this.#text.last)) this.#shown.replace(this.#session.candidates);
    else this.#closeAll("ignored");
  }

  /** The suggestion that was shown as ghost text does not agree with the document any more. @param {Candidate} candidate */
  #leave(candidate) {
    if (this.#reports.taken === candidate) this.#reports.reportTaken();
    else if (candidate.session !== this.#session && isReadable(candidate)) this.#reports.report(candidate, "ignored");
  }

  /**
   * Hide all suggestions and report the outcome. A partly accepted suggestion counts as accepted.
   * @param {Outcome} outcome
   */
  #closeAll(outcome) {
    const { chosen } = this.#shown;
    const session = this.#session;
    if (this.#reports.taken) this.#reports.reportTaken();
    else if (chosen && (outcome === "rejected" || isReadable(chosen))) this.#reports.report(chosen, outcome);
    this.#shown.clear();
    this.#isWordTaken = false;
    this.#session = null;
    // Feedback needs the id of the complete response, so an accepted request runs to its end.
    if (!(this.#requests.inFlight === session && outcome === "accepted")) this.#requests.abort();
  }

  /** The writer uses this order. */
  #fixOrder() {
    if (this.#session) this.#session.isOrderFixed = true;
  }

  #render() {
    const { chosen, candidates } = this.#shown;
    const isAsked = (this.#session?.isExplicit ?? false) || this.#shown.isChosenByUser;
    const isMore = candidates.length > Number(this.#drawsGhost && !chosen?.numReplaced);
    const [line = "", ...below] = this.#text.after.split("\n");
    const mayOpen = isMore && !hasTextAfter(line) && !below.join("").trim(); // a list would hide the text that follows
    this.#list.update(candidates[0] ?? null, isAsked ? "now" : mayOpen ? "still" : "never");
    const isVisible = this.#list.isOpen || this.showsAll;
    this.#shown.noteVisible(this.#session?.candidates ?? candidates, isVisible);
    this.#show(this.view);
  }
}
