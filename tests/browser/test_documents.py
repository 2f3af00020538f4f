"""Documents in the browser: several, in several windows, through crashes and refused storage."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Dialog, Error, Locator, Page, expect

from tests.browser.driver import Editor
from tests.e2e.harness import PATIENCE_S, until

OpenPage = Callable[..., Editor]
LONG = "".join(f"Line {number} of a long text that goes on for a while.\n" for number in range(4000))
FULL = "Not saved: this browser refuses storage. Download it to keep it."


def named(page: Page) -> Locator:
    """The button that names the current document and opens the list."""
    return page.get_by_role("button", name=re.compile("^Documents"))


def open_list(editor: Editor) -> Locator:
    """Open the Documents popover; returns its items."""
    named(editor.page).click()
    expect(editor.page.get_by_role("heading", name="Documents")).to_be_visible()
    return editor.page.locator("#documents li")


def titles(items: Locator) -> list[str]:
    return [text.splitlines()[0] for text in items.locator(".title").all_inner_texts()]


def start_new(editor: Editor, text: str = "") -> None:
    open_list(editor)
    editor.page.get_by_role("button", name="New document").click()
    expect(editor.text).to_be_focused()
    editor.page.keyboard.insert_text(text)


def clear(editor: Editor) -> None:
    open_list(editor)
    editor.page.get_by_role("button", name="Clear this document").click()


def second_window(editor: Editor) -> Editor:
    """Another window of the same browser."""
    other = Editor(editor.page.context.new_page(), editor.tercet)
    other.page.goto(editor.tercet.url)
    other.wait_until_ready()
    return other


def stored(editor: Editor) -> list[str]:
    """The texts of all stored documents."""
    documents: list[dict[str, Any]] = editor.page.evaluate(STORED)
    return sorted(document["text"] for document in documents)


def until_stored(editor: Editor, texts: list[str]) -> None:
    until(lambda: stored(editor) == texts, PATIENCE_S, f"{texts} are stored, not {stored(editor)}")


def store_as_another(page: Page, changes: dict[str, Any], age_ms: int = 0, *, is_said: bool) -> None:
    """Store the only document, with changes, as a window does, which may be closed before it says so to the others."""
    page.evaluate(STORE, [changes, age_ms, is_said])


STORED = """() => new Promise((resolve, reject) => {
    const opening = indexedDB.open("tercet", 1);
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
        const request = opening.result.transaction("documents").objectStore("documents").getAll();
        request.onsuccess = () => { opening.result.close(); resolve(request.result); };
        request.onerror = () => reject(request.error);
    };
})"""


STORE = """async ([changes, ageMs, isSaid]) => {
    const opening = indexedDB.open("tercet", 1);
    await new Promise(resolve => { opening.onsuccess = resolve; });
    const store = () => opening.result.transaction("documents", "readwrite").objectStore("documents");
    const [stored] = await new Promise(resolve => {
        store().getAll().onsuccess = ({ target }) => resolve(target.result);
    });
    const written = { ...stored, ...changes, changedMs: stored.changedMs - ageMs };
    await new Promise(resolve => { store().put(written).onsuccess = resolve; });
    if (isSaid) new BroadcastChannel("tercet.documents").postMessage({ written });
}"""


def write_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def drop(page: Page, *files: Path) -> None:
    """Drag files over the page and drop them: real events, with files made from the same bytes."""
    contents = [{"name": file.name, "bytes": list(file.read_bytes())} for file in files]
    transfer = page.evaluate_handle(
        """contents => {
            const transfer = new DataTransfer();
            for (const { name, bytes } of contents) transfer.items.add(new File([new Uint8Array(bytes)], name));
            return transfer;
        }""",
        contents,
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event("body", event, {"dataTransfer": transfer})


# ---- several documents ----


def test_documents_are_listed_opened_and_created(editor: Editor) -> None:
    expect(named(editor.page)).to_have_text("Untitled")
    editor.type("# The first line\nand more")
    start_new(editor, "\n  Second\nis its title")
    start_new(editor, "Third")
    items = open_list(editor)
    assert titles(items) == ["Third", "Second", "The first line"]
    expect(items.locator("[aria-current]")).to_have_text(re.compile("^Third"))
    expect(items.nth(2)).to_contain_text("6 words")
    items.get_by_text("The first line").click()
    expect(editor.text).to_be_focused()
    expect(items.first).to_be_hidden()
    expect(named(editor.page)).to_have_text("The first line")
    expect(editor.page).to_have_title("The first line – Tercet")
    assert editor.value == "# The first line\nand more"
    editor.page.keyboard.type("!")  # the caret is where it was
    assert editor.value.endswith("more!")
    editor.press("Control+Home")
    editor.page.keyboard.type("Now ")
    expect(named(editor.page)).to_have_text("Now # The first line")


def test_documents_are_reached_with_the_keyboard_alone(editor: Editor) -> None:
    editor.type("One")
    start_new(editor, "Two")
    named(editor.page).focus()
    editor.press("Enter", "Tab", "Tab", "Tab", "Enter")  # past "Two" and its Delete
    expect(named(editor.page)).to_have_text("One")
    expect(editor.text).to_be_focused()
    assert editor.value == "One"


def test_an_empty_document_is_not_kept(editor: Editor) -> None:
    editor.type("One")
    start_new(editor)
    start_new(editor, "Two")
    editor.press("Control+a", "Delete")
    start_new(editor)
    assert titles(open_list(editor)) == ["Untitled", "One"]
    until_stored(editor, ["One"])


def test_the_text_of_an_earlier_version_becomes_a_document(editor: Editor) -> None:
    page = editor.page
    page.evaluate("""localStorage.setItem("tercet.text", JSON.stringify("Written\\nlong ago"))""")
    editor.reload()
    assert editor.value == "Written\nlong ago"
    expect(named(page)).to_have_text("Written")
    assert page.evaluate("localStorage.getItem('tercet.text')") is None
    until_stored(editor, ["Written\nlong ago"])


# ---- undo ----


def test_a_deleted_document_comes_back(editor: Editor) -> None:
    editor.type("Keep this")
    start_new(editor, "Delete this")
    items = open_list(editor)
    items.get_by_role("button", name="Delete Delete this").click()
    assert titles(items) == ["Keep this"]
    expect(named(editor.page)).to_have_text("Keep this")
    assert editor.value == "Keep this"
    notice = editor.page.locator("#notice")
    expect(notice).to_contain_text("Deleted “Delete this”.")
    expect(editor.announcements).to_have_text("Deleted “Delete this”. Undo is available.")
    until_stored(editor, ["Keep this"])
    notice.get_by_role("button", name="Undo").click()
    expect(notice).to_be_hidden()
    assert editor.value == "Delete this"
    until_stored(editor, ["Delete this", "Keep this"])
    items = open_list(editor)
    items.get_by_role("button", name="Delete Keep this").click()
    assert editor.value == "Delete this"
    notice.get_by_role("button", name="Undo").click()
    until_stored(editor, ["Delete this", "Keep this"])


def test_the_last_document_can_be_deleted_too(editor: Editor) -> None:
    editor.type("Only one")
    open_list(editor).get_by_role("button", name="Delete Only one").click()
    assert editor.value == ""
    until_stored(editor, [])
    editor.reload()
    assert editor.value == ""


def test_clear_offers_an_undo_that_keeps_what_was_written_since(editor: Editor) -> None:
    page = editor.page
    undo = page.get_by_role("button", name="Undo")
    editor.type("All of this")
    clear(editor)
    assert editor.value == ""
    page.clock.install()  # from here on, time passes as the test says
    expect(undo).to_be_visible()
    undo.click()
    expect(undo).to_be_hidden()
    assert editor.value == "All of this"
    clear(editor)
    editor.type("Something else")
    undo.click()
    assert editor.value == "All of this\n\nSomething else"
    start_new(editor, "Typed")
    clear(editor)
    editor.press("x", "Backspace")
    undo.click()
    assert editor.value == "Typed"


def test_the_undo_of_clear_returns_to_its_document(editor: Editor) -> None:
    undo = editor.page.get_by_role("button", name="Undo")
    editor.type("Cleared")
    clear(editor)
    start_new(editor, "Another")
    undo.click()
    assert editor.value == "Cleared"
    clear(editor)
    editor.type("Since then")
    open_list(editor).get_by_text("Another").click()
    undo.click()
    assert editor.value == "Cleared\n\nSince then"
    editor.text.blur()
    until_stored(editor, ["Another", "Cleared\n\nSince then"])


def test_undo_does_not_reach_into_another_document(editor: Editor) -> None:
    editor.type("One")
    start_new(editor)
    for _ in range(2):
        editor.press("Control+z")
        assert editor.value == ""
    editor.type("Two")
    open_list(editor).get_by_text("One").click()
    for key in ("Control+z", "Control+z", "Control+Shift+Z"):  # after three keys a garbled text may be whole again
        editor.press(key)
        assert editor.value == "One"


def test_a_notice_stays_for_ten_seconds_and_while_it_is_pointed_at(editor: Editor) -> None:
    page = editor.page
    page.clock.install()
    editor.reload()
    editor.type("All of this")
    clear(editor)
    undo = page.get_by_role("button", name="Undo")
    page.clock.run_for(10_000)
    expect(undo).to_be_visible()
    undo.hover()
    page.clock.run_for(60_000)
    expect(undo).to_be_visible()
    page.mouse.move(0, 0)
    page.clock.run_for(60_000)
    expect(undo).to_be_hidden()


# ---- nothing is lost ----


def test_caret_selection_and_scroll_position_survive_a_reload(editor: Editor) -> None:
    page = editor.page
    editor.text.focus()
    page.keyboard.insert_text(LONG[:20_000])
    editor.press("Control+Home", *["ArrowDown"] * 60, *["ArrowRight"] * 5, *["Shift+ArrowRight"] * 7)
    before = editor.selection
    assert page.evaluate("scrollY") > 500
    editor.reload()
    assert editor.selection == before
    assert page.evaluate("scrollY") > 500
    start_new(editor, "Another")
    open_list(editor).nth(1).locator(".title").click()
    assert editor.selection == before
    assert page.evaluate("scrollY") > 500  # the page is scrolled to the caret


def test_a_crash_loses_nothing_that_was_typed_before_a_pause(editor: Editor) -> None:
    editor.type("Written before the crash.")
    until_stored(editor, ["Written before the crash."])
    with editor.page.expect_event("crash"), pytest.raises(Error):
        editor.page.goto("chrome://crash")
    other = second_window(editor)
    assert other.value == "Written before the crash."


def test_the_text_is_saved_while_the_writer_keeps_typing(editor: Editor) -> None:
    """A save that every key postpones would never happen."""
    editor.text.focus()
    for _ in range(12):
        editor.page.keyboard.type("word ")
        editor.page.wait_for_timeout(100)
    assert stored(editor)
    assert stored(editor)[0].startswith("word word ")


def test_closing_and_leaving_the_page_saves_at_once(editor: Editor) -> None:
    editor.type("Saved as the page goes away")
    editor.page.goto("about:blank")
    editor.page.go_back()
    until(lambda: editor.value == "Saved as the page goes away", PATIENCE_S, "the text, once the documents are read")
    other = second_window(editor)
    other.type(", or is closed")
    other.page.close(run_before_unload=True)
    again = second_window(editor)
    until(
        lambda: again.value == "Saved as the page goes away, or is closed",
        PATIENCE_S,
        "the text, once the documents are read",
    )


def test_another_window_follows_the_same_document(editor: Editor) -> None:
    editor.type("First")
    editor.text.blur()
    other = second_window(editor)
    assert other.value == "First"
    editor.type(", then second")
    until(lambda: other.value == "First, then second", PATIENCE_S, "the text")
    other.type(", then third")
    until(lambda: editor.value == "First, then second, then third", PATIENCE_S, "the text")
    editor.text.focus()
    editor.press("Control+z")  # the steps of this window fit its own text only
    assert editor.value == "First, then second, then third"
    clear(editor)
    until(lambda: other.value == "", PATIENCE_S, "the text")


def test_an_open_list_follows_the_other_windows(editor: Editor) -> None:
    """With what they write, what they delete, and what one wrote that was closed before it said so."""
    editor.type("The one")
    other = second_window(editor)
    start_new(other, "The other")
    for window, value in ((editor, "The one"), (other, "The other")):  # each window has a document of its own
        window.reload()
        assert window.value == value
    items = open_list(editor)
    until(lambda: titles(items) == ["The other", "The one"], PATIENCE_S, "the other window's document")
    editor.page.keyboard.press("Tab")
    opening = editor.page.locator("#documents [value=open]:focus")
    other.type(", still")
    until(lambda: titles(items) == ["The other, still", "The one"], PATIENCE_S, "its new text")
    expect(opening).to_have_count(1)  # the focus is where it was
    open_list(other).get_by_role("button", name="Delete The other, still").click()
    until(lambda: titles(items) == ["The one"], PATIENCE_S, "that it was deleted")
    editor.press("Escape")
    store_as_another(other.page, {"id": "unsaid", "text": "Unsaid"}, 60_000, is_said=False)
    items = open_list(editor)
    until(lambda: titles(items) == ["The one", "Unsaid"], PATIENCE_S, "what is stored")


@pytest.mark.parametrize("is_first_faster", [True, False])
def test_changes_in_two_windows_at_the_same_time_are_both_kept(editor: Editor, *, is_first_faster: bool) -> None:
    clock = editor.page.context.clock
    clock.install()  # now: callbacks that wait already would come in spite of the pause
    editor.type("Start.")
    editor.text.blur()
    other = second_window(editor)
    assert other.value == "Start."
    # Both type before either has saved: the timers wait.
    first, second = (editor, other) if is_first_faster else (other, editor)
    clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))
    first.page.keyboard.insert_text(" One way.")
    second.page.keyboard.insert_text(" Another way.")
    clock.resume()
    until(lambda: len(stored(editor)) == 2, PATIENCE_S, "two documents")
    until_stored(editor, ["Start. Another way.", "Start. One way."])
    assert {editor.value, other.value} == {"Start. Another way.", "Start. One way."}
    listed = titles(open_list(editor))
    assert sorted(title.removesuffix(" (copy)") for title in listed) == stored(editor)
    assert sum(title.endswith(" (copy)") for title in listed) == 1
    editor.press("Escape")
    notices = [window.page.locator("#notice") for window in (editor, other)]
    assert sum("Both versions are kept" in (notice.text_content() or "") for notice in notices) == 1
    for window in (editor, other):
        window.type(" More.")
        window.text.blur()
    until_stored(editor, ["Start. Another way. More.", "Start. One way. More."])


@pytest.mark.parametrize("is_said", [True, False])
def test_a_version_written_without_having_seen_ours_does_not_replace_it(editor: Editor, *, is_said: bool) -> None:
    """Two windows can write before they hear of each other: the one whose version is not stored continues in a copy."""
    editor.type("Ours")
    until_stored(editor, ["Ours"])
    other = editor.page.context.new_page()
    other.goto(editor.tercet.url + "/docs")  # has no document open
    store_as_another(other, {"text": "Theirs", "versions": {"other": 1}}, 60_000, is_said=is_said)
    ours = "Ours"
    if not is_said:
        editor.page.keyboard.insert_text(", too")
        editor.text.blur()
        ours += ", too"
    until_stored(editor, [ours, "Theirs"])
    expect(named(editor.page)).to_have_text(f"{ours} (copy)")
    assert editor.value == ours


def test_a_full_storage_is_said_and_the_text_can_be_downloaded(editor: Editor) -> None:
    """The browser refuses to store anything more."""
    page = editor.page
    quota = page.context.new_cdp_session(page)
    quota.send("Storage.overrideQuotaForOrigin", {"origin": editor.tercet.url, "quotaSize": 1})
    editor.type("Not to be lost")
    expect(editor.status).to_contain_text(FULL)
    expect(editor.announcements).to_have_text(FULL)
    start_new(editor, "Nor this")
    items = open_list(editor)
    assert titles(items) == ["Nor this", "Not to be lost"]
    items.get_by_text("Not to be lost").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download", exact=True).click()
    assert download.value.suggested_filename == "Not to be lost.md"
    assert Path(download.value.path()).read_text() == "Not to be lost"
    dialogs: list[str] = []

    def stay(dialog: Dialog) -> None:
        dialogs.append(dialog.type)
        dialog.dismiss()

    page.on("dialog", stay)
    with pytest.raises(Error):
        page.reload(timeout=2000)  # never comes to an end
    assert dialogs == ["beforeunload"]
    assert editor.value == "Not to be lost"
    quota.send("Storage.overrideQuotaForOrigin", {"origin": editor.tercet.url})
    editor.press("Control+End")
    editor.type(", now saved")
    expect(editor.status).not_to_contain_text("Not saved")
    editor.press("Control+End")
    until_stored(editor, ["Nor this", "Not to be lost, now saved"])


def test_a_browser_without_storage_says_so(open_page: OpenPage) -> None:
    """Chromium's setting to block a site's data makes its storages throw, which this script does in its place."""
    editor = open_page(mode="off")
    page = editor.page
    page.add_init_script(
        "for (const name of ['localStorage', 'indexedDB'])"
        " Object.defineProperty(window, name, { get() { throw new DOMException('', 'SecurityError'); } })"
    )
    editor.reload()
    expect(editor.status).to_contain_text("ready")
    expect(editor.status).not_to_contain_text("Not saved")
    editor.type("Not kept")
    expect(editor.status).to_contain_text(FULL)
    page.on("dialog", lambda dialog: dialog.accept())


def test_a_long_document_delays_no_key(editor: Editor, tmp_path: Path) -> None:
    """Saving 200 kB happens between keys and takes less than a frame; printed, because it depends on the machine."""
    page = editor.page
    drop(page, write_file(tmp_path, "long.txt", LONG.encode()))
    until(lambda: editor.value == LONG, PATIENCE_S, "the text")
    page.evaluate(
        """() => {
            window.saves = [];
            const original = IDBObjectStore.prototype.put;
            IDBObjectStore.prototype.put = function (...item) {
                const start = performance.now();
                const request = original.apply(this, item);
                window.saves.push([performance.now() - start, window.isInKey === true]);
                return request;
            };
            addEventListener("keydown", () => { window.isInKey = true; }, { capture: true });
            addEventListener("input", () => { window.isInKey = false; });  // after the page's own listeners
        }"""
    )
    for _ in range(20):
        page.keyboard.press("x")
        page.wait_for_timeout(50)
    until_stored(editor, [LONG + "x" * 20])
    saves: list[tuple[float, bool]] = page.evaluate("window.saves")
    assert saves
    print(f"{len(LONG)} characters: {len(saves)} writes, {max(ms for ms, _ in saves):.1f} ms at most")
    assert not any(is_in_key for _, is_in_key in saves)


# ---- settings in words ----


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({}, "As I type: normal"),
    ({"pauses": True}, "As I type: normal"),
    ({"pauses": False}, "Only when I ask"),
    ({"pauses": False, "mode": "quiet"}, "As I type: seldom"),
    ({"mode": "pauses"}, "When I pause"),
]


def test_the_choice_of_suggestions_is_kept_and_the_earlier_checkbox_is_understood(editor: Editor) -> None:
    page = editor.page
    for settings, label in CHOICES:
        page.evaluate("settings => localStorage.setItem('tercet.settings', JSON.stringify(settings))", settings)
        editor.reload()
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Suggest", exact=True).locator("option:checked")).to_have_text(label)
