// The Documents popover: lists the documents, and opens, creates, deletes, imports and downloads them. The current one
// is named on the button that opens it. It does not know how documents are stored, nor the server.

import { counted, createElement, setText } from "./dom.js";
import { createDocument, titleOf } from "./documents.js";
import {
  acceptDroppedFiles, canSaveToDisk, downloadText, FileProblem, fileText, pickFile, readTextFile, writeTextFile,
} from "./text_files.js";

/** @typedef {import("./documents.js").TextDocument} TextDocument */

export class DocumentsPopover {
  #page;
  #list;
  /** Files on disk that documents were saved to, by the documents' ids. @type {Map<string, FileSystemFileHandle>} */
  #files = new Map();

  /**
   * @param {object} page
   * @param {HTMLElement} page.popover
   * @param {HTMLElement} page.button  Opens the popover; shows the current document's title.
   * @param {import("./text_editor.js").TextEditor} page.editor
   * @param {import("./documents.js").Documents} page.documents
   * @param {import("./open_document.js").OpenDocument} page.openDocument
   * @param {import("./notice.js").Notice} page.notice
   * @param {() => void} page.clear  Clears the current document.
   */
  constructor(page) {
    this.#page = page;
    this.#list = /** @type {HTMLUListElement} */ (page.popover.querySelector("ul"));
    this.#addListeners();
  }

  /** Show the title of the current document, and the list if it is open. */
  show() {
    const title = titleOf(this.#page.openDocument.document);
    setText(/** @type {HTMLElement} */ (this.#page.button.querySelector("span")), title);
    this.#page.button.ariaLabel = `Documents: ${title}`;
    setText(/** @type {HTMLElement} */ (document.querySelector("title")), `${title} – Tercet`);
    if (this.#page.popover.matches(":popover-open")) this.#renderList();
  }

  /** Download the current document. @param {"md"|"txt"} extension */
  download(extension) {
    downloadText(this.#fileText, titleOf(this.#page.openDocument.document), extension);
  }

  /** The current text, as it is saved to a file. */
  get #fileText() {
    return fileText(this.#page.editor.text, this.#page.openDocument.document.original);
  }

  /** Save the current document to a file on disk: the one that it was saved to before, or one that the writer picks. */
  async saveToDisk() {
    if (!canSaveToDisk()) {
      this.download("md");
      return;
    }
    this.#page.openDocument.save(); // its first line is its title
    const { document } = this.#page.openDocument;
    try {
      const file = this.#files.get(document.id) ?? (await pickFile(titleOf(document)));
      if (!file) return;
      await writeTextFile(file, this.#fileText);
      this.#files.set(document.id, file);
      this.#page.notice.show(`Saved to “${file.name}”.`);
    } catch (error) {
      if (!(error instanceof FileProblem)) throw error;
      this.#page.notice.show(error.message);
    }
  }

  #addListeners() {
    const file = /** @type {HTMLInputElement} */ (this.#page.popover.querySelector("input[type=file]"));
    file.addEventListener("change", () => {
      void this.#openFiles(Array.from(file.files ?? []));
      file.value = ""; // the same file may be picked again
    });
    acceptDroppedFiles((files) => this.#openFiles(files));
    this.#page.popover.addEventListener("beforetoggle", (event) => {
      if (event.newState !== "open") return;
      this.#page.openDocument.save();
      this.#renderList();
      void this.#page.documents.refresh();
    });
    this.#page.popover.addEventListener("click", ({ target }) => {
      const button = target instanceof Element ? target.closest("button") : null;
      const id = button?.closest("li")?.dataset.id;
      if (button?.value === "new") this.#open(createDocument(""));
      else if (button?.value === "pick") file.click();
      else if (button?.value === "md" || button?.value === "txt") this.download(button.value);
      else if (button?.value === "disk") void this.saveToDisk();
      else if (button?.value === "clear") {
        this.#page.popover.hidePopover();
        this.#page.clear();
      } else if (button?.value === "delete" && id) this.#delete(id);
      else if (button?.value === "open" && id) this.#openById(id);
    });
  }

  /** @param {string} id */
  #openById(id) {
    const document = this.#page.documents.read(id);
    if (document) this.#open(document);
    else this.#renderList(); // another window has deleted it
  }

  /** @param {TextDocument} document */
  #open(document) {
    this.#page.openDocument.open(document);
    this.#page.popover.hidePopover();
    this.#page.editor.focus();
    this.#page.editor.showCaret();
  }

  /** @param {string} id */
  #delete(id) {
    this.#page.openDocument.save();
    const { document: current } = this.#page.openDocument;
    const document = id === current.id ? current : this.#page.documents.read(id);
    if (!document) return;
    const wasCurrent = document === current;
    const next = this.#page.documents.list().find((other) => other.id !== id) ?? createDocument("");
    if (wasCurrent) this.#page.openDocument.open(next);
    this.#page.documents.remove(id);
    this.#renderList();
    /** @type {HTMLElement} */ (this.#page.popover.querySelector("button")).focus(); // the focused button is gone
    this.#page.notice.show(`Deleted “${titleOf(document)}”.`, () => {
      this.#page.documents.write(document);
      if (wasCurrent) this.#open(document);
      else this.show();
    });
  }

  /** Open each file as a new document. @param {File[]} files */
  async #openFiles(files) {
    this.#page.openDocument.save();
    for (const file of files) {
      try {
        const document = createDocument(await readTextFile(file));
        this.#page.documents.write(document);
        this.#open(document);
      } catch (error) {
        if (!(error instanceof FileProblem)) throw error;
        this.#page.notice.show(error.message);
      }
    }
  }

  #renderList() {
    const current = this.#page.openDocument.document; // a new one is not stored yet
    const others = this.#page.documents.list().filter(({ id, text }) => text && id !== current.id);
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
  const words = counted(numWords(document.text), "word");
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
