// Commands for Markdown in CodeMirror: Enter continues lists and quotations, and a key sets emphasis. They know CodeMirror's
// state; they do not know suggestions or the page.

import { parser } from "@lezer/markdown";
import { isProse } from "./prose.js";

/** @typedef {import("@codemirror/state").EditorState} EditorState */
/** @typedef {import("@codemirror/view").EditorView} EditorView */
/** @typedef {{from: number, to: number}} Range */

/** The beginning of a list item: what is before its marker, the marker, white space, a task's box. Or that of a quotation. */
const MARKUP = /^((?:[ \t]*>)*[ \t]*)(?:([-+*])|(\d{1,9})([.)]))([ \t]+)(\[[ xX]\](?:[ \t]+|$))?|^(?:[ \t]*>)+[ \t]*/;
const RULE = /^[ \t>]*([-*])(?:[ \t]*\1){2,}[ \t]*$/;
const WORD = /[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}\p{N}]+)*/gu;

/**
 * Begin the next item of a list, or line of a quotation, if the caret is in one. An empty item ends its list.
 * @param {EditorView} view
 */
export function continueMarkup({ state, dispatch }) {
  const { head, empty } = state.selection.main;
  const line = state.doc.lineAt(head);
  const found = line.text.match(MARKUP);
  if (state.readOnly || !empty || !found || head < line.from + found[0].length || RULE.test(line.text)) return false;
  if (!isProse(state.sliceDoc(0, line.from))) return false;
  const isEmpty = line.text.trim() === found[0].trim();
  const insert = isEmpty ? outerMarkup(state, line.number, found) : state.lineBreak + nextMarkup(found);
  const from = isEmpty ? line.from : head;
  const to = isEmpty ? line.to : line.to - line.text.slice(head - line.from).trimStart().length;
  const selection = { anchor: from + insert.length };
  dispatch(state.update({ changes: { from, to, insert }, selection, scrollIntoView: true, userEvent: "input" }));
  return true;
}

/** The markup of the line after one. @param {RegExpMatchArray} found  The markup of that one. */
function nextMarkup([quotation, before, bullet, number, delimiter, space, box]) {
  if (!space) return `${quotation.trimEnd()} `;
  return `${before}${bullet ?? `${Number(number) + 1}${delimiter}`}${space}${box ? "[ ] " : ""}`;
}

/** What takes the place of an empty item or line. @param {EditorState} state  @param {number} at  @param {RegExpMatchArray} found */
function outerMarkup({ doc }, at, [quotation, before]) {
  if (before === undefined) return quotation.replace(/>[ \t]*$/, "");
  for (let outer = null, number = at - 1; number > 0; number -= 1) {
    outer = doc.line(number).text.match(MARKUP);
    if (!outer?.[5]) break;
    if (outer[1].length < before.length) return nextMarkup(outer);
  }
  return before.includes(">") ? before : "";
}

/** A command that sets or removes emphasis: of the selection, line by line, or of the word at the caret. @param {"*"|"**"} mark */
export function toggleEmphasis(mark) {
  return (/** @type {EditorView} */ { state, dispatch }) => {
    const { from, to, empty } = state.selection.main;
    const ranges = empty ? [wordAt(state, from)] : linesOf(state, from, to);
    const found = ranges.map((range) => emphasisAt(state, range, mark));
    const isSet = found.every(({ isWhole }) => isWhole);
    const changes = state.changes(found.filter(({ isWhole }) => isSet || !isWhole).flatMap(({ start, end, marks }) => [
      ...marks, ...(isSet ? [] : [{ from: start, insert: mark }, { from: end, insert: mark }]),
    ]));
    // The caret and the selection stay inside the marks.
    const [start, end] = [ranges[0]?.from ?? from, ranges.at(-1)?.to ?? to];
    const caret = start === end && !isSet ? from + mark.length : changes.mapPos(from, start < from && from === end ? -1 : 1);
    const anchor = empty ? caret : changes.mapPos(start, 1);
    const head = empty ? caret : changes.mapPos(end, -1);
    if (!state.readOnly) dispatch(state.update({ changes, selection: { anchor, head }, userEvent: "format" }));
    return true;
  };
}

/** The word at a position; none: an empty range. @param {EditorState} state  @param {number} at  @returns {Range} */
function wordAt({ doc }, at) {
  const line = doc.lineAt(at);
  const words = Array.from(line.text.matchAll(WORD), ({ index, 0: { length } }) => ({ from: line.from + index, to: line.from + index + length }));
  return words.find(({ from, to }) => from <= at && at <= to) ?? { from: at, to: at };
}

/** The text of each line, without markup. @param {EditorState} state  @param {number} from  @param {number} to  @returns {Range[]} */
function linesOf({ doc }, from, to) {
  const ranges = [];
  for (let { number } = doc.lineAt(from); number <= doc.lineAt(to).number; number += 1) {
    const line = doc.line(number);
    const marked = line.text.replace(MARKUP, "").replace(/^ {0,3}#{1,6}[ \t]+/, "");
    const start = Math.max(from, line.to - marked.length);
    const text = doc.sliceString(start, Math.max(start, Math.min(to, line.to)));
    const end = start + text.trimEnd().length;
    if (text.trim()) ranges.push({ from: end - text.trim().length, to: end });
  }
  return ranges;
}

/** The emphasis that a range is in or has in it. @param {EditorState} state  @param {Range} range  @param {"*"|"**"} mark */
function emphasisAt({ doc }, range, { length }) {
  const line = doc.lineAt(range.from);
  const text = line.text.trimStart(); // what is indented would be code
  const begin = line.to - text.length;
  const found = { isWhole: false, start: range.from, end: range.to, marks: /** @type {Range[]} */ ([]) };
  /** @param {number} from  @param {number} to */
  const add = (from, to) => {
    found.isWhole ||= from <= range.from && range.to <= to;
    [found.start, found.end] = [Math.min(found.start, from), Math.max(found.end, to)];
    found.marks.push({ from, to: from + length }, { from: to - length, to });
  };
  parser.parse(text).iterate({
    enter({ name, from, to }) {
      const isAt = begin + from < range.to && range.from < begin + to;
      if (isAt && name === (length === 1 ? "Emphasis" : "StrongEmphasis")) add(begin + from, begin + to);
    },
  });
  const [before = ""] = doc.sliceString(line.from, range.from).match(/\*+$/) ?? [];
  const [after = ""] = doc.sliceString(range.to, line.to).match(/^\*+/) ?? [];
  const num = range.from === range.to && !found.marks.length ? Math.min(before.length, after.length) : 0; // around nothing
  if (length === 1 ? num % 2 : num >= 2) add(range.from - length, range.to + length);
  return found;
}
