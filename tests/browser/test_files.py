"""Documents in the browser, from and to files: opened, dropped, downloaded, saved on disk, printed."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Error, expect

from tests.browser.driver import Editor
from tests.browser.test_documents import drop, named, open_list, titles, write_file
from tests.e2e.harness import PATIENCE_S, until


def test_a_document_is_saved_to_a_file_on_disk(editor: Editor) -> None:
    """The file is one of the browser's private file system: its dialog cannot be driven."""
    page = editor.page
    page.evaluate(
        """() => {
            window.picked = 0;
            window.showSaveFilePicker = async ({ suggestedName }) => {
                window.picked += 1;
                const folder = await navigator.storage.getDirectory();
                return folder.getFileHandle(suggestedName, { create: true });
            };
        }"""
    )
    editor.type("# Notes\nfirst")
    editor.press("Control+s")
    expect(page.locator("#notice")).to_contain_text("Saved to “Notes.md”.")
    editor.type(" and second")
    open_list(editor)
    page.get_by_role("button", name="Save to disk").click()
    read = """async () => {
        const folder = await navigator.storage.getDirectory();
        const file = await (await folder.getFileHandle("Notes.md")).getFile();
        return file.text();
    }"""

    def has_both() -> bool:
        try:
            return bool(page.evaluate(read) == "# Notes\nfirst and second")
        except Error:  # it is being written
            return False

    until(has_both, PATIENCE_S, "the file is written")
    assert page.evaluate("picked") == 1


def test_the_whole_text_is_printed_and_nothing_else(editor: Editor) -> None:
    editor.text.focus()
    editor.page.keyboard.insert_text("".join(f"Paragraph {number} of the text.\n" for number in range(400)))
    data = editor.page.pdf()
    assert data.count(b"/Type /Page\n") in range(5, 16)  # 400 lines of 12 points, not one screen
    editor.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    editor.page.emulate_media(media="print")
    shown = editor.page.locator("body").inner_text()
    assert shown.split() == editor.value.split()


def test_files_are_opened_and_downloaded(editor: Editor, tmp_path: Path) -> None:
    page = editor.page
    editor.type("Here before")
    open_list(editor)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open a file").click()
    data = "\ufeff# Ümlaut: a/b?\r\nsecond\rthird\n".encode()
    chooser.value.set_files(write_file(tmp_path, "notes.md", data))
    until(lambda: editor.value == "# Ümlaut: a/b?\nsecond\nthird\n", PATIENCE_S, "the text")
    expect(editor.text).to_be_focused()
    items = open_list(editor)
    assert titles(items) == ["Ümlaut: a/b?", "Here before"]
    for extension in ("md", "txt"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Download as .{extension}").click()
        assert download.value.suggested_filename == f"Ümlaut a b.{extension}"
        assert Path(download.value.path()).read_bytes() == data


# Of a file: its bytes, keys, and its bytes after these.
EDITS = [
    (b"\xef\xbb\xbfone\r\n", "Control+Home T", b"\xef\xbb\xbfTone\r\n"),
    (b"one\r\ntwo\r\nthree", "Control+End Enter x", b"one\r\ntwo\r\nthree\r\nx"),
    (b"one\rtwo\r", "Control+Home Enter", b"\rone\rtwo\r"),
    (b"one\ntwo\r\nthree\rfour\r\n", "Control+Home ArrowDown x", b"one\nxtwo\r\nthree\rfour\r\n"),
    (b"one\ntwo\r\nthree\rfour\r\n", "Control+Home End Delete", b"onetwo\r\nthree\rfour\r\n"),
    (b"one\ntwo\r\nthree\rfour\r\n", "Control+Home x Control+End Backspace y", b"xone\ntwo\r\nthree\rfoury"),
]


def test_bytes_that_were_not_edited_stay(editor: Editor, tmp_path: Path) -> None:
    for number, (data, keys, edited) in enumerate(EDITS):
        drop(editor.page, write_file(tmp_path, f"{number}.txt", data))
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        until(lambda text=text: editor.value == text, PATIENCE_S, "the text")  # type: ignore[misc]
        for expected, pressed in ((data, []), (edited, keys.split())):
            editor.press(*pressed)
            open_list(editor)
            with editor.page.expect_download() as download:
                editor.page.get_by_role("button", name="Download as .txt").click()
            assert Path(download.value.path()).read_bytes() == expected
            editor.press("Escape")


def test_dropped_files_become_documents(editor: Editor, tmp_path: Path) -> None:
    editor.type("Here before")
    drop(editor.page, write_file(tmp_path, "a.txt", b"From a"), write_file(tmp_path, "b.md", b"From b"))
    expect(named(editor.page)).to_have_text("From b")
    assert sorted(titles(open_list(editor))) == ["From a", "From b", "Here before"]


REFUSED = [
    ("photo.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "“photo.png” is not a text file (UTF-8)."),
    ("zeros.txt", b"text\0text", "“zeros.txt” is not a text file (UTF-8)."),
    ("latin.txt", "Müller".encode("latin-1"), "“latin.txt” is not a text file (UTF-8)."),
    ("large.txt", b"a" * 5_000_001, "“large.txt” is larger than 5 MB."),
]


def test_other_files_are_refused_with_the_reason(editor: Editor, tmp_path: Path) -> None:
    page = editor.page
    editor.type("Here before")
    open_list(editor)
    for name, data, message in REFUSED:
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Open a file").click()
        chooser.value.set_files(write_file(tmp_path, name, data))
        expect(page.locator("#notice")).to_contain_text(message)
        expect(editor.announcements).to_have_text(message)
        assert editor.value == "Here before"
