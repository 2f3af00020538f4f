// The options of the editors' pages, from the page's address.

import { Client, type Mode } from "tercet-client";

const parameters = new URLSearchParams(location.search);

export const options = {
  client: new Client({ url: parameters.get("server") ?? "" }),
  mode: (parameters.get("mode") ?? "live") as Mode,
  tabTakes: (parameters.get("tab") ?? "all") as "all" | "word",
  keys: JSON.parse(parameters.get("keys") ?? "{}"),
  options: () => ({ model_size: parameters.get("model") ?? "embedded", seed: 1 }),
};

/** Where the editor is: in the page, or in a frame of it. */
export const root = parameters.has("framed") ? frameDocument() : document;

function frameDocument(): Document {
  const frame = document.createElement("iframe");
  frame.style.height = "400px";
  document.body.prepend(frame);
  if (!frame.contentDocument) throw new Error("The frame has no document.");
  return frame.contentDocument;
}

/** Function keys stand for what a program does to the editor. */
export function onKey(key: string, action: () => void): void {
  document.addEventListener("keydown", (event) => {
    if (event.key === key) action();
  });
}
