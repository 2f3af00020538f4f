// The status bar item that says why there are no suggestions. It does not know requests.

import { Problem } from "tercet-client";
import * as vscode from "vscode";

/** Shows a problem until a request succeeds. */
export class ProblemItem implements vscode.Disposable {
  #item = vscode.window.createStatusBarItem("tercet.problem", vscode.StatusBarAlignment.Right);

  constructor() {
    this.#item.name = "Tercet";
  }

  /**
   * @param error  What a request threw.
   * @param url  The server's URL.
   */
  show(error: unknown, url: string): void {
    const { text, detail, command } = describe(error, url);
    this.#item.text = `$(warning) Tercet: ${text}`;
    this.#item.tooltip = detail;
    this.#item.accessibilityInformation = { label: `Tercet: ${detail}` };
    this.#item.command = command;
    this.#item.show();
  }

  hide(): void {
    this.#item.hide();
  }

  dispose(): void {
    this.#item.dispose();
  }
}

const OPEN_SETTINGS: vscode.Command = {
  command: "workbench.action.openSettings", title: "Open Settings", arguments: ["tercet."],
};
const SET_KEY: vscode.Command = { command: "tercet.setKey", title: "Set API Key" };

/** The problem in a few words and in a sentence, and the command that mends it. */
function describe(error: unknown, url: string): { text: string; detail: string; command: vscode.Command } {
  if (!(error instanceof Problem)) {
    return { text: "unexpected answer", detail: `${url} does not answer as Tercet: ${error}`, command: OPEN_SETTINGS };
  }
  if (error.code === "unreachable") {
    const detail = `${url} is not responding. Start the server, or change the setting "tercet.url".`;
    return { text: "no connection", detail, command: OPEN_SETTINGS };
  }
  if (error.status === 401) {
    const detail = `${url} requires a valid API key. Set it with the command "Tercet: Set API Key".`;
    return { text: "API key required", detail, command: SET_KEY };
  }
  if (error.code === "unknown_model") {
    const detail = `${error.message} Change the setting "tercet.model".`;
    return { text: "unknown model", detail, command: OPEN_SETTINGS };
  }
  return { text: "request failed", detail: `${url}: ${error.message}`, command: OPEN_SETTINGS };
}
