// Pure functions on text: the part of a document that is sent to the server, the next word of a suggestion, and what of
// a suggestion fits before the text that follows it.

/** The server reads only the last few hundred tokens of a document, so the client does not send more than this. */
const MAX_CONTEXT_CHARS = 8192;

/**
 * The start of a trimmed context is a multiple of this. It moves rarely while the writer types at the end, so that
 * consecutive requests share a prefix and the server's prefix cache hits.
 */
const TRIM_STEP_CHARS = 4096;

/**
 * The end of a document, as sent to the server.
 * @param {string} text  Everything before the caret.
 * @returns {string}  All of a short text; of a long text at least `MAX_CONTEXT_CHARS` and less than
 *   `MAX_CONTEXT_CHARS + TRIM_STEP_CHARS` UTF-16 code units.
 */
export function trimContext(text) {
  let start = Math.max(0, Math.floor((text.length - MAX_CONTEXT_CHARS) / TRIM_STEP_CHARS) * TRIM_STEP_CHARS);
  if (/[\udc00-\udfff]/.test(text[start] ?? "")) start += 1; // do not split a surrogate pair
  return text.slice(start);
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
 * What of a suggestion fits between the text before the caret and the text after it on the same line. Inside a word,
 * the part of its first word before the rest of the word: "erful" fits into "wond|ful" as "er". Before other text, the
 * words up to where it meets the next word, or up to the end of the sentence.
 * @param {string} text  A suggestion for what follows `before`.
 * @param {string} before  Everything before the caret.
 * @param {string} after  Text after the caret, at least to the end of its line.
 * @param {boolean} isFinished  The suggestion is complete; false: its last word may still grow.
 * @returns {string}  All of the text if nothing follows on the line; empty if nothing fits.
 */
export function fitBefore(text, before, after, isFinished) {
  const line = after.split("\n", 1)[0] ?? "";
  if (!line.trim()) return text;
  if (isInsideWord(before, after)) {
    const word = leadingWord(text);
    const restOfWord = leadingWord(line);
    if (!isFinished && word.length === text.length) return "";
    return word.endsWith(restOfWord) ? word.slice(0, word.length - restOfWord.length) : "";
  }
  const nextWord = leadingWord(line.trimStart());
  // The full stop of a sentence stays only before another sentence.
  const isBeforeSentence = /^\p{Lu}/u.test(nextWord);
  const sentence = text.match(isBeforeSentence ? /^[^.!?\n]*[.!?]*/ : /^[^.!?\n]*/)?.[0] ?? "";
  const words = sentence.matchAll(/[\p{L}\p{N}'’]+/gu);
  for (const { 0: word, index } of words) {
    if (word === nextWord) return sentence.slice(0, index).trimEnd();
  }
  return sentence.trimEnd();
}

/** Whether the caret is inside a word. @param {string} before @param {string} after */
export function isInsideWord(before, after) {
  return /[\p{L}\p{N}]$/u.test(before.slice(-2)) && leadingWord(after) !== "";
}

/** The word that a text begins with; empty: none. @param {string} text */
function leadingWord(text) {
  return text.match(/^[\p{L}\p{N}'’]+/u)?.[0] ?? "";
}
