// VS Code extension: settings, commands and registration. It does not know when to suggest (provider.ts) nor how
// requests are sent (the package tercet-client).

import { Client } from "tercet-client";
import * as vscode from "vscode";

import { ProblemItem } from "./problem_item";
import { InlineSuggestions, type Mode } from "./provider";

const SECTION = "tercet";

/** Name of the API key in the secret storage. */
const KEY_SECRET = "tercet.key";

/** VS Code calls this once, after it has started. */
export async function activate({ secrets, subscriptions }: vscode.ExtensionContext): Promise<void> {
  const problemItem = new ProblemItem();
  const suggestions = new InlineSuggestions(problemItem);
  let registration: vscode.Disposable | undefined;

  async function configure(): Promise<void> {
    const key = (await secrets.get(KEY_SECRET)) ?? "";
    const settings = vscode.workspace.getConfiguration(SECTION);
    const url = settings.get("url", "");
    suggestions.configure({
      client: new Client({ url, key }),
      url,
      mode: settings.get<Mode>("mode", "live"),
      minProbability: settings.get("minProbability", 0.5),
      minUsefulness: settings.get("minUsefulness", 1),
      proseOnly: settings.get("proseOnly", true),
      model: settings.get("model", ""),
    });
    registration?.dispose();
    registration = vscode.languages.registerInlineCompletionItemProvider(
      settings.get<string[]>("languages", []).map((language) => ({ language })), suggestions,
    );
  }

  async function setKey(): Promise<void> {
    const key = await vscode.window.showInputBox({
      title: "Tercet: Set API Key",
      prompt: "Kept in the system's secret storage. Empty: no key.",
      password: true,
      ignoreFocusOut: true,
    });
    if (key === undefined) return; // dismissed
    if (key) await secrets.store(KEY_SECRET, key);
    else await secrets.delete(KEY_SECRET);
  }

  subscriptions.push(
    problemItem,
    { dispose: () => registration?.dispose() },
    vscode.commands.registerCommand("tercet.setKey", setKey),
    vscode.commands.registerCommand("tercet.reportAcceptance", (...reported: [string, number, number]) =>
      suggestions.reportAcceptance(...reported)),
    vscode.workspace.onDidChangeConfiguration((event) => event.affectsConfiguration(SECTION) && configure()),
    secrets.onDidChange((event) => event.key === KEY_SECRET && configure()),
  );
  await configure();
}
