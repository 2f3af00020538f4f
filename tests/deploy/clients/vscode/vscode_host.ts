// Runs the built VS Code extension in Node. VS Code itself cannot be downloaded by the tests, so this is a stand-in: it
// implements the parts of the `vscode` module that the extension uses, with their types from @types/vscode. It does not
// draw, and it does not decide when VS Code asks the extension for suggestions: the tests do.
//
// Usage: node vscode_host.js FOLDER, the unpacked `extension` folder of a .vsix. Each line on stdin is a command
// {"id", "name", ...}; its result is printed as {"id", "result"}. "cancel" cancels the completions under way.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";
import type * as vscode from "vscode";

const folder = process.argv[2] ?? "";
const manifest = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));

class Emitter<T> {
  #listeners = new Set<(event: T) => unknown>();
  readonly event = ((listener: (event: T) => unknown) => {
    this.#listeners.add(listener);
    return { dispose: () => this.#listeners.delete(listener) };
  }) satisfies vscode.Event<T>;

  /** Resolves when what the listeners started has ended. */
  async fire(event: T): Promise<void> {
    await Promise.all([...this.#listeners].map((listener) => listener(event)));
  }
}

class Position implements Pick<vscode.Position, "line" | "character"> {
  constructor(readonly line: number, readonly character: number) {}
}

class Range implements Pick<vscode.Range, "start" | "end"> {
  constructor(readonly start: vscode.Position, readonly end: vscode.Position) {}
}

class InlineCompletionItem implements Pick<vscode.InlineCompletionItem, "insertText" | "range" | "command"> {
  constructor(readonly insertText: string, readonly range: vscode.Range, readonly command: vscode.Command) {}
}

/** A document of one text, whose end is the caret. */
class TextDocument implements Pick<vscode.TextDocument, "uri" | "version" | "languageId" | "getText" | "offsetAt" | "positionAt"> {
  readonly uri = { toString: () => "file:///notes.md" } as vscode.Uri;
  version = 1;
  #lines: string[];

  constructor(readonly languageId: string, text: string) {
    this.#lines = text.split("\n");
  }

  lineAt(line: number): Pick<vscode.TextLine, "text"> {
    return { text: this.#lines[line] ?? "" };
  }

  getText(range?: vscode.Range): string {
    const text = this.#lines.join("\n");
    return range ? text.slice(this.offsetAt(range.start), this.offsetAt(range.end)) : text;
  }

  offsetAt({ line, character }: vscode.Position): number {
    return this.#lines.slice(0, line).reduce((sum, { length }) => sum + length + 1, character);
  }

  positionAt(offset: number): vscode.Position {
    const before = this.getText().slice(0, offset).split("\n");
    return new Position(before.length - 1, before.at(-1)?.length ?? 0) as vscode.Position;
  }
}

class CancellationToken implements vscode.CancellationToken {
  #emitter = new Emitter<unknown>();
  isCancellationRequested = false;
  onCancellationRequested = this.#emitter.event;

  cancel(): void {
    this.isCancellationRequested = true;
    void this.#emitter.fire(undefined);
  }
}

class StatusBarItem
  implements Pick<vscode.StatusBarItem, "name" | "text" | "tooltip" | "command" | "show" | "hide" | "dispose"> {
  name: string | undefined;
  text = "";
  tooltip: string | undefined;
  command: vscode.Command | undefined;
  isVisible = false;
  numShown = 0;

  show(): void {
    this.isVisible = true;
    this.numShown += 1;
  }

  hide(): void {
    this.isVisible = false;
  }

  dispose(): void {
    this.isVisible = false;
  }
}

const statusBarItem = new StatusBarItem();

/** Settings that differ from the defaults in the extension's manifest, with their section. */
const changedSettings = new Map<string, unknown>();
const settingsEmitter = new Emitter<vscode.ConfigurationChangeEvent>();

const workspace = {
  onDidChangeConfiguration: settingsEmitter.event,
  getConfiguration: (section: string) => ({
    get(name: string): unknown {
      const setting = manifest.contributes.configuration.properties[`${section}.${name}`];
      if (!setting) throw new Error(`The extension does not contribute the setting ${section}.${name}`);
      return changedSettings.get(`${section}.${name}`) ?? setting.default;
    },
  }),
};

const commands = new Map<string, (...args: any[]) => unknown>();
let inputBoxAnswer: string | undefined;

const window = {
  createStatusBarItem: () => statusBarItem as unknown as vscode.StatusBarItem,
  showInputBox: async () => inputBoxAnswer,
} satisfies Partial<typeof vscode.window>;

let provider: vscode.InlineCompletionItemProvider | null = null;
let selector: vscode.DocumentFilter[] = [];

const host = {
  Position,
  Range,
  InlineCompletionItem,
  InlineCompletionTriggerKind: { Invoke: 0, Automatic: 1 } satisfies typeof vscode.InlineCompletionTriggerKind,
  StatusBarAlignment: { Left: 1, Right: 2 } satisfies typeof vscode.StatusBarAlignment,
  workspace,
  window,
  commands: {
    registerCommand(name: string, run: (...args: any[]) => unknown) {
      commands.set(name, run);
      return { dispose: () => commands.delete(name) };
    },
  } satisfies Partial<typeof vscode.commands>,
  languages: {
    registerInlineCompletionItemProvider(filters, registered) {
      provider = registered;
      selector = filters as vscode.DocumentFilter[];
      return { dispose: () => (provider = null) };
    },
  } satisfies Partial<typeof vscode.languages>,
};

const stored = new Map<string, string>();
const secretsEmitter = new Emitter<vscode.SecretStorageChangeEvent>();
const secrets = {
  get: async (key) => stored.get(key),
  async store(key, value) {
    stored.set(key, value);
    await secretsEmitter.fire({ key });
  },
  async delete(key) {
    stored.delete(key);
    await secretsEmitter.fire({ key });
  },
  onDidChange: secretsEmitter.event,
} satisfies vscode.SecretStorage;

const subscriptions: vscode.Disposable[] = [];
const tokens: CancellationToken[] = [];
let lastDocument: TextDocument | null = null;

/** The commands of the tests. */
const control: Record<string, (fields: any) => unknown> = {
  async activate() {
    const require = createRequire(join(folder, "package.json"));
    const module = { exports: {} as { activate(context: Partial<vscode.ExtensionContext>): Promise<void> } };
    const load = new Function("require", "module", "exports", readFileSync(join(folder, manifest.main), "utf8"));
    load((name: string) => (name === "vscode" ? host : require(name)), module, module.exports);
    await module.exports.activate({ secrets, subscriptions });
  },
  /** Deactivates the extension; returns what it left registered. */
  deactivate() {
    for (const subscription of subscriptions.splice(0)) subscription.dispose();
    return { commands: [...commands.keys()], hasProvider: provider !== null, isVisible: statusBarItem.isVisible };
  },
  async configure({ settings }: { settings: Record<string, unknown> }) {
    for (const [name, value] of Object.entries(settings)) changedSettings.set(name, value);
    const affectsConfiguration = (section: string) =>
      Object.keys(settings).some((name) => name === section || name.startsWith(`${section}.`));
    await settingsEmitter.fire({ affectsConfiguration });
  },
  /** Completes at the end of `before`; null: the extension offers nothing in this language. */
  async complete({ before, after = "", isExplicit = false, language = "markdown" }) {
    if (!provider || !selector.some((filter) => filter.language === language)) return null;
    const document = new TextDocument(language, before + after);
    lastDocument = document;
    const token = new CancellationToken();
    tokens.push(token);
    const context = { triggerKind: isExplicit ? 0 : 1, selectedCompletionInfo: undefined };
    return provider.provideInlineCompletionItems(
      document as unknown as vscode.TextDocument, document.positionAt(before.length), context, token,
    );
  },
  /** Another view, or a program, changes the document of the last completion. */
  change() {
    if (lastDocument) lastDocument.version += 1;
  },
  cancel() {
    for (const token of tokens.splice(0)) token.cancel();
  },
  /** Runs a command; `input` is what is typed into an input box. */
  async execute({ command, args = [], input }) {
    inputBoxAnswer = input;
    await commands.get(command)?.(...args);
  },
  status: () => statusBarItem,
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, name, ...fields } = JSON.parse(line);
  // Not awaited: a completion may be cancelled while it runs. An unhandled rejection ends the process.
  void Promise.resolve(control[name]?.(fields)).then((result) => {
    process.stdout.write(`${JSON.stringify({ id, result: result ?? null })}\n`);
  });
}
