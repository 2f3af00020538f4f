"""Records a moving picture of the page `/slots`, from the start to two concurrent requests.

    python -m tests.browser.record_slots docs/images

Writes slots.gif. All is real, at its real speed: a server of the embedded checkpoint, Chromium, and requests of 60
tokens. A frame lasts as long as it was shown, 2 s at most.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import ARGUMENTS, CHROMIUM
from tests.e2e.harness import Tercet, until

SIZE = {"width": 860, "height": 470}
FRAME_S = 0.2
MAX_FRAME_S = 2.0
NUM_COLORS = 128
OPENINGS = ("The old man looked at the sea and", "She opened the letter, and")


class Recorder:
    """Screenshots of a page; those that show the same as the one before only make it last longer."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.frames: list[tuple[bytes, float]] = []  # PNG, and when it was taken

    def record(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (now := time.monotonic()) < until_s:
            frame = self._page.screenshot()
            if not self.frames or frame != self.frames[-1][0]:
                self.frames.append((frame, now))
            time.sleep(max(0.0, FRAME_S - (time.monotonic() - now)))

    def save(self, path: Path) -> None:
        images = [Image.open(io.BytesIO(frame)).convert("RGB") for frame, _ in self.frames]
        # One palette for all frames, so that nothing flickers; its method keeps colours that few pixels have.
        strip = Image.new("RGB", (images[0].width, images[0].height * len(images)))
        for index, image in enumerate(images):
            strip.paste(image, (0, index * image.height))
        palette = strip.quantize(NUM_COLORS, method=Image.Quantize.MAXCOVERAGE)
        times = [taken_at for _, taken_at in self.frames]
        shown_s = [later - earlier for earlier, later in pairwise(times)] + [MAX_FRAME_S]
        frames = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
        frames[0].save(
            path, save_all=True, append_images=frames[1:], loop=0, optimize=True,
            duration=[int(1e3 * min(MAX_FRAME_S, seconds)) for seconds in shown_s],
        )  # fmt: skip


def request(tercet: Tercet, opening: str, repeat: int) -> None:
    for seed in range(repeat):
        tercet.ask(opening, length=60, seed=seed)


def main(folder: Path) -> None:
    """Write the picture into a folder."""
    with tempfile.TemporaryDirectory() as base, sync_playwright() as playwright:
        tercet = Tercet(Path(base), models="embedded*2", dtype="auto", placement="spread")
        tercet.start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_context(viewport=SIZE, color_scheme="light").new_page()  # type: ignore[arg-type]
        until(tercet.slots, 60, "the gateway")
        page.goto(f"{tercet.url}/slots")
        recorder = Recorder(page)
        while not all(slot["state"] == "warm" for slot in tercet.slots()):
            recorder.record(FRAME_S)
        recorder.record(2)
        threads = [threading.Thread(target=request, args=(tercet, opening, 20)) for opening in OPENINGS]
        for thread in threads:
            thread.start()
        recorder.record(3)
        for thread in threads:
            thread.join()
        recorder.record(3)
        browser.close()
        assert tercet.stop() == 0
    recorder.save(folder / "slots.gif")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
