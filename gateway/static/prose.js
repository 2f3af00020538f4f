// Where a text in Markdown is prose: neither code, nor front matter, nor mathematics. It does not know editors or the server.

/** What a line may begin with inside block quotes and list items. */
const CONTAINERS = String.raw`^(?:[ \t]*(?:>|[-*+](?=\s)|\d{1,9}[.)](?=\s)))*[ \t]*`;
const IS_QUOTED = /^[ \t]*>/;

/** A line that opens a block of code or mathematics. */
const OPENS_BLOCK = new RegExp(`${CONTAINERS}(?:(\`{3,})[^\`]*|(~{3,}).*|(\\$\\$|\\\\\\[)\\s*)$`, "s");
const OPENS_FRONT_MATTER = /^\ufeff?(---|\+\+\+)\s*$/;
/** @type {Record<string, RegExp>} */
const ENDS = {
  "---": /^(?:---|\.\.\.)\s*$/, "+++": /^\+\+\+\s*$/, "$$": /\$\$/, "\\[": /\\\]/,
};

/** Blank lines, list items, quotes and headings: a paragraph, and what is open in it, does not go on there. */
const BEGINS_PARAGRAPH = /^\s*(?:$|(?:[-*+>]|\d{1,9}[.)]|#{1,6})\s)/;

/** What opens code or mathematics in a paragraph; escaped characters open nothing. */
const OPENS_SPAN = /`+|\$\$|\$(?=[^\s\d$])|\\[^]/g;
/** @type {Record<string, RegExp>} */
const SPAN_ENDS = { "$$": /\$\$/g, "$": /(?<=[^\s\\])\$(?!\d)|\n/g, "\\(": /\\\)/g, "\\[": /\\\]/g };

/** Of a longer paragraph, its end is read. */
const MAX_PARAGRAPH_CHARS = 20_000;

/** How much of the text that was read before is compared, to see that it is still there. */
const NUM_COMPARED_CHARS = 256;

/**
 * Whether a caret is in prose.
 * @param {string} before  All of the document before the caret.
 */
export function isProse(before) {
  return new ProseDetector().isProse(before.length, (from, to) => before.slice(from, to));
}

/** `isProse` for one document that is being written. After a key it reads only the last lines. */
export class ProseDetector {
  /** What was read: whole lines, to here. */
  #end = 0;
  /** Their last characters. */
  #tail = "";
  /** What they end in. @type {{ends: RegExp, isQuoted: boolean, ruleAt: number}|null} */
  #block = null;
  /** Where their last paragraph begins. */
  #paragraphAt = 0;

  /**
   * @param {number} caret  Its position in the document, in UTF-16 code units.
   * @param {(from: number, to: number) => string} slice  Returns text of the document.
   * @returns {boolean}
   */
  isProse(caret, slice) {
    const isSame = caret >= this.#end && slice(this.#end - this.#tail.length, this.#end) === this.#tail;
    if (!isSame) {
      this.#end = this.#paragraphAt = 0;
      this.#block = null;
    }
    const text = slice(this.#end, caret);
    let at = 0;
    for (let next = text.indexOf("\n") + 1; next; next = text.indexOf("\n", at) + 1) {
      this.#read(text.slice(at, next), this.#end + at);
      at = next;
    }
    this.#end += at;
    this.#tail = slice(Math.max(0, this.#end - NUM_COMPARED_CHARS), this.#end);
    const line = text.slice(at);
    if (this.#block && !isQuoteLeft(this.#block, line)) return false;
    if (OPENS_BLOCK.test(line) || (this.#end === 0 && OPENS_FRONT_MATTER.test(line))) return false;
    const start = this.#block || BEGINS_PARAGRAPH.test(line) ? this.#end : this.#paragraphAt;
    return !endsInSpan(slice(Math.max(start, caret - MAX_PARAGRAPH_CHARS), caret));
  }

  /** @param {string} line  @param {number} start  Its position. */
  #read(line, start) {
    if (this.#block) {
      const isEnd = this.#block.ends.test(line) || (start === this.#block.ruleAt && !line.trim());
      if (!isEnd && !isQuoteLeft(this.#block, line)) return;
      this.#block = null;
      this.#paragraphAt = isEnd ? start + line.length : start;
      if (isEnd) return;
    }
    const mark = (start === 0 && line.match(OPENS_FRONT_MATTER)?.[1]) || line.match(OPENS_BLOCK)?.slice(1).find(Boolean);
    if (mark) {
      const ends = ENDS[mark] ?? new RegExp(`^[ \\t>]*${mark[0]}{${mark.length},}\\s*$`);
      // Before a blank line, --- is a rule, and no front matter (Pandoc).
      this.#block = { ends, isQuoted: IS_QUOTED.test(line), ruleAt: mark === "---" ? line.length : -1 };
    } else if (BEGINS_PARAGRAPH.test(line)) this.#paragraphAt = start;
  }
}

/** Whether a line is no longer in the quote that a block is in. @param {{isQuoted: boolean}} block @param {string} line */
function isQuoteLeft({ isQuoted }, line) {
  return isQuoted && !IS_QUOTED.test(line);
}

/** Whether a paragraph ends in code or mathematics. @param {string} paragraph */
function endsInSpan(paragraph) {
  const opens = new RegExp(OPENS_SPAN);
  for (let match = opens.exec(paragraph); match; match = opens.exec(paragraph)) {
    const [mark] = match;
    const ends = mark[0] === "`" ? new RegExp(`(?<!\`)${mark}(?!\`)`, "g") : SPAN_ENDS[mark];
    if (!ends) continue;
    ends.lastIndex = opens.lastIndex;
    if (!ends.test(paragraph)) return true;
    opens.lastIndex = ends.lastIndex;
  }
  return false;
}
