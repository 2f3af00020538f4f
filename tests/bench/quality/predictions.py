"""Single predictions, without a writer: against what follows in a text (`stated`), and by KeyTypeBench (`keytype`).

Of the words that are stated with a probability of 0.3, three in ten should come next, and taking the first suggestion
should save as many keys on average as it states. The cases of KeyTypeBench (github.com/johnbean393/KeyType) are not in
the tree: texts with a cursor, where one of some texts should be shown, or nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, count, starmap, takewhile
from statistics import fmean
from typing import Any, NamedTuple

from tests.bench.quality.gap import choose_gaps
from tests.bench.quality.keystrokes import Answer
from tests.bench.quality.writers import comes_next, is_inside_word
from tests.bench.results import Row

SUITES = ("core", "edge")
SILENCE = 0.3  # KeyTypeBench's utility of showing nothing where something should be shown


class Place(NamedTuple):
    """A cursor at `text[at]`; `after` is the text after a gap."""

    kind: str
    text: str
    at: int
    after: str = ""


KINDS: Mapping[str, Callable[[str, int], bool]] = {
    "append": lambda text, at: text[at - 1].isspace() and not text[at].isspace(),
    "inside a word": is_inside_word,
}


def choose_places(texts: Sequence[Sequence[str]], num_places: int, rng: random.Random) -> list[Place]:
    """`num_places` of each kind, as many in each group of texts; gaps are of one or two words."""
    number, places = num_places // len(texts), []
    for group in texts:
        for kind, is_there in KINDS.items():
            for text in rng.choices(group, k=number):
                tries = (rng.randrange(1, len(text)) for _ in count())
                places.append(Place(kind, text, next(at for at in tries if is_there(text, at))))
        gaps = [gap for gap in choose_gaps(group, number, rng) if gap.num_words <= 2]
        gaps = rng.sample(gaps, min(number, len(gaps)))
        places += [Place("gap", gap.text, gap.start, gap.after) for gap in gaps]
    return places


def stated_rows(model: str, places: Sequence[Place], answers: Sequence[Answer]) -> Iterator[Row]:
    """For each kind of place: words by their stated probability, each bin to 0.1 more; and the keys that the first
    suggestions save (`shared.text.expected_keys`). Means of what is stated, and of what comes true."""
    cases: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (kind, text, at, _), answer in zip(places, answers, strict=True):
        for rank, words in enumerate(answer.words):
            right = [(len(start), comes_next(start, text, at)) for start in accumulate(word for word, _ in words)]
            for (_, probability), (_, is_right) in zip(words, right, strict=True):
                bin_start = f"{int(min(probability, 0.99) * 10) / 10}"
                cases.setdefault((kind, bin_start), []).append((probability, is_right))
            if rank == 0:
                saved = max((end - 1 for end, _ in takewhile(lambda each: each[1], right)), default=0)
                cases.setdefault((kind, "keys"), []).append((answer.usefulness[0], saved))
    for (kind, of), own in sorted(cases.items()):
        stated, true = map(fmean, zip(*own, strict=True))
        row: Row = {"model": model, "place": kind, "of": of, "cases": len(own), "stated": stated, "true": true}
        yield row | {"true − stated": true - stated, "stated ÷ true": stated / (true or 1)}


def keytype_rows(model: str, cases: Sequence[Any], answers: Sequence[Answer], min_useful: float) -> Iterator[Row]:
    """A row for each suite and one for both. Of each answer the first suggestion that saves this many keys is shown."""
    for suite in (*SUITES, "both"):
        shown = []
        for case, answer in zip(cases, answers, strict=True):
            if suite in (*case["suites"], "both"):
                useful = (
                    text for text, keys in zip(answer.suggestions, answer.usefulness, strict=True) if keys >= min_useful
                )
                shown.append((case["expected"].get("shownAcceptable"), next(useful, "")))
        inserts = [(text, texts) for texts, text in shown if texts is not None]
        num_shown, num_missed = sum(text != "" for _, text in shown), sum(text == "" for text, _ in inserts)
        num_right, num_silent = sum(starmap(is_acceptable, inserts)), len(shown) - num_shown - num_missed
        yield {
            "model": model,
            "suite": suite,
            "cases": len(shown),
            "precision when shown": num_right / max(1, num_shown),
            "coverage": num_right / max(1, len(inserts)),
            "wrong shows": (num_shown - num_right) / len(shown),
            "silent in suppress cases": f"{num_silent} of {len(shown) - len(inserts)}",
            "utility": (num_right + SILENCE * num_missed + num_silent) / len(shown),
        }


def is_acceptable(shown: str, acceptable: Sequence[str]) -> bool:
    """Whether what is shown begins with an acceptable text, or is its beginning and ends with a word."""
    text, *others = (" ".join(each.split()) for each in (shown, *acceptable))
    return any(text and (text.startswith(other) or comes_next(text, other, 0)) for other in others)
