// What the package's declarations must allow and refuse.

import { Client, Completer, Problem, type View } from "tercet-client";
import { completerOf, tercet } from "tercet-client/codemirror";
import { tercet as plugin } from "tercet-client/prosemirror";
import { attachTextarea } from "tercet-client/textarea";

const client = new Client({ url: "http://localhost:8000", key: "secret" });
const show = (view: View): string | undefined => view.chosen?.rest;
const completer: Completer = new Completer({ client, context: () => "", insert: () => {}, show, mode: "pauses" });
export const isHandled: boolean = completer.press(new KeyboardEvent("keydown"));
export const extension = tercet({ client, list: false, minUsefulness: 2, tabTakes: "word", keys: { accept: ["F8"] } });
export const plugins = [plugin({ client, options: () => ({ length: 8 }) })];
export const attached = attachTextarea(document.createElement("textarea"), { client }).completer.view.suggestions;
export const status = (error: unknown): number => (error instanceof Problem ? error.status : 0);
export { completerOf };

// @ts-expect-error: no such mode
new Completer({ client, context: () => "", insert: () => {}, show, mode: "always" });
// @ts-expect-error: no such action
tercet({ client, keys: { take: ["F8"] } });
// @ts-expect-error: the adapter inserts
tercet({ client, insert: () => {} });
// @ts-expect-error: not a client
plugin({ client: "http://localhost:8000" });
