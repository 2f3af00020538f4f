"""`page`: the web editor in Chromium, as a writer sees it.

- Writing: prose typed live at a human rhythm: the time from a key to its painted suggestion, the share of keys after
  which one is on show, and suggestions replaced although they still agreed with the text.
- Long documents: CPU time of the main thread per key, with suggestions as the writer types, beside that of a bare
  textarea with the same text on the same origin, in pairs. Not wall time: the model works on the same cores.

Requires Chromium and Playwright, which the tests install. Presses keys only; knows the page by its element ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from deploy.tuning.load.run import progress
from shared.errors import StartError
from tests.bench.quality.passages import choose_passages
from tests.bench.quality.writers import key_intervals_ms
from tests.bench.results import Row, err
from tests.bench.rounds import latencies, percent
from tests.bench.run import BenchDocument, Options
from tests.bench.server import start_server
from tests.programs import CHROMIUM

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

# No sandbox and no GPU: a benchmark often runs as root, in a container.
CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
VIEWPORT = {"width": 1100, "height": 760}
LONG_DOCUMENT_CHARS, QUICK_LONG_DOCUMENT_CHARS = (200_000, 1_000_000), (20_000,)
KEYS_PER_ROUND = 60
EDITORS = ("bare textarea", "page")
BARE_TEXTAREA = "<textarea style='width: 36rem; height: 45rem; font: 1.3125rem/1.65 serif'></textarea>"

# Records each key, and each change of the ghost text with the time when it was painted. A message posted in an
# animation frame arrives after the frame has been painted.
RECORDER = """() => {
  const text = document.querySelector("#text");
  window.recorded = { keys: [], ghosts: [] };
  addEventListener("keydown", () => recorded.keys.push(performance.now()), true);
  const record = () => {
    const ghost = text.querySelector(".tercet-ghost")?.textContent ?? "";
    if (ghost === (recorded.ghosts.at(-1)?.text ?? "")) return;
    const entry = { text: ghost, changed: performance.now(), painted: null };
    recorded.ghosts.push(entry);
    requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = () => (entry.painted = performance.now());
      channel.port2.postMessage(0);
    });
  };
  new MutationObserver(record).observe(text, { childList: true, characterData: true, subtree: true });
}"""


def run_page(options: Options, texts: Mapping[str, str], num_keys: int, document: BenchDocument) -> None:
    """Fill the document.

    Args:
        texts: file name → prose to type.
        num_keys: number of keys to type with each eagerness.

    Raises:
        StartError: Chromium or Playwright is missing, or the server does not get warm.
    """
    [passage, *_] = choose_passages(texts, 1, 1, random.Random(options.seed))
    text = " ".join(passage.text[passage.start : passage.start + num_keys].split())
    document.workload = {"keys": len(text), "file": passage.file, "rounds": options.num_rounds}
    with (
        running_chromium() as browser,
        start_server(options.models, options.server_settings) as server,
        progress(err, "Page", 2 + options.num_rounds) as turn,
    ):
        for eagerness in ("eager", "normal"):
            turn(f"writing, {eagerness}")
            document.rows.append(_write(browser, server.url, eagerness, text))
        sizes = QUICK_LONG_DOCUMENT_CHARS if options.is_quick else LONG_DOCUMENT_CHARS
        times_ms: dict[tuple[int, str], list[float]] = {(size, name): [] for size in sizes for name in EDITORS}
        for number in range(options.num_rounds):
            turn(f"long documents, round {number + 1}")
            for (num_chars, name), times in times_ms.items():
                long_text = _long_document(texts, num_chars)
                times += _type_in_long_document(browser, server.url, long_text, num_keys, name)
        document.rows += [
            {"editor": name, "characters": num_chars, **_headed("CPU per key", latencies(ms))}
            for (num_chars, name), ms in times_ms.items()
        ]


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """
    Raises:
        StartError: Chromium or Playwright is missing.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise StartError("Playwright is not installed: run `make setup`.") from error
    if CHROMIUM is None:
        raise StartError("Chromium is not installed (apt-get install chromium-headless-shell).")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS) as browser,
    ):
        yield browser


def _write(browser: Browser, url: str, eagerness: str, text: str) -> Row:
    page = open_page(browser, url, eagerness)
    page.locator("#text").focus()
    page.evaluate(RECORDER)
    for letter, interval_ms in zip(text, key_intervals_ms(1), strict=False):
        page.keyboard.type(letter)
        page.wait_for_timeout(interval_ms)
    page.wait_for_timeout(1000)
    recorded = page.evaluate("recorded")
    page.context.close()
    return writing_row(eagerness, text, recorded)


def writing_row(eagerness: str, text: str, recorded: Mapping[str, Any]) -> Row:
    """What was recorded (`RECORDER`) while `text` was typed, one key for each character.

    "Shown" counts the keys after which a suggestion was painted before the next key. "Flicker" is the share of the
    suggestions that agreed with the next key and were not left on show.
    """
    keys, ghosts = recorded["keys"], recorded["ghosts"]
    times_ms, shown_after = [], [""] * len(keys)
    at, latest = 0, ""
    for number, (pressed, until) in enumerate(pairwise([*keys, float("inf")])):
        painted_ms = None
        while at < len(ghosts) and ghosts[at]["changed"] < until:
            latest = ghosts[at]["text"]
            painted = ghosts[at]["painted"]
            if latest and painted is not None and painted < until and painted_ms is None:
                painted_ms = painted - pressed
            at += 1
        shown_after[number] = latest
        if painted_ms is not None and latest:
            times_ms.append(painted_ms)
    num_holding = num_replaced = 0
    for number, (before, after) in enumerate(pairwise(shown_after)):
        typed = text[number + 1]
        rest = before.removeprefix(typed)
        if before.startswith(typed) and rest:
            num_holding += 1
            num_replaced += not (after.startswith(rest) or (after and rest.startswith(after)))
    return {
        "suggestions": eagerness,
        "keys": len(keys),
        "shown, %": percent(len(times_ms), len(keys)),
        **_headed("key to paint", latencies(times_ms)),
        "flicker, %": percent(num_replaced, max(num_holding, 1)),
    }


def _type_in_long_document(browser: Browser, url: str, text: str, num_keys: int, editor: str) -> list[float]:
    """The main thread's CPU milliseconds of each key at the end of a text."""
    page = open_page(browser, url, "normal", text if editor == "page" else "")
    if editor == "page":
        page.locator("#text").focus()
    else:
        page.goto(f"{url}/health/live")
        page.set_content(BARE_TEXTAREA)
        page.locator("textarea").evaluate("(area, text) => { area.value = text; area.focus(); }", text)
    page.keyboard.press("Control+End")
    page.wait_for_timeout(1500)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    times_ms = []
    for number in range(min(num_keys, KEYS_PER_ROUND)):
        before_s = _task_seconds(session)
        page.keyboard.type("the cat sat on it "[number % 18])
        page.wait_for_timeout(150)
        times_ms.append(1e3 * (_task_seconds(session) - before_s))
    page.context.close()
    return times_ms


def open_page(browser: Browser, url: str, eagerness: str, text: str = "") -> Page:
    """The page in a new browser that has these settings and, if there is a text, a document."""
    stored: dict[str, Any] = {"tercet.settings": {"mode": eagerness}}
    if text:
        stored["tercet.document.1"] = {"id": "1", "text": text, "changedMs": 1, "isCopy": False, "versions": {"1": 1}}
    items = [{"name": name, "value": json.dumps(value)} for name, value in stored.items()]
    state: Any = {"cookies": [], "origins": [{"origin": url, "localStorage": items}]}
    viewport: Any = VIEWPORT
    page = browser.new_context(storage_state=state, viewport=viewport, service_workers="block").new_page()
    page.goto(url)
    return page


def _task_seconds(session: CDPSession) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def _long_document(texts: Mapping[str, str], num_chars: int) -> str:
    prose = "\n".join(texts.values())
    return (prose * (num_chars // len(prose) + 1))[:num_chars]


def _headed(what: str, figures: Row) -> Row:
    return {f"{what}, {name}": figures[name] for name in ("p50 ms", "p99 ms")}
