"""The language server: the protocol's requests, settings, messages and positions.

It offers `textDocument/inlineCompletion` (LSP 3.18) to editors that announce it, and ordinary completion to the others.
It knows pygls; it does not know what to request (`suggestions`) or how (`gateway`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
import typer
from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer

from deploy.clients.lsp.gateway import Gateway, Problem, Superseded
from deploy.clients.lsp.protocol import Protocol, position_in_text
from deploy.clients.lsp.suggestions import Caret, EditorSettings, Offer, Suggestions, Trigger, read_settings
from deploy.gateway_client import client_options, server_url
from shared.errors import StartError
from shared.settings import Settings
from shared.version import tercet_version

SECTION = "tercet"
ACCEPTED = "tercet.accepted"  # the command that an editor runs after it has inserted a suggestion
PAUSE_S = 0.4  # a pause in typing, in the mode `pauses`
SETTINGS_TIMEOUT_S = 2.0  # the first request waits as long for the editor's settings
REPEAT_AFTER_S = 60.0  # a message comes again after a success in between, and no sooner
# Identifiers of languages, of LSP, Neovim and Helix. Not LaTeX: it writes ``quotation marks'' as Markdown does code.
MARKDOWN = {"markdown", "mdx", "rmd", "rmarkdown", "quarto", "plaintext", "text"}
log = logging.getLogger(__name__)


class TercetLanguageServer(LanguageServer):
    """A language server for one editor."""

    protocol: Protocol

    def __init__(self, settings: Settings, environ: Mapping[str, str], url: str | None) -> None:
        """
        Args:
            settings: those of this machine, which name its own server.
            environ: holds the key, in `TERCET_API_KEY`, or its file's name, in `TERCET_API_KEY_FILE`.
            url: the server's address, which the editor's settings cannot change.

        Raises:
            StartError: the server cannot be used: its certificate cannot be read, or the key is none.
        """
        super().__init__("tercet", tercet_version(), protocol_cls=Protocol)
        self._settings = settings
        self._environ = environ
        self._url = url
        self._initial: Any = None
        self._configuring: asyncio.Future[None] | None = None
        self._documents: dict[str, Suggestions] = {}
        self._said: dict[str, float] = {}
        self._retry_at = 0.0
        self._use(EditorSettings())

    def start(self, params: types.InitializeParams) -> None:
        """Announce what suits this editor, before the answer to `initialize` is made."""
        self._initial = params.initialization_options
        self._configure()
        if params.process_id is not None and params.process_id > 0:
            self._watch = asyncio.ensure_future(self.protocol.end_with(params.process_id))
        text_document = params.capabilities.text_document
        if text_document and text_document.inline_completion:
            self.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())(_inline_completion)
        else:
            options = types.CompletionOptions(trigger_characters=[" "])
            self.feature(types.TEXT_DOCUMENT_COMPLETION, options)(_completion)

    def fetch_settings(self) -> None:
        """Ask the editor for its settings, if it can be asked; requests wait for them."""
        workspace = self.client_capabilities.workspace
        if workspace and workspace.configuration:
            self._configuring = asyncio.ensure_future(self._fetch_settings())

    def take_settings(self, sent: Any) -> None:
        """The editor's settings have changed. Not every editor that sends them can be asked."""
        self.fetch_settings()
        if self._configuring is None:
            self._configure(sent.get(SECTION) if isinstance(sent, dict) else None)

    def close_document(self, uri: str) -> None:
        self._documents.pop(uri, None)

    async def offers(self, uri: str, position: types.Position, trigger: Trigger) -> tuple[Caret, list[Offer]] | None:
        """What to offer at a position; None: a newer request has taken its place, or it failed."""
        if self._configuring:
            await asyncio.wait({self._configuring}, timeout=SETTINGS_TIMEOUT_S)
        caret = self._caret(uri, position)
        if caret is None:
            return Caret("", ""), []
        suggestions = self._documents.setdefault(uri, Suggestions())
        editor, gateway = self._editor, self._gateway
        body = suggestions.request(caret, trigger, editor)
        if body is None:
            return caret, []
        min_usefulness = 0.0 if trigger is Trigger.ASKED else editor.min_usefulness
        if trigger is not Trigger.ASKED:
            if held := suggestions.offers(caret, min_usefulness):
                return caret, held
            if editor.mode == "pauses":
                await asyncio.sleep(PAUSE_S)
            if body["sequence"] != suggestions.num_requests or time.monotonic() < self._retry_at:
                return None
        try:
            answer = await gateway.complete(body)
        except Superseded:
            return None
        except Problem as problem:
            self._retry_at = time.monotonic() + problem.retry_after_s
            self._say(str(problem), types.MessageType.Info if problem.is_temporary else types.MessageType.Warning)
            return None
        self._said = {text: at for text, at in self._said.items() if time.monotonic() - at < REPEAT_AFTER_S}
        suggestions.answered(caret, answer)
        if self._caret(uri, position) != caret:
            return None  # the text has changed: the answer may suit the next request, which has the new position
        return caret, suggestions.offers(caret, min_usefulness)

    async def report_acceptance(self, answer_id: str, index: int, num_chars: int) -> None:
        try:
            await self._gateway.report_acceptance(answer_id, index, num_chars)
        except (Problem, Superseded) as error:  # lost feedback must not disturb writing
            log.warning("An acceptance was not reported: %s", error)

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Log the kind of an error. Its message, which pygls shows to the user, may hold text of a document."""
        log.error("%s: %s", getattr(source, "__name__", source), type(error).__name__)

    def _caret(self, uri: str, position: types.Position) -> Caret | None:
        """The text around a position; None: the document is not open. pygls would read it from the disk."""
        document = self.workspace.text_documents.get(unquote(uri))
        if document is None:
            return None
        if not (lines := document.lines):
            return Caret("", "")
        at = document.position_from_client_units(position)
        line = lines[at.line]
        before, after = "".join(lines[: at.line]) + line[: at.character], line[at.character :]
        return Caret.of(before, after, is_markdown=document.language_id in MARKDOWN)

    def position(self, uri: str, position: types.Position) -> types.Position:
        """The position, or the end of the line or document that it is beyond."""
        document = self.workspace.text_documents.get(unquote(uri))
        return position_in_text(document.position_codec, document.lines, position) if document else position

    async def _fetch_settings(self) -> None:
        items = [types.ConfigurationItem(section=SECTION)]
        try:
            found = await self.workspace_configuration_async(types.ConfigurationParams(items))
        except JsonRpcException as error:
            log.warning("The editor does not send its settings: %s", type(error).__name__)
            return
        self._configure(*found)

    def _configure(self, *sections: Any) -> None:
        try:
            self._use(read_settings(self._initial, *sections))
        except (ValueError, StartError, typer.BadParameter) as error:
            self._say(f"Tercet's settings are not used: {error}", types.MessageType.Warning)

    def _use(self, editor: EditorSettings) -> None:
        """
        Raises:
            StartError, typer.BadParameter: an address, key or certificate cannot be used.
        """
        url = self._url or server_url(editor.url or None)
        # A folder's settings may name another server: the environment's key is for that of the command line, or ours.
        keys = self._environ if url == self._url else {}
        if editor.key:
            keys = {"TERCET_API_KEY": editor.key}
        options = client_options(self._settings, keys, url, timeout_s=0)
        self._editor, self._gateway = editor, Gateway(options, url)
        self._said, self._retry_at = {}, 0.0
        for suggestions in self._documents.values():
            suggestions.forget()

    def _say(self, text: str, kind: types.MessageType) -> None:
        """Show a message, once until the next success."""
        if text not in self._said:
            self._said[text] = time.monotonic()
            self.window_show_message(types.ShowMessageParams(kind, text))


def make_server(settings: Settings, environ: Mapping[str, str], url: str | None) -> TercetLanguageServer:
    """A language server whose protocol can be run; for arguments and errors see its class."""
    server = TercetLanguageServer(settings, environ, url)

    @server.feature(types.INITIALIZE)
    def initialize(ls: TercetLanguageServer, params: types.InitializeParams) -> None:
        ls.start(params)

    @server.feature(types.INITIALIZED)
    def initialized(ls: TercetLanguageServer, _params: types.InitializedParams) -> None:
        ls.fetch_settings()

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def did_change_configuration(ls: TercetLanguageServer, params: types.DidChangeConfigurationParams) -> None:
        ls.take_settings(params.settings)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(ls: TercetLanguageServer, params: types.DidCloseTextDocumentParams) -> None:
        ls.close_document(params.text_document.uri)

    @server.command(ACCEPTED)
    async def accepted(ls: TercetLanguageServer, *arguments: Any) -> None:
        try:
            answer_id, index, num_chars = msgspec.convert(arguments, tuple[str, int, int])
        except msgspec.ValidationError as error:
            raise JsonRpcInvalidParams from error
        await ls.report_acceptance(answer_id, index, num_chars)

    return server


async def _inline_completion(
    ls: TercetLanguageServer, params: types.InlineCompletionParams
) -> list[types.InlineCompletionItem] | None:
    is_asked = params.context.trigger_kind is types.InlineCompletionTriggerKind.Invoked
    trigger = Trigger.ASKED if is_asked else Trigger.TYPED
    position = ls.position(params.text_document.uri, params.position)
    found = await ls.offers(params.text_document.uri, position, trigger)
    if found is None:
        return None  # an empty list would take away what the editor still shows
    caret, offers = found
    here = types.Range(position, position)
    return [
        types.InlineCompletionItem(caret.as_in_document(offer.text), range=here, command=_acceptance(offer))
        for offer in offers
    ]


async def _completion(ls: TercetLanguageServer, params: types.CompletionParams) -> types.CompletionList:
    """Whole words: an editor filters a list by the word before the caret, and replaces that word."""
    position = ls.position(params.text_document.uri, params.position)
    found = await ls.offers(params.text_document.uri, position, Trigger.LISTED)
    if found is None:
        return types.CompletionList(is_incomplete=True, items=[])
    caret, offers = found
    word = caret.word
    num_units = ls.workspace.position_codec.client_num_units(word)
    start = types.Position(position.line, position.character - num_units)
    items = []
    for place, offer in enumerate(offers):
        text = word + caret.as_in_document(offer.text)
        items.append(
            types.CompletionItem(
                label=" ".join(text.split()),
                detail="Tercet",
                kind=types.CompletionItemKind.Text,
                sort_text=str(place),
                filter_text=text,
                text_edit=types.TextEdit(types.Range(start, position), text),
                insert_text_mode=types.InsertTextMode.AsIs,  # prose is not indented
                command=_acceptance(offer),
            )
        )
    # Incomplete: the editor asks again at the next key.
    return types.CompletionList(is_incomplete=True, items=items)


def _acceptance(offer: Offer) -> types.Command:
    arguments = [offer.answer_id, offer.index, len(offer.text)]
    return types.Command("Report the acceptance to Tercet", ACCEPTED, arguments=arguments)
