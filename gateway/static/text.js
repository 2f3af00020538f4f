// Pure functions on text: the part of a document that is sent to the server, and the next word of a suggestion.

/** The server reads only the last few hundred tokens of a document, so the client does not send more than this. */
const MAX_CONTEXT_CHARS = 8192;

/** The server reads only the first words of the text after the caret. */
const MAX_SUFFIX_CHARS = 200;

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
 * The text after the caret, as sent to the server: the rest of its line, before which a suggestion has to fit.
 * @param {string} after  Text after the caret, at least to the end of its line.
 * @returns {string}  At most `MAX_SUFFIX_CHARS` UTF-16 code units; empty if the rest of the line is blank.
 */
export function trimSuffix(after) {
  const [line = ""] = after.split("\n", 1);
  const end = line.slice(0, MAX_SUFFIX_CHARS).replace(/[\ud800-\udbff]$/, ""); // do not split a surrogate pair
  return end.trim() ? end : "";
}

/** Whether the caret is inside a word. @param {string} before @param {string} after */
export function isInsideWord(before, after) {
  return /[\p{L}\p{N}]$/u.test(before.slice(-2)) && leadingWord(after) !== "";
}

/** The word that a text begins with; empty: none. @param {string} text */
function leadingWord(text) {
  return text.match(/^[\p{L}\p{N}'’]+/u)?.[0] ?? "";
}
