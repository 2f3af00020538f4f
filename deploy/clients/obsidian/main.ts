// Obsidian plug-in: the editor's extension, two commands, and what the status bar says. It does not know when
// suggestions are requested or how they are drawn, which the package tercet-client does.

import type { Extension } from "@codemirror/state";
import type { EditorView } from "@codemirror/view";
import { type Editor, Notice, Platform, Plugin } from "obsidian";
import { Client, type Problem } from "tercet-client";
import { completerOf, tercet } from "tercet-client/codemirror";

import { DEFAULT_SETTINGS, type Settings, SettingsTab } from "./settings";
import { isListUsed, tabKey } from "./tab_key";

export default class TercetPlugin extends Plugin {
  declare settings: Settings;
  /** Registered once; `configure` replaces its elements. */
  #extensions: Extension[] = [];
  #statusBarItem: HTMLElement | null = null;
  /** Shown to the writer, until a request succeeds. */
  #problem = "";

  override async onload(): Promise<void> {
    this.settings = { ...DEFAULT_SETTINGS, ...(await this.loadData()) };
    if (Platform.isDesktop) this.#statusBarItem = this.addStatusBarItem();
    this.addSettingTab(new SettingsTab(this.app, this));
    this.addCommand({
      id: "suggest",
      name: "Suggest",
      editorCallback: (editor) => completerOf(viewOf(editor))?.request(),
    });
    this.addCommand({
      id: "toggle",
      name: "Toggle automatic suggestions",
      callback: () => this.change({ isOn: !this.settings.isOn }),
    });
    this.registerEditorExtension(this.#extensions);
    this.#configure();
  }

  /** Change settings, store them and apply them to all open editors. */
  async change(changed: Partial<Settings>): Promise<void> {
    Object.assign(this.settings, changed);
    this.#configure();
    await this.saveData(this.settings);
  }

  #configure(): void {
    const { url, secret, isOn, mode, minProbability, minUsefulness, proseOnly, model } = this.settings;
    const key = (secret && this.app.secretStorage.getSecret(secret)) || "";
    const extension = tercet({
      client: new Client({ url, key }),
      mode: isOn ? mode : "off",
      minProbability,
      minUsefulness,
      proseOnly,
      options: () => (model ? { model_size: model } : {}),
      insertsSpace: true,
      isOtherListUsed: isListUsed,
      show: ({ problem, suggestions }) => {
        if (suggestions.length) this.#clearProblem();
        else if (problem) this.#showProblem(problem);
      },
    });
    this.#extensions.splice(0, Infinity, tabKey, extension);
    this.app.workspace.updateOptions();
    this.#clearProblem();
  }

  /** The same problem again changes nothing: with each key comes a request that may fail. */
  #showProblem(problem: Problem): void {
    const text = describe(problem, this.settings.url);
    if (text === this.#problem) return;
    this.#problem = text;
    new Notice(`Tercet: ${text}`);
    this.#setStatus("error", text);
  }

  #clearProblem(): void {
    this.#problem = "";
    const { isOn, mode } = this.settings;
    this.#setStatus(isOn ? mode : "off", "");
  }

  #setStatus(text: string, tooltip: string): void {
    if (!this.#statusBarItem) return;
    this.#statusBarItem.textContent = `Tercet: ${text}`;
    this.#statusBarItem.ariaLabel = tooltip || null; // Obsidian shows it as the tooltip
  }
}

/** CodeMirror's view, which Obsidian's types leave out. */
function viewOf(editor: Editor): EditorView {
  return (editor as Editor & { cm: EditorView }).cm;
}

/** The problem in a sentence that names what to change. */
function describe({ code, status, message }: Problem, url: string): string {
  if (code === "unreachable") {
    // A browser reports a refused origin and a dead server alike.
    return `${url} is not responding, or its setting TERCET_ORIGINS does not list ${location.origin}.`;
  }
  if (status === 401) return `${url} requires a valid API key. Choose its secret in the settings of Tercet.`;
  return message;
}
