// Loads the built Obsidian plug-in in a web page, with an editor of the CodeMirror version that Obsidian has. Obsidian
// itself cannot be downloaded by the tests, so this is a stand-in: it implements the parts of the `obsidian` module
// that the plug-in uses, with their types from the package `obsidian`.

import { closeBrackets } from "@codemirror/autocomplete";
import * as commands from "@codemirror/commands";
import * as state from "@codemirror/state";
import * as cmView from "@codemirror/view";
import type * as obsidian from "obsidian";

const { Compartment, EditorState } = state;
const { EditorView, keymap } = cmView;

const registered: { commands: obsidian.Command[]; extensions: state.Extension[]; tabs: obsidian.PluginSettingTab[] } = {
  commands: [], extensions: [], tabs: [],
};
const elements: HTMLElement[] = [];
const plugins = new Compartment();
let stored: unknown = null;
const listKeys: string[] = [];

const editor = new EditorView({
  state: EditorState.create({
    extensions: [
      commands.history(),
      keymap.of([commands.indentWithTab, ...commands.historyKeymap, ...commands.defaultKeymap]),
      EditorView.lineWrapping,
      closeBrackets(),
      plugins.of([]),
    ],
  }),
  parent: document.body,
});

/** Names and values of the secret storage. */
const secrets: Record<string, string> = {};

const app = {
  secretStorage: {
    getSecret: (id) => secrets[id] ?? null,
  } satisfies Partial<obsidian.SecretStorage>,
  workspace: {
    updateOptions: () => editor.dispatch({ effects: plugins.reconfigure([...registered.extensions]) }),
  } satisfies Partial<obsidian.Workspace>,
} as unknown as obsidian.App;

type UsedOfPlugin = "app" | "manifest" | "addCommand" | "addStatusBarItem" | "addSettingTab" | "registerEditorExtension"
  | "loadData" | "saveData";

class Plugin implements Pick<obsidian.Plugin, UsedOfPlugin> {
  constructor(readonly app: obsidian.App, readonly manifest: obsidian.PluginManifest) {}

  addCommand(command: obsidian.Command): obsidian.Command {
    registered.commands.push(command);
    return command;
  }

  addStatusBarItem(): HTMLElement {
    return append(document.body, "div", { role: "status" });
  }

  addSettingTab(tab: obsidian.PluginSettingTab): void {
    registered.tabs.push(tab);
  }

  registerEditorExtension(extension: state.Extension): void {
    registered.extensions.push(extension);
    app.workspace.updateOptions();
  }

  /** As Obsidian, from JSON. */
  async loadData(): Promise<any> {
    return JSON.parse(JSON.stringify(stored));
  }

  async saveData(data: unknown): Promise<void> {
    stored = JSON.parse(JSON.stringify(data));
  }
}

class PluginSettingTab implements Pick<obsidian.PluginSettingTab, "app" | "containerEl"> {
  readonly containerEl = append(document.body, "section", { ariaLabel: "Settings" });

  constructor(readonly app: obsidian.App) {}
}

/** A setting's control of any kind. Every change of its element counts, as in Obsidian. */
class Control {
  constructor(readonly element: HTMLInputElement | HTMLSelectElement) {}

  setValue(value: string | boolean): this {
    Object.assign(this.element, typeof value === "boolean" ? { checked: value } : { value });
    return this;
  }

  setPlaceholder(placeholder: string): this {
    Object.assign(this.element, { placeholder });
    return this;
  }

  addOptions(options: Record<string, string>): this {
    for (const [value, textContent] of Object.entries(options)) append(this.element, "option", { value, textContent });
    return this;
  }

  onChange(run: (value: any) => unknown): this {
    const read = (element: any) => (element.type === "checkbox" ? element.checked : element.value);
    this.element.addEventListener("input", () => run(read(this.element)));
    return this;
  }
}

/** Here the name of a secret is typed; Obsidian offers a list. */
class SecretComponent extends Control {
  constructor(_app: obsidian.App, container: HTMLElement) {
    super(append(container, "input", {}));
  }
}

class Setting {
  #element;

  constructor(container: HTMLElement) {
    this.#element = append(container, "label", {});
  }

  setName(name: string): this {
    return this.addComponent((element) => append(element, "b", { textContent: name }));
  }

  setDesc(text: string): this {
    return this.addComponent((element) => append(element, "small", { textContent: text }));
  }

  addText(add: (control: Control) => unknown): this {
    return this.addComponent((element) => add(new Control(append(element, "input", {}))));
  }

  addDropdown(add: (control: Control) => unknown): this {
    return this.addComponent((element) => add(new Control(append(element, "select", {}))));
  }

  addToggle(add: (control: Control) => unknown): this {
    return this.addComponent((element) => add(new Control(append(element, "input", { type: "checkbox" }))));
  }

  addComponent(add: (element: HTMLElement) => unknown): this {
    add(this.#element);
    return this;
  }
}

class Notice {
  constructor(message: string) {
    append(document.body, "div", { role: "alert", textContent: message });
  }
}

const modules: Record<string, unknown> = {
  obsidian: {
    Notice, Platform: { isDesktop: true }, Plugin, PluginSettingTab, SecretComponent, Setting,
  } satisfies Partial<Record<keyof typeof obsidian, unknown>>, // no name that Obsidian does not have
  "@codemirror/commands": commands,
  "@codemirror/state": state,
  "@codemirror/view": cmView,
};

type PluginClass = new (app: obsidian.App, manifest: obsidian.PluginManifest) => obsidian.Plugin;
let plugin: obsidian.Plugin | null = null;

/** Called by the tests. */
const host = {
  /** Load a plug-in's main.js, with what is stored of its settings. */
  async load(code: string, manifest: obsidian.PluginManifest, data: unknown, itsSecrets: Record<string, string>) {
    stored = data;
    Object.assign(secrets, itsSecrets);
    const loaded = { exports: {} as { default: PluginClass } };
    const require = (name: string) => {
      if (!(name in modules)) throw new Error(`Obsidian provides no module ${name}`);
      return modules[name];
    };
    new Function("require", "module", "exports", code)(require, loaded, loaded.exports);
    plugin = new loaded.exports.default(app, manifest);
    await plugin.onload();
  },
  /** Unload the plug-in, and remove what it registered, as Obsidian does. */
  unload() {
    plugin?.onunload?.();
    for (const list of Object.values(registered)) list.splice(0);
    for (const element of elements.splice(0)) element.remove();
    app.workspace.updateOptions();
  },
  run(id: string) {
    const command = registered.commands.find((candidate) => candidate.id === id);
    if (!command) throw new Error(`There is no command ${id}`);
    command.callback?.();
    command.editorCallback?.({ cm: editor } as unknown as obsidian.Editor, {} as obsidian.MarkdownView);
  },
  openSettings() {
    registered.tabs[0]?.display();
  },
  /** Open a list with a chosen entry, as Obsidian's for links. The keys that reach it are recorded. */
  openList() {
    const list = append(document.body, "div", { className: "suggestion-container" });
    append(list, "div", { className: "suggestion-item is-selected", textContent: "A note" });
    document.addEventListener("keydown", ({ key }) => listKeys.push(key));
  },
  listKeys: () => listKeys,
  /** What the plug-in has stored. */
  stored: () => stored,
};

Object.assign(window, { host, activeDocument: document });

/** Append an element that `unload` removes. */
function append<K extends keyof HTMLElementTagNameMap>(
  parent: HTMLElement, tag: K, properties: Partial<HTMLElementTagNameMap[K]>,
): HTMLElementTagNameMap[K] {
  const element = Object.assign(document.createElement(tag), properties);
  parent.append(element);
  elements.push(element);
  return element;
}
