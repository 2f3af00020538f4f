// Pure functions on text: the part of a document that is sent to the server, the next word of a suggestion, and the marks
// that follow a word.

/** The server reads only the last few hundred tokens of a document, so the client does not send more than this. */
const MAX_CONTEXT_CHARS = 8192;

/** The server reads only the first words of the text after the caret. */
const MAX_SUFFIX_CHARS = 200;

/**
 * The start of a trimmed context is a multiple of this. It moves rarely while the writer types at the end, so that
 * consecutive requests share a prefix and the server's prefix cache hits.
 */
const TRIM_STEP_CHARS = 4096;

/** How much of the text before a suggestion is compared, to see that the suggestion is still where it was requested. */
const NUM_COMPARED_CHARS = 256;

/** Marks that stand after a word, or another mark, without a space. */
const FOLLOWS = /^[\p{Terminal_Punctuation}\p{Pe}\p{Pf}\p{Pd}…>%‰°′″ªº¹²³™®†‡·/⁄\s]/u;

/**
 * Marks that open and close, with what closes them in some language: „…“, “…”, ”…”, »…«, «…», »…». Whether one of them opens
 * or closes depends on what is open.
 * @type {Record<string, string>}
 */
const CLOSERS = {
  '"': '"', "“": "”", "„": "“”\"", "”": "”", "'": "'", "‘": "’", "‚": "‘’'", "’": "’", "«": "»", "»": "«»", "‹": "›", "›": "‹›",
  "*": "*", "_": "_", "~": "~", "=": "=", "`": "`", "$": "$",
};
const EMPHASIS = /[*_~=`$]/g;

/** One of these marks, or a run such as `**`, with what is before and after it. */
const PAIRED = /(?<=(.?))(([*_~=`$])\3*|["“„”'‘‚’«»‹›])(?=(.?))/gsu;

/** An abbreviation that a name or a number follows, or an initial. */
const ABBREVIATION = /(?<![\p{L}\p{N}])(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|vs|Fig|e\.g|i\.e|(?!I\b)\p{Lu})\.\s*$/u;

/** White space, punctuation that opens nothing, and signs such as those of emphasis. */
const NO_TEXT = /^[\s\p{Pc}\p{Pd}\p{Pe}\p{Pf}\p{Pi}\p{Po}\p{Sc}\p{Sk}\p{Sm}]*$/u;

/**
 * The text before the caret, or its end.
 * @typedef {object} TextBefore
 * @property {number} end  The caret's position in the document, in UTF-16 code units.
 * @property {string} text  What ends there: all that is before it, or at least what follows `contextStart(end)`.
 */

/**
 * Where the text begins that is sent to the server for a caret at `end`.
 * @param {number} end  Position in the document, in UTF-16 code units.
 * @returns {number}  0 for a short text; in a long text at least `MAX_CONTEXT_CHARS` and less than
 *   `MAX_CONTEXT_CHARS + TRIM_STEP_CHARS` before `end`.
 */
export function contextStart(end) {
  return Math.max(0, Math.floor((end - MAX_CONTEXT_CHARS) / TRIM_STEP_CHARS) * TRIM_STEP_CHARS);
}

/**
 * What of the text before the caret is sent to the server.
 * @param {TextBefore} before
 * @returns {string}
 */
export function trimContext({ end, text }) {
  const context = text.slice(Math.max(0, contextStart(end) - (end - text.length)));
  return /^[\udc00-\udfff]/.test(context) ? context.slice(1) : context; // do not split a surrogate pair
}

/**
 * What was typed between two states of the text before the caret.
 * @param {TextBefore} earlier
 * @param {TextBefore} now
 * @returns {string|null}  Null: the text does not continue the earlier one.
 */
export function typedSince(earlier, now) {
  const numTyped = now.end - earlier.end;
  if (numTyped < 0 || numTyped > now.text.length) return null;
  const typedAt = now.text.length - numTyped;
  const numCompared = Math.min(NUM_COMPARED_CHARS, typedAt, earlier.text.length);
  const start = earlier.text.length - numCompared;
  return now.text.startsWith(earlier.text.slice(start), typedAt - numCompared) ? now.text.slice(typedAt) : null;
}

/** Whether the caret and the text before it are the same. @param {TextBefore} one @param {TextBefore} other */
export function isSameText(one, other) {
  return typedSince(one, other) === "";
}

/**
 * The first word of a text, with the whitespace before it and the punctuation after it.
 * @param {string} text
 * @returns {string}
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

/**
 * What two suggestions share that begin with the same word: that word, without marks and case, and whether it begins a
 * word or continues the one before the caret.
 * @param {string} text
 */
export function firstWordKey(text) {
  const words = Array.from(new Intl.Segmenter(undefined, { granularity: "word" }).segment(text));
  const word = words.find(({ isWordLike }) => isWordLike)?.segment.toLowerCase() ?? text.trim();
  return /^\s/.test(text) ? ` ${word}` : /^['’]\p{L}/u.test(text) ? `'${word}` : word;
}

/**
 * A suggestion to the end of its first clause, whose punctuation belongs to it, or of its first line.
 * @param {string} text
 * @returns {string}  Without white space at its end. All of the text, if it is a single clause.
 */
export function firstClause(text) {
  const sentence = firstSentence(text);
  const [clause = sentence] = sentence.match(/^\s*[^\n]*?[\p{L}\p{N}][^\n]*?(?:[!?;:…,]["”’)]*(?=\s|$)|(?=\s[—–]\s)|[；：，、]|$)/u) ?? [];
  return clause.trimEnd();
}

/**
 * A suggestion to the end of its first sentence, or of its first line.
 * @param {string} text
 * @returns {string}  Without white space at its end.
 */
export function firstSentence(text) {
  let sentence = "";
  for (const { segment } of new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(text)) {
    // Unicode's rules end a sentence after `Mr.` and `"Go!"`, whatever follows.
    const goesOn = !/\n\s*$/.test(sentence) && (ABBREVIATION.test(sentence) || /^\p{Ll}/u.test(segment));
    if (/[\p{L}\p{N}]/u.test(sentence) && !goesOn) break;
    sentence += segment;
  }
  return sentence.trimEnd();
}

/**
 * The text after the caret, as sent to the server: the rest of its line, before which a suggestion has to fit.
 * @param {string} after  Text after the caret, at least to the end of its line.
 * @returns {string}  At most `MAX_SUFFIX_CHARS` UTF-16 code units; empty if the rest of the line is blank, or only ends an
 *   emphasis, before which models know no words.
 */
export function trimSuffix(after) {
  const [line = ""] = after.split("\n", 1);
  const read = hasTextAfter(line) ? line : line.replace(EMPHASIS, "");
  const end = read.slice(0, MAX_SUFFIX_CHARS).replace(/[\ud800-\udbff]$/, ""); // do not split a surrogate pair
  return end.trim() ? end : "";
}

/**
 * Whether text follows the caret on its line: more than closing brackets, quotation marks, marks of emphasis and
 * punctuation, which many editors insert by themselves.
 * @param {string} after  Text after the caret, at least to the end of its line.
 */
export function hasTextAfter(after) {
  return !NO_TEXT.test(after.split("\n", 1)[0] ?? "");
}

/**
 * Whether a text takes the place of a space that came with a word: it begins with white space or a mark that follows words
 * without a space. A mark that opens and closes does if it closes one that is open in the paragraph; an apostrophe does after a
 * letter.
 * @param {string} before  Text before the caret, with or without the space.
 * @param {string} text  What is typed, or follows.
 */
export function replacesSpace(before, text) {
  const [mark = ""] = text;
  if (!Object.values(CLOSERS).some((closers) => closers.includes(mark))) return FOLLOWS.test(mark);
  const word = before.replace(/[^\S\n]+$/, "");
  if (/['’]/.test(mark) && /[\p{L}\p{N}]$/u.test(word)) return true;
  const { open, opened } = openMarks(word.slice(word.lastIndexOf("\n") + 1));
  return open.some((opening) => CLOSERS[opening]?.includes(mark)) || (FOLLOWS.test(mark) && !opened.has(mark));
}

/**
 * The marks that a paragraph opens: those that it does not close, and all of them.
 * @param {string} paragraph
 */
function openMarks(paragraph) {
  /** @type {string[]} */
  let open = [];
  const opened = new Set();
  for (const [, before = "", run = "", emphasis, after = ""] of paragraph.matchAll(PAIRED)) {
    const mark = emphasis ?? run;
    const isAfterWord = /[\p{L}\p{N}]/u.test(before);
    if (isAfterWord && /['’_*]/.test(mark) && /[\p{L}\p{N}]/u.test(after)) continue; // don't, snake_case
    const opening = open.findLastIndex((each) => CLOSERS[each]?.includes(mark));
    if (opening >= 0 && !(emphasis && /^\s?$/.test(before))) {
      open = open.slice(0, opening);
    } else if (!isAfterWord && mark in CLOSERS && !(emphasis && /^\s?$/.test(after)) && !(mark === "$" && /\d/.test(after))) {
      open.push(mark);
      opened.add(mark);
    }
  }
  return { open, opened };
}

/** Whether the caret is inside a word. @param {string} before @param {string} after */
export function isInsideWord(before, after) {
  return /[\p{L}\p{N}]$/u.test(before.slice(-2)) && /^['’]?[\p{L}\p{N}]/u.test(after);
}
