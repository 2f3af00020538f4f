// Inline suggestions for VS Code: when to request them, and how responses become completion items. VS Code shows the
// items, cycles through them and filters them while the writer types. It does not know settings or the status bar.

import { type Client, hasTextAfter, isInsideWord, isProse, Problem, trimContext, trimSuffix } from "tercet-client";
import * as vscode from "vscode";

import type { ProblemItem } from "./problem_item";

/** When suggestions are requested unasked. */
export type Mode = "live" | "pauses" | "off";

export interface Settings {
  client: Client;
  /** Base URL of the client's server, for messages. */
  url: string;
  mode: Mode;
  /** Predictions end where they are less probable. */
  minProbability: number;
  /** Predictions expected to save fewer keys are not shown. */
  minUsefulness: number;
  /** Nothing comes unasked in code, front matter and mathematics of `MARKDOWN`. */
  proseOnly: boolean;
  /** Empty: the server's default. */
  model: string;
}

/** Unasked requests wait for this long without a key. In live mode it only joins keys of the same instant. */
const DEBOUNCE_MS = { live: 30, pauses: 400 };

/** Languages that are Markdown. Not LaTeX: it writes ``quotation marks'' as Markdown does code. */
const MARKDOWN = ["markdown", "mdx", "rmd", "quarto", "plaintext"];

type Response = Awaited<ReturnType<Client["complete"]>>;

/** A caret: the document, the text before the caret, and the rest of its line. */
interface Caret {
  uri: string;
  context: string;
  after: string;
}

export class InlineSuggestions implements vscode.InlineCompletionItemProvider {
  #problemItem;
  #settings: Settings | null = null;
  /** The last response, and where it was requested. */
  #answer: { caret: Caret; response: Response } | null = null;
  /** Of the last call, to recognise deletions. */
  #lastCaret: Caret = { uri: "", context: "", after: "" };

  constructor(problemItem: ProblemItem) {
    this.#problemItem = problemItem;
  }

  configure(settings: Settings): void {
    this.#settings = settings;
    this.#answer = null;
    this.#problemItem.hide();
  }

  /** Up to three items, or none after an error, which the status bar shows. VS Code drops late ones. */
  async provideInlineCompletionItems(
    document: vscode.TextDocument, position: vscode.Position, { triggerKind }: vscode.InlineCompletionContext,
    token: vscode.CancellationToken,
  ): Promise<vscode.InlineCompletionItem[]> {
    const settings = this.#settings;
    if (!settings) return [];
    const isExplicit = triggerKind === vscode.InlineCompletionTriggerKind.Invoke;
    const after = document.lineAt(position.line).text.slice(position.character);
    const before = document.getText(new vscode.Range(new vscode.Position(0, 0), position)).replaceAll("\r\n", "\n");
    const context = trimContext({ end: before.length, text: before });
    const caret = { uri: document.uri.toString(), context, after };
    const isDeletion = isBefore(caret, this.#lastCaret);
    this.#lastCaret = caret;
    if (!context.trim() || isInsideWord(context, after)) return [];
    if (!isExplicit) {
      if (settings.mode === "off" || isDeletion || hasTextAfter(after)) return [];
      const mayBeCode = settings.proseOnly && MARKDOWN.includes(document.languageId);
      if (mayBeCode && !isProse(before)) return [];
      const items = this.#itemsThatStillHold(caret, position);
      if (items.length || !(await isUncancelledAfter(DEBOUNCE_MS[settings.mode], token))) return items;
    }
    const suffix = hasTextAfter(after) ? "" : trimSuffix(after);
    const request = {
      context,
      ...(suffix && { suffix }),
      ...(isExplicit || settings.mode === "pauses"
        ? { strategy: "idea" } : { strategy: "predict", min_probability: settings.minProbability }),
      familiar_only: true,
      single_line: after.trim() !== "",
      ...(settings.model && { model_size: settings.model }),
    };
    const response = await this.#request(settings, request, token);
    if (!response) return [];
    this.#answer = { caret, response };
    return this.#itemsThatStillHold(caret, position);
  }

  /**
   * An item was accepted.
   * @param id  Of the response.
   * @param index  Of the sentence in the response.
   * @param numChars  Length of the inserted text.
   */
  async reportAcceptance(id: string, index: number, numChars: number): Promise<void> {
    await this.#settings?.client.feedback(id, index, "accepted", numChars);
  }

  /** Null if the request was cancelled or failed. */
  async #request(
    { client, url }: Settings, request: Record<string, unknown>, token: vscode.CancellationToken,
  ): Promise<Response | null> {
    const abortController = new AbortController();
    if (token.isCancellationRequested) return null;
    const subscription = token.onCancellationRequested(() => abortController.abort());
    try {
      const response = await client.complete(request, abortController.signal);
      this.#problemItem.hide();
      return response;
    } catch (error) {
      const isSuperseded = error instanceof Problem && error.code === "superseded";
      if (!token.isCancellationRequested && !isSuperseded) this.#problemItem.show(error, url);
      return null;
    } finally {
      subscription.dispose();
    }
  }

  /** Items of the last answer that agree with what was typed since, and extend it. */
  #itemsThatStillHold(caret: Caret, position: vscode.Position): vscode.InlineCompletionItem[] {
    const answer = this.#answer;
    if (answer?.caret.uri !== caret.uri || answer.caret.after !== caret.after || !caret.context.startsWith(answer.caret.context)) return [];
    const typed = caret.context.slice(answer.caret.context.length);
    const minUsefulness = this.#settings?.minUsefulness ?? 0;
    return answer.response.sentences.flatMap(({ value, usefulness = Infinity }, index) => {
      if (usefulness < minUsefulness || !value.startsWith(typed) || value.length === typed.length) return [];
      const rest = value.slice(typed.length);
      return new vscode.InlineCompletionItem(rest, new vscode.Range(position, position), {
        command: "tercet.reportAcceptance",
        title: "Report acceptance",
        arguments: [answer.response.id, index, rest.length],
      });
    });
  }
}

/** Whether the other caret's text was deleted up to this one. */
function isBefore({ uri, context }: Caret, other: Caret): boolean {
  return uri === other.uri && context.length < other.context.length && other.context.startsWith(context);
}

/** Waits, and returns whether the token was not cancelled meanwhile. */
async function isUncancelledAfter(ms: number, token: vscode.CancellationToken): Promise<boolean> {
  await new Promise((resolve) => setTimeout(resolve, ms));
  return !token.isCancellationRequested;
}
