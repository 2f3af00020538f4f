// Pure functions on text: the part of a document that is sent to the server, and the next word of a suggestion.

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
