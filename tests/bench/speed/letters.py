"""`letters`: letters typed into the web editor in Chromium, by a writer who takes what they were about to write.

The writer types at a human rhythm, stops to think as the simulated one does (`tests.bench.quality.writers`), and takes
the grey text, or words of it, if it is what comes next and has been visible for long enough to be read. Screenshots of
some pauses are for a person to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.load.run import progress
from tests.bench.quality.passages import Passage
from tests.bench.quality.writers import CHORD_KEYS, MIN_VISIBLE_MS, TAKE_KEYS, key_intervals_ms, pause_before
from tests.bench.run import BenchDocument, Options
from tests.bench.server import start_server
from tests.bench.speed.page import VIEWPORT, open_page, running_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Keeps since when the grey text is what it is: words that are typed of it do not change it.
WATCH = """() => {
  const text = document.querySelector("#text");
  window.ghost = { text: "", since: performance.now() };
  new MutationObserver(() => {
    const now = text.querySelector(".tercet-ghost")?.textContent ?? "";
    if (now === ghost.text) return;
    const isRest = now !== "" && ghost.text.endsWith(now);
    ghost = { text: now, since: isRest ? ghost.since : performance.now() };
  }).observe(text, { childList: true, characterData: true, subtree: true });
}"""
READ = "() => ({ text: ghost.text, ms: performance.now() - ghost.since })"
SHOTS = 4  # of each letter


class LetterRow(msgspec.Struct, kw_only=True):
    """One letter. `num_changed`: keys after which another guess stood where one had stood."""

    name: str
    num_chars: int = 0
    num_keys: int = 0
    num_presses: int = 0  # keys or chords, after each of which something may be shown
    num_shown: int = 0
    num_changed: int = 0
    num_pauses: int = 0
    num_pauses_shown: int = 0
    num_pauses_taken: int = 0
    is_as_written: bool = False


def run_letters(
    options: Options, letters: Sequence[Passage], shots: Path, document: BenchDocument, console: Console
) -> None:
    """Fill the document.

    Args:
        shots: directory for the screenshots.

    Raises:
        StartError: Chromium or Playwright is missing, or the server does not get warm.
    """
    shots.mkdir(parents=True, exist_ok=True)
    document.workload = {"letters": len(letters), "viewport": VIEWPORT}
    with (
        running_chromium() as browser,
        start_server(console, options.models, options.server_settings) as server,
        progress(console, "Letters", len(letters)) as turn,
    ):
        for number, letter in enumerate(letters, 1):
            turn(f"letter {number}")
            page = open_page(browser, server.url, "normal")
            document.rows.append(_write(page, letter, f"letter {number}", shots))
            page.context.close()


def letters_table(rows: Sequence[LetterRow]) -> Table:
    table = Table("letter", "characters", "keys", "saved", title="Letters typed into the web editor")
    for heading in ("shown at keys", "another guess", "shown at pauses", "a word taken there", "as written"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_chars),
            str(row.num_keys),
            f"{1 - row.num_keys / row.num_chars:.1%}",
            f"{row.num_shown / row.num_presses:.1%}",
            f"{row.num_changed / row.num_presses:.1%}",
            f"{row.num_pauses_shown} of {row.num_pauses}",
            f"{row.num_pauses_taken} of {row.num_pauses_shown}",
            "yes" if row.is_as_written else "**no**",
        )
    return table


def _write(page: Page, letter: Passage, name: str, shots: Path) -> LetterRow:
    from tests.browser.driver import TEXT  # it needs Playwright

    text = letter.text[letter.start : letter.end]
    row = LetterRow(name=name, num_chars=len(text))
    intervals_ms = key_intervals_ms(len(text))
    page.locator("#text").focus()
    page.evaluate(WATCH)
    at, before = 0, ""
    while at < len(text):
        pause_ms = pause_before(text, at) if at else 0.0
        page.wait_for_timeout(pause_ms or next(intervals_ms))
        ghost: dict[str, Any] = page.evaluate(READ)
        shown = ghost["text"]
        row.num_presses += 1
        row.num_shown += bool(shown)
        row.num_changed += bool(before and shown) and not before.endswith(shown)
        if pause_ms:
            row.num_pauses += 1
            row.num_pauses_shown += bool(shown)
            if row.num_pauses % max(1, text.count(" ") // (8 * SHOTS)) == 0:
                page.screenshot(path=shots / f"{name.replace(' ', '-')}-{row.num_pauses:02}.png")
        taken = _taken(shown, text[at:]) if ghost["ms"] >= MIN_VISIBLE_MS else ""
        if taken == shown and taken:
            page.keyboard.press("Tab")
            row.num_keys += TAKE_KEYS
        elif taken:
            page.keyboard.press("Alt+ArrowRight")
            row.num_keys += CHORD_KEYS
        else:
            _press(page, text[at])
            row.num_keys += 1
            taken = text[at]
        if len(taken) > 1:
            row.num_pauses_taken += bool(pause_ms)
            if text[at + len(taken) : at + len(taken) + 1] == " ":  # it came with the text
                taken += " "
        at += len(taken)
        before = shown
    row.is_as_written = page.evaluate(TEXT).strip() == text.strip()
    return row


def _press(page: Page, character: str) -> None:
    page.keyboard.press("Enter") if character == "\n" else page.keyboard.type(character)


def _taken(shown: str, text: str) -> str:
    """What the writer takes: all of the grey text, or its first word; empty if that is not what comes next, or saves no
    key."""

    def fits(part: str) -> bool:
        return text.startswith(part) and not text[len(part) : len(part) + 1].isalnum()

    if len(shown) > TAKE_KEYS and fits(shown):
        return shown
    stripped = shown.lstrip()
    word = shown[: len(shown) - len(stripped)] + stripped.split(" ")[0].split("\n")[0]
    return word if len(word) > CHORD_KEYS and word != shown and fits(word) else ""
