"""`tercet lsp` over real standard input and output, for a real server, with clients that behave as editors do.

Neovim 0.12 announces `inlineCompletion` (runtime/lua/vim/lsp/protocol.lua), requests by itself 200 ms after the last
key, and runs an item's command after it has inserted the item (inline_completion.lua, commit c2c5a02). Helix prefers
UTF-8 positions (helix-lsp/src/client.rs) and sorts items by `sortText`; Kate counts in UTF-16 and announces no encoding
(addons/lspclient). Both filter a list by the word before the cursor, and neither runs the command of an item.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.extras import install_command
from tests.e2e.harness import Gunicorn, free_port, metric, serving, until
from tests.e2e.shared_servers import SharedServer
from tests.e2e.test_overload import in_flight
from tests.lsp_client import LspClient, applied
from tests.workers.helpers import run_python

pytestmark = pytest.mark.quick
OPENING = "The old man looked at the se"
SURE = "The old man shook his h"  # "ead" follows
ALL = {"minProbability": 0, "minUsefulness": 0}
NEOVIM = {
    "general": {"positionEncodings": ["utf-8", "utf-16", "utf-32"]},
    "workspace": {"configuration": True},
    "textDocument": {"inlineCompletion": {"dynamicRegistration": False}, "completion": {"contextSupport": True}},
}
HELIX = {
    "general": {"positionEncodings": ["utf-8", "utf-32", "utf-16"]},
    "workspace": {"configuration": True},
    "textDocument": {"completion": {"completionItem": {"insertReplaceSupport": True}}},
}
KATE = {"workspace": {"configuration": True}, "textDocument": {"completion": {"completionItem": {}}}}
UTF_16: dict[str, Any] = {"textDocument": {"inlineCompletion": {}}}
EMOJI = "Café 😀 — The old man looked at the se"


@pytest.fixture
def connect(tercet: SharedServer) -> Iterator[Callable[..., LspClient]]:
    """Starts a language server for the server under test; teardown ends it as an editor does."""
    clients: list[LspClient] = []

    def start(capabilities: dict[str, Any], *arguments: str, **fields: Any) -> LspClient:
        environ = {**tercet.environ, **fields.pop("environ", {})}
        clients.append(LspClient(capabilities, *arguments, environ=environ, **fields))
        return clients[-1]

    yield start
    for client in clients:
        assert client.close() == 0
        assert client.stderr == b""


def inline_texts(found: list[dict[str, Any]] | None) -> list[str]:
    assert found is not None
    return [item["insertText"] for item in found]


def test_neovim_gets_words_at_keys_and_ideas_on_request_and_reports_an_acceptance(
    connect: Callable[..., LspClient], tercet: SharedServer
) -> None:
    client = connect(NEOVIM, initial=ALL)
    assert client.capabilities["inlineCompletionProvider"] == {}
    assert "completionProvider" not in client.capabilities
    client.open(OPENING)
    items = client.inline(0, len(OPENING))
    assert items
    assert "a" in {item["insertText"][0] for item in items}
    for item in items:
        here = {"line": 0, "character": len(OPENING)}
        assert item["range"] == {"start": here, "end": here}
    asked = client.inline(0, len(OPENING), is_asked=True)
    assert asked
    ideas = inline_texts(asked)
    assert len(set(ideas)) == 3
    before = metric(tercet, "tercet_saved_characters_total")
    client.run(asked[1]["command"])
    assert metric(tercet, "tercet_saved_characters_total") - before == len(ideas[1])
    # What agrees with the next key stays.
    client.change(OPENING + ideas[0][0])
    assert ideas[0][1:] in inline_texts(client.inline(0, len(OPENING) + 1))
    assert client.shown == []


@pytest.mark.parametrize(("editor", "encoding"), [(HELIX, "utf-8"), (KATE, "utf-16-le")])
def test_helix_and_kate_get_whole_words(
    connect: Callable[..., LspClient], editor: dict[str, Any], encoding: str
) -> None:
    client = connect(editor, initial=ALL)
    assert client.capabilities["completionProvider"]["triggerCharacters"] == [" "]
    assert "inlineCompletionProvider" not in client.capabilities
    assert client.capabilities["positionEncoding"] == encoding.removesuffix("-le")
    text = f"A line before.\n{EMOJI}"
    client.open(text)
    items = client.complete(1, len(EMOJI.encode(encoding)) // (2 if encoding == "utf-16-le" else 1))
    assert items
    assert [item["sortText"] for item in items] == sorted(item["sortText"] for item in items)
    for item in items:
        assert item["label"].startswith("se")
        assert item["filterText"] == item["textEdit"]["newText"]
        assert applied(text, item["textEdit"], encoding) == text[:-2] + item["textEdit"]["newText"]
    assert len({item["label"] for item in items}) > 1
    # After a space there is no word to replace.
    client.change(f"{text}a ")
    [first, *_] = client.complete(1, len(f"{EMOJI}a ".encode(encoding)) // (2 if encoding == "utf-16-le" else 1))
    assert applied(f"{text}a ", first["textEdit"], encoding) == f"{text}a {first['textEdit']['newText']}"


def test_positions_are_those_of_the_editor(connect: Callable[..., LspClient]) -> None:
    """Changes of one place, in UTF-16 units. A form feed and U+2028 end no line in an editor, and a lone half of a
    surrogate pair is text."""
    client = connect(UTF_16, initial=ALL)
    client.open("One 😀\r\n\fTwo\u2028and\ud83d\r\n\r\nEnd\r\n")
    start, end = {"line": 1, "character": 0}, {"line": 1, "character": 9}
    client.change(EMOJI, {"start": start, "end": end})
    expected = inline_texts(client.inline(1, len(EMOJI) + 1))
    assert expected
    plain = connect(UTF_16, initial=ALL)
    plain.open(f"One 😀\n{EMOJI}")
    assert inline_texts(plain.inline(1, len(EMOJI) + 1)) == expected
    plain.open("")
    assert plain.inline(0, 0) == []
    plain.open("The old man\n")
    assert plain.inline(1, 0, is_asked=True)


@pytest.fixture
def slow_client(slow: SharedServer) -> Iterator[LspClient]:
    with LspClient(NEOVIM, environ=slow.environ) as client:
        yield client


def test_requests_in_quick_succession_end_with_the_answer_to_the_last(connect: Callable[..., LspClient]) -> None:
    """They go by several connections, so an older one may reach the server last, and supersede the newest."""
    client = connect(NEOVIM)
    text = OPENING
    client.open(text)
    for letter in "a and the s":
        text += letter
        client.change(text)
        last = client.start_inline(0, len(text), is_asked=True)
    assert client.answer(last)["result"]


def test_a_request_that_the_editor_cancels_ends_on_the_server(slow_client: LspClient, slow: SharedServer) -> None:
    slow_client.open(OPENING)
    number = slow_client.start_inline(0, len(OPENING), is_asked=True)
    until(lambda: in_flight(slow), 10, "the request in the engine")
    slow_client.notify("$/cancelRequest", {"id": number})
    assert slow_client.answer(number)["error"]["code"] == -32800
    until(lambda: not in_flight(slow), 10, "its sequences freed")


def test_an_absent_server_is_reported_once_until_it_answers(
    connect: Callable[..., LspClient], tercet: SharedServer
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    client = connect(NEOVIM, settings={"url": url})
    client.open(OPENING)
    for _ in range(3):
        assert client.inline(0, len(OPENING)) is None
        assert client.inline(0, len(OPENING), is_asked=True) is None
    [(kind, text)] = client.shown
    assert kind == 2
    assert text.startswith(f"No Tercet server answers at {url}. Start it with `tercet serve`.")
    assert "`tercet.url`" in text
    client.settings = {"url": tercet.url}
    client.notify("workspace/didChangeConfiguration", {"settings": None})
    assert client.inline(0, len(OPENING), is_asked=True)
    assert len(client.shown) == 1


def test_a_missing_and_a_wrong_key_are_reported_and_a_right_one_is_used(keyed: SharedServer, key: str) -> None:
    server = keyed
    without = {name: value for name, value in server.environ.items() if name != "TERCET_API_KEY"}
    with LspClient(NEOVIM, environ=without, settings={}) as client:
        client.open(OPENING)
        assert client.inline(0, len(OPENING)) is None
        assert client.inline(0, len(OPENING), is_asked=True) is None
        [(_, text)] = client.shown
        assert f"at {server.url} requires an API key. Set one in TERCET_API_KEY" in text
        client.settings = {"key": "tct_wrong"}
        client.notify("workspace/didChangeConfiguration", {"settings": None})
        assert client.inline(0, len(OPENING), is_asked=True) is None
        assert "does not accept the API key" in client.shown[1][1]
        client.settings = {"key": key}
        client.notify("workspace/didChangeConfiguration", {"settings": None})
        assert client.inline(0, len(OPENING), is_asked=True)
        assert len(client.shown) == 2
    with LspClient(NEOVIM, environ=server.environ, settings={}) as client:
        client.open(OPENING)
        assert client.inline(0, len(OPENING), is_asked=True)
    # By its address in the editor's settings, which a folder may hold, no server gets the environment's key.
    with LspClient(NEOVIM, environ=server.environ, settings={"url": server.url}) as client:
        client.open(OPENING)
        assert client.inline(0, len(OPENING), is_asked=True) is None
        assert "requires an API key" in client.shown[0][1]
    # The command line's address is fixed, and gets it.
    settings = {"url": f"http://127.0.0.1:{free_port()}"}
    with LspClient(NEOVIM, "--url", server.url, environ=server.environ, settings=settings) as client:
        client.open(OPENING)
        assert client.inline(0, len(OPENING), is_asked=True)


@pytest.mark.integration
def test_a_model_that_loads_is_reported(short_tmp_path: Path) -> None:
    """A gateway without its workers, which have no socket yet."""
    with serving(Gunicorn(short_tmp_path, "gateway")) as gateway, LspClient(KATE, environ=gateway.environ) as client:
        client.open(OPENING)
        assert client.complete(0, len(OPENING)) == []
        assert client.complete(0, len(OPENING)) == []
        assert client.shown == [
            (3, f"The model at {gateway.url} is still loading. Suggestions begin when it is ready.")
        ]


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_settings_are_fetched_or_sent(
    connect: Callable[..., LspClient], tercet: SharedServer, is_asked_for: bool
) -> None:
    editor = NEOVIM if is_asked_for else UTF_16
    client = connect(editor, initial={"mode": "off"}, settings={"model": "none"} if is_asked_for else None)
    client.open(SURE)
    assert client.inline(0, len(SURE)) == []
    if not is_asked_for:
        client.notify("workspace/didChangeConfiguration", {"settings": {"tercet": {"model": "none"}}})
    assert client.inline(0, len(SURE), is_asked=True) is None
    assert "Change the setting `tercet.model`." in client.shown[0][1]
    client.settings = {"mode": "live", "model": "embedded"}
    client.notify("workspace/didChangeConfiguration", {"settings": {"tercet": client.settings}})
    assert client.inline(0, len(SURE))


def test_no_text_of_a_document_is_logged_nor_shown(tercet: SharedServer) -> None:
    client = LspClient(NEOVIM, environ=tercet.environ)
    client.open("canary " + SURE)
    client.notify("textDocument/didChange", {"textDocument": "canary", "contentChanges": ["canary"]})
    client.start("textDocument/inlineCompletion", {"textDocument": "canary"})
    assert "error" in client.answer(client.start("textDocument/unknown", {"text": "canary"}))
    assert client.inline(0, 7 + len(SURE))
    assert client.close() == 0
    assert b"canary" not in client.stderr
    assert client.shown == []
    assert "canary" not in tercet.log()


def test_without_pygls_the_command_that_installs_it_is_printed() -> None:
    code = "import sys; sys.modules['pygls'] = None; sys.argv = ['tercet', 'lsp']\nfrom deploy.cli import main; main()"
    done = run_python(code)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.sub(r"\s+", " ", done.stderr).endswith(f"not installed: {install_command('lsp')} ")
