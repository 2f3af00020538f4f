// Keys: which chord does what, how a chord is named, and which chords a writer may choose. It does not know suggestions,
// the page or the browser's storage.

/**
 * @typedef {"accept"|"acceptWord"|"acceptClause"|"acceptSentence"|"accept1"|"accept2"|"accept3"|"next"|"previous"
 *   |"request"|"dismiss"} Action
 * @typedef {string} Chord  A key with its modifiers, as `chordOf` names it: `Tab`, `Alt+ArrowRight`, `Ctrl+Alt+J`.
 * @typedef {Record<Action, Chord[]>} Keys  The chords of each action; the first is the one that is shown.
 */

const IS_MAC = /^(?:Mac|iP)/.test(globalThis.navigator?.platform ?? "");

/**
 * A word has two chords: Alt+→, and what moves the caret by a word, which is Ctrl+→, but Alt+→ on a Mac, where Ctrl+→ shows
 * all windows. No browser, screen reader or editor of prose has Alt+End or Alt+Page Down in a text field. Alt+Shift+→
 * selects words on a Mac, syntax in CodeMirror and VS Code, moves through tables in Orca and lowers headings in Word, and
 * Alt+Shift switches the layout on many Linux systems.
 * @type {Keys}
 */
export const DEFAULT_KEYS = {
  accept: ["Tab"], acceptWord: IS_MAC ? ["Alt+ArrowRight"] : ["Alt+ArrowRight", "Ctrl+ArrowRight"],
  acceptClause: ["Alt+End"], acceptSentence: ["Alt+PageDown"],
  accept1: ["Alt+1"], accept2: ["Alt+2"], accept3: ["Alt+3"], next: ["Alt+ArrowDown"], previous: ["Alt+ArrowUp"],
  request: ["Alt+Enter", "Ctrl+Space"], dismiss: ["Escape"],
};

export const ACTIONS = /** @type {Action[]} */ (Object.keys(DEFAULT_KEYS));

/** The name of a key that types nothing, such as `Enter`. A dead key types, together with the next key. */
const NAMED_KEY = /^(?!Dead$)[A-Z][A-Za-z0-9]+$/;

/** Chords of editors, browsers and systems. Ctrl+→, which only moves the caret, is not among them. */
const WITH_CTRL = /^(?:Ctrl|Meta)\+(?:Shift\+.*|[!-~]|Tab|F\d+|Backspace|Delete|Insert|Home|End|Page.*|Arrow(?!Right).*)$/;
const WITH_ALT = /^Alt\+(?:Tab|Space|F4|[DEF]|Backspace|Delete|Home|ArrowLeft)$/;

/** @type {Record<string, string>} */
const LABELS = { ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc", PageDown: "Page Down", Meta: "Cmd" };

/**
 * The name of a chord. With Alt it goes by the physical key, because `key` depends on layout and system then; if `key` is
 * a character, as Option types on a Mac, the writer means that, unless it is a letter from A to Z or the digit of its key.
 * @param {KeyboardEvent} event
 * @returns {Chord}  Empty: the chord types a character.
 */
export function chordOf({ key, code, altKey, ctrlKey, metaKey, shiftKey }) {
  const printed = code.replace(/^(?:Digit|Key)/, "");
  let name = !altKey || key === printed ? key : "";
  if (NAMED_KEY.test(key)) name = altKey ? printed : key;
  else if (code === "Space" && !altKey) name = code;
  else if (/^[a-z]$/i.test(key)) name = key.toUpperCase();
  const modifiers = [ctrlKey && "Ctrl", altKey && "Alt", shiftKey && "Shift", metaKey && "Meta"].filter(Boolean);
  return name && [...modifiers, name].join("+");
}

/** @param {Chord} [chord]  @returns {string}  What a reader calls it; empty: there is none. */
export function labelOf(chord = "") {
  return chord.split("+").map((name) => LABELS[name] ?? name).join(" ");
}

/** Why a writer cannot choose a chord. @param {Chord} chord  @returns {string}  Empty: they can. */
export function refusalOf(chord) {
  if (!chord) return "This types a character.";
  const isTexts = !/^(?:Ctrl|Alt|Meta)\+|^(?:Tab|Escape|F[2489])$/.test(chord);
  if (isTexts) return `${labelOf(chord)} without Ctrl or Alt is the text's or the browser's.`;
  const isTaken = WITH_CTRL.test(chord) || WITH_ALT.test(chord) || (chord.includes("Meta+") && !IS_MAC);
  return isTaken ? `${labelOf(chord)} is the editor's, the browser's or the system's.` : "";
}

/**
 * All keys, with a writer's own in place of the default ones.
 * @param {Partial<Keys>} own
 * @param {"all"|"word"} tabTakes
 * @returns {Keys}
 */
export function resolveKeys(own, tabTakes) {
  const keys = { ...DEFAULT_KEYS, ...own };
  if (tabTakes === "all") return keys;
  for (const action of ACTIONS) keys[action] = keys[action].filter((chord) => chord !== "Tab");
  keys.acceptWord.unshift("Tab");
  return keys;
}

/** The keys as a line below a list of suggestions. @param {Keys} keys */
export function describeKeys({ accept, acceptWord, next, dismiss }) {
  const parts = [[accept, "accepts"], [acceptWord, "a word"], [next, "the next"], [dismiss, "dismisses"]];
  return parts.flatMap(([[chord], what]) => (chord ? `${labelOf(chord)} ${what}` : [])).join(" · ");
}
