// Text files in and out: reads files that the writer picked or dropped, and downloads a text. It does not know
// documents.

const MAX_FILE_BYTES = 5_000_000;
const CONTENT_TYPES = { md: "text/markdown", txt: "text/plain" };

/** A file that cannot be opened; the message says why, to the writer. */
export class FileProblem extends Error {}

/**
 * All text of a file, also its byte order mark and line ends.
 * @param {File} file
 * @returns {Promise<string>}
 * @throws {FileProblem} If the file is too large, cannot be read, or is not UTF-8 text.
 */
export async function readTextFile(file) {
  if (file.size > MAX_FILE_BYTES) throw new FileProblem(`“${file.name}” is larger than 5 MB.`);
  const bytes = await file.arrayBuffer().catch(() => {
    throw new FileProblem(`“${file.name}” cannot be read.`); // a folder, or it was removed
  });
  const text = decode(bytes);
  if (text === null) throw new FileProblem(`“${file.name}” is not a text file (UTF-8).`);
  return text;
}

/** The text of a file as it is edited: without a byte order mark and with `\n` as line break. @param {string} original */
export function plainText(original) {
  return original.replace(/^\ufeff/, "").replace(/\r\n?/g, "\n");
}

/**
 * An edited text as it is saved: what was not edited is as it was in the file, and new lines end as most lines do there.
 * @param {string} text
 * @param {string} [original]  All text of the file that it was opened from. Default: none.
 */
export function fileText(text, original = "") {
  const ends = original.match(/\r\n?|\n/g) ?? [];
  const count = (/** @type {string} */ end) => ends.filter((each) => each === end).length;
  const [usual = ""] = ["\n", "\r\n", "\r"].sort((one, other) => count(other) - count(one));
  const mark = original.startsWith("\ufeff") ? "\ufeff" : "";
  if (count(usual) === ends.length) return mark + text.replaceAll("\n", usual);
  return mark + withEnds(text, plainText(original), ends, usual);
}

/**
 * A text with the line ends of an earlier version of it.
 * @param {string} text  With `\n` as line break.
 * @param {string} old  The earlier version, likewise.
 * @param {string[]} ends  Of the lines of `old`.
 * @param {string} usual  The end of new lines.
 * @returns {string}
 */
function withEnds(text, old, ends, usual) {
  const length = Math.min(text.length, old.length);
  let start = 0;
  while (start < length && text[start] === old[start]) start += 1;
  let end = 0;
  while (end < length - start && text.at(-1 - end) === old.at(-1 - end)) end += 1;
  const put = (/** @type {string} */ part, /** @type {string[]} */ own) => part.replace(/\n/g, () => own.shift() ?? usual);
  const before = put(text.slice(0, start), ends); // takes them from `ends`
  const same = text.slice(text.length - end);
  const after = put(same, ends.splice(ends.length + 1 - same.split("\n").length));
  const lines = text.slice(start, text.length - end).split("\n");
  const oldLines = old.slice(start, old.length - end).split("\n");
  const known = new Set(oldLines);
  const at = lines.findIndex((line) => line.trim() && known.has(line)); // between two edits
  if (at < 0) return before + put(lines.join("\n"), lines.length === oldLines.length ? ends : []) + after;
  const oldAt = oldLines.indexOf(lines[at] ?? "");
  const above = withEnds(joined(lines.splice(0, at)), joined(oldLines.splice(0, oldAt)), ends.splice(0, oldAt), usual);
  return before + above + withEnds(lines.join("\n"), oldLines.join("\n"), ends, usual) + after;
}

/** @param {string[]} lines */
function joined(lines) {
  return lines.map((line) => `${line}\n`).join("");
}

/** @param {ArrayBuffer} bytes  @returns {string|null}  Null if they are not UTF-8 text. */
function decode(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes); // keeps a byte order mark
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/**
 * Download a text as a UTF-8 file.
 * @param {string} text
 * @param {string} title  Becomes the file's name.
 * @param {"md"|"txt"} extension
 */
export function downloadText(text, title, extension) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: `${CONTENT_TYPES[extension]}; charset=utf-8` }));
  link.download = fileName(title, extension);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the download reads it later
}

/** Whether the browser can write to a file that the writer picks: Chromium, in secure contexts. */
export function canSaveToDisk() {
  return "showSaveFilePicker" in globalThis;
}

/**
 * Let the writer pick a file to save to.
 * @param {string} title  Of the document.
 * @returns {Promise<FileSystemFileHandle|null>}  Null: the writer picked none.
 */
export async function pickFile(title) {
  const types = [{ description: "Text", accept: { "text/markdown": [".md"], "text/plain": [".txt"] } }];
  try {
    return await /** @type {any} */ (globalThis).showSaveFilePicker({ suggestedName: fileName(title, "md"), types });
  } catch {
    return null;
  }
}

/**
 * @param {FileSystemFileHandle} file
 * @param {string} text
 * @throws {FileProblem} If the file cannot be written.
 */
export async function writeTextFile(file, text) {
  try {
    const writable = await file.createWritable();
    await writable.write(text);
    await writable.close();
  } catch {
    throw new FileProblem(`“${file.name}” cannot be written.`); // no space or permission, or it was removed
  }
}

/**
 * @param {string} title
 * @param {string} extension
 * @returns {string}  Without the characters that file systems refuse.
 */
function fileName(title, extension) {
  const name = title.replace(/[\s\p{Cc}"*/:<>?\\|]+/gu, " ").replace(/^[.\s]+|[.\s]+$/g, "");
  return `${name || "Untitled"}.${extension}`;
}

/**
 * Call a function with files that are dropped anywhere on the page. Dragged text is left to the browser.
 * @param {(files: File[]) => void} onFiles
 */
export function acceptDroppedFiles(onFiles) {
  addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // the browser would leave the page and open the file
    onFiles(Array.from(event.dataTransfer?.files ?? []));
  });
}

/** @param {DragEvent} event */
function hasFiles(event) {
  return event.dataTransfer?.types.includes("Files") ?? false;
}
