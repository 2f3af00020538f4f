// Inline suggestions from a Tercet server, for any editor: the module that editors import.

/** @typedef {import("./client.js").RequestFields} RequestFields */
/** @typedef {import("./client.js").Sentence} Sentence */
/** @typedef {import("./completer.js").Mode} Mode */
/** @typedef {import("./completer.js").View} View */
/** @typedef {import("./shown_suggestions.js").Suggestion} Suggestion */

export { Client, Problem } from "./client.js";
export { Completer, MIN_PROBABILITIES } from "./completer.js";
export { isProse, ProseDetector } from "./prose.js";
export { hasTextAfter, isInsideWord, replacesSpace, trimContext, trimSuffix } from "./text.js";
export { attachTextarea, insertText, textBefore } from "./textarea.js";
