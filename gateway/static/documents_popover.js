// The Documents popover: lists the documents, and opens, creates, deletes, imports and downloads them. The current one
// is named on the button that opens it. It does not know how documents are stored, nor the server.

import { createElement, setText } from "./dom.js";
import { createDocument, titleOf } from "./documents.js";
import {
  acceptDroppedFiles, canSaveToDisk, downloadText, FileProblem, fileText, pickFile, readTextFile, writeTextFile,
} from "./text_files.js";

/** @typedef {import("./documents.js").TextDocument} TextDocument */

export class DocumentsPopover {
  #popover;
  #button;
  #list;
  #documents;
  #openDocument;
  #editor;
  #notice;
  #clear;
  /** Files on disk that documents were saved to, by the documents' ids. @type {Map<string, FileSystemFileHandle>} */
  #files = new Map();

  /**
   * @param {object} options
   * @param {HTMLElement} options.popover
   * @param {HTMLElement} options.button  Opens the popover; shows the current document's title.
   * @param {import("./text_editor.js").TextEditor} options.editor
   * @param {import("./documents.js").Documents} options.documents
   * @param {import("./open_document.js").OpenDocument} options.openDocument
   * @param {import("./notice.js").Notice} options.notice
   * @param {() => void} options.clear  Clears the current document.
   */
  constructor({ popover, button, editor, documents, openDocument, notice, clear }) {
    this.#popover = popover;
    this.#button = button;
    this.#list = /** @type {HTMLUListElement} */ (popover.querySelector("ul"));
    this.#editor = editor;
    this.#documents = documents;
    this.#openDocument = openDocument;
    this.#notice = notice;
    this.#clear = clear;
    this.#addListeners();
  }

  /** Show the title of the current document, and the list if it is open. */
  show() {
    const title = titleOf(this.#openDocument.document);
    setText(/** @type {HTMLElement} */ (this.#button.querySelector("span")), title);
    this.#button.ariaLabel = `Documents: ${title}`;
    setText(/** @type {HTMLElement} */ (document.querySelector("title")), `${title} – Tercet`);
    if (this.#popover.matches(":popover-open")) this.#renderList();
  }

  /** Download the current document. @param {"md"|"txt"} extension */
  download(extension) {
    downloadText(this.#fileText, titleOf(this.#openDocument.document), extension);
  }

  /** The current text, as it is saved to a file. */
  get #fileText() {
    return fileText(this.#editor.text, this.#openDocument.document.original);
  }

  /** Save the current document to a file on disk: the one that it was saved to before, or one that the writer picks. */
  async saveToDisk() {
    if (!canSaveToDisk()) {
      this.download("md");
      return;
    }
    this.#openDocument.save(); // its first line is its title
    const { document } = this.#openDocument;
    try {
      const file = this.#files.get(document.id) ?? (await pickFile(titleOf(document)));
      if (!file) return;
      await writeTextFile(file, this.#fileText);
      this.#files.set(document.id, file);
      this.#notice.show(`Saved to “${file.name}”.`);
    } catch (error) {
      if (!(error instanceof FileProblem)) throw error;
      this.#notice.show(error.message);
    }
  }

  #addListeners() {
    const file = /** @type {HTMLInputElement} */ (this.#popover.querySelector("input[type=file]"));
    file.addEventListener("change", () => {
      void this.#openFiles(Array.from(file.files ?? []));
      file.value = ""; // the same file may be picked again
    });
    acceptDroppedFiles((files) => this.#openFiles(files));
    this.#popover.addEventListener("beforetoggle", (event) => {
      if (event.newState !== "open") return;
      this.#openDocument.save();
      this.#renderList();
      void this.#documents.refresh();
    });
    this.#popover.addEventListener("click", ({ target }) => {
      const button = target instanceof Element ? target.closest("button") : null;
      const id = button?.closest("li")?.dataset.id;
      if (button?.value === "new") this.#open(createDocument(""));
      else if (button?.value === "pick") file.click();
      else if (button?.value === "md" || button?.value === "txt") this.download(button.value);
      else if (button?.value === "disk") void this.saveToDisk();
      else if (button?.value === "clear") {
        this.#popover.hidePopover();
        this.#clear();
      } else if (button?.value === "delete" && id) this.#delete(id);
      else if (button?.value === "open" && id) this.#openById(id);
    });
  }

  /** @param {string} id */
  #openById(id) {
    const document = this.#documents.read(id);
    if (document) this.#open(document);
    else this.#renderList(); // another window has deleted it
  }

  /** @param {TextDocument} document */
  #open(document) {
    this.#openDocument.open(document);
    this.#popover.hidePopover();
    this.#editor.focus();
    this.#editor.showCaret();
  }

  /** @param {string} id */
  #delete(id) {
    this.#openDocument.save();
    const { document: current } = this.#openDocument;
    const document = id === current.id ? current : this.#documents.read(id);
    if (!document) return;
    const wasCurrent = document === current;
    const next = this.#documents.list().find((other) => other.id !== id) ?? createDocument("");
    if (wasCurrent) this.#openDocument.open(next);
    this.#documents.remove(id);
    this.#renderList();
    /** @type {HTMLElement} */ (this.#popover.querySelector("button")).focus(); // the focused button is gone
    this.#notice.show(`Deleted “${titleOf(document)}”.`, () => {
      this.#documents.write(document);
      if (wasCurrent) this.#open(document);
      else this.show();
    });
  }

  /** Open each file as a new document. @param {File[]} files */
  async #openFiles(files) {
    this.#openDocument.save();
    for (const file of files) {
      try {
        const document = createDocument(await readTextFile(file));
        this.#documents.write(document);
        this.#open(document);
      } catch (error) {
        if (!(error instanceof FileProblem)) throw error;
        this.#notice.show(error.message);
      }
    }
  }

  #renderList() {
    const current = this.#openDocument.document; // a new one is not stored yet
    const others = this.#documents.list().filter(({ id, text }) => text && id !== current.id);
    const documents = [current, ...others].sort((a, b) => b.changedMs - a.changedMs);
    const focused = /** @type {HTMLButtonElement|null} */ (this.#list.querySelector(":focus"));
    const id = focused?.closest("li")?.dataset.id;
    this.#list.replaceChildren(...documents.map((document) => renderItem(document, document === current)));
    const again = this.#list.querySelector(`[data-id="${id}"] [value="${focused?.value}"]`);
    if (again instanceof HTMLElement) again.focus();
  }
}

/** @param {TextDocument} document  @param {boolean} isCurrent  @returns {HTMLElement} */
function renderItem(document, isCurrent) {
  const title = titleOf(document);
  const item = createElement("li", "", "");
  item.dataset.id = document.id;
  const open = /** @type {HTMLButtonElement} */ (createElement("button", "title", title));
  open.type = "button";
  open.value = "open";
  if (isCurrent) open.ariaCurrent = "true";
  const number = numWords(document.text);
  const words = `${number.toLocaleString()} ${number === 1 ? "word" : "words"}`;
  open.append(createElement("span", "changed", `${formatTime(document.changedMs)}, ${words}`));
  const remove = /** @type {HTMLButtonElement} */ (createElement("button", "", "Delete"));
  remove.type = "button";
  remove.value = "delete";
  remove.ariaLabel = `Delete ${title}`;
  item.append(open, remove);
  return item;
}

/** @param {string} text */
export function numWords(text) {
  let number = 0;
  for (const words = /\S+/g; words.test(text);) number += 1; // without a list of all of them
  return number;
}

/** @param {number} timeMs  @returns {string}  The time of a change today, else its date. */
function formatTime(timeMs) {
  const time = new Date(timeMs);
  const isToday = time.toDateString() === new Date().toDateString();
  return isToday
    ? time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : time.toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}
