// Text files in and out: reads files that the writer picked or dropped, and downloads a text. It does not know
// documents.

const MAX_FILE_BYTES = 5_000_000;
const CONTENT_TYPES = { md: "text/markdown", txt: "text/plain" };

/** A file that cannot be opened; the message says why, to the writer. */
export class FileProblem extends Error {}

/**
 * The text of a file, without a byte order mark and with `\n` as line break.
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
  return text.replace(/\r\n?/g, "\n");
}

/** @param {ArrayBuffer} bytes  @returns {string|null}  Null if they are not UTF-8 text. */
function decode(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); // drops a byte order mark
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
