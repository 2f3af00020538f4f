"""When ideas are requested, and what is shown together: modules of the package, in Node, in virtual time."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from tests.npm_package import NpmPackage

# A completer with a clock that `run(ms)` moves, and a server that answers within `latencyMs`. `ideas` and `predictions`
# have the times at which one was requested; `shown()` is what is on show. `begin` starts with another text and a new
# completer; `press` returns whether a chord was handled; `compose` replaces what an input method composes.
WORLD = """
import { Completer } from "./node_modules/tercet-client/completer.js";
let completer, nowMs = 0, timers = [], numTimers = 0, text, after, composed, view, answer = () => [], latencyMs = 40;
performance.now = () => nowMs;
globalThis.setTimeout = (run, ms = 0) => (timers.push({ id: ++numTimers, atMs: nowMs + ms, run }), numTimers);
globalThis.clearTimeout = (id) => (timers = timers.filter((each) => each.id !== id));
async function run(ms) {
  for (const endMs = nowMs + ms; ; await new Promise((done) => setImmediate(done))) {
    const [next] = timers.filter(({ atMs }) => atMs <= endMs).sort((a, b) => a.atMs - b.atMs);
    nowMs = next?.atMs ?? endMs;
    if (!next) return;
    timers.splice(timers.indexOf(next), 1);
    next.run();
  }
}
const ideas = [], predictions = [];
const complete = ({ strategy }) => new Promise((done) => {
  (strategy === "predict" ? predictions : ideas).push(nowMs);
  const sentences = answer(strategy).map(([value, usefulness]) => ({ value, usefulness, seed: 1 }));
  setTimeout(() => done({ id: "1", sentences }), latencyMs);
});
async function* stream(request) {
  const data = await complete(request);
  for (const [branch, sentence] of data.sentences.entries()) yield { name: "sentence", data: { ...sentence, branch } };
  yield { name: "done", data };
}
const type = async (typed, ms = 0) => (text += typed, completer.changed(), await run(ms));
const write = async (typed) => { for (const letter of typed) if (!completer.type(letter)) await type(letter); };
const begin = (before, behind = "") => {
  [text, after, composed, predictions.length] = [before, behind, "", 0];
  completer = new Completer({ context: () => text, after: () => after, insertsSpace: true, show, client, insert });
};
function press(chord, more = {}) {
  const [key, ...modifiers] = chord.split("+").reverse();
  const code = /^\\d$/.test(key) ? `Digit${key}` : key;
  const [altKey, ctrlKey] = ["Alt", "Control"].map((modifier) => modifiers.includes(modifier));
  return completer.press({ key, code, altKey, ctrlKey, preventDefault() {}, ...more });
}
async function compose(letters, ms = 100) {
  text = text.slice(0, text.length - composed.length) + (composed = letters);
  completer.changed({ inputType: "insertCompositionText", isComposing: true });
  await run(ms);
}
async function commit(letters, ms = 100) {
  text = text.slice(0, text.length - composed.length) + letters;
  composed = "";
  completer.changed({});
  await run(ms);
}
const insert = (inserted, numReplaced) => {
  text = text.slice(0, text.length - numReplaced) + inserted;
  completer.changed();
};
const client = { complete, stream, feedback: async () => {} };
const show = (each) => (view = each);
const shown = () => view.suggestions.map(({ rest }) => rest);
const ghost = () => view.chosen?.rest ?? "";
begin("");
const print = (value) => console.log(JSON.stringify(value));
"""

# Times between keys; one in 33 of the second kind is a hesitation.
RHYTHMS = """
const uniform = (() => { let x = 7; return () => (x = (x * 16807) % 2147483647) / 2147483647; })();
const normal = () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
const rhythms = {
  even: () => 180 + 20 * (uniform() - 0.5),
  hesitating: () => (uniform() < 0.03 ? 700 + 500 * uniform() : 185 * Math.exp(0.35 * normal())),
  slow: () => 300 * Math.exp(0.3 * normal()),
};
const delays = {};
for (const [name, interval] of Object.entries(rhythms)) {
  delays[name] = [];
  for (let pause = 0; pause < 100; pause += 1) {
    for (let number = 0; number < 30; number += 1) await type("ab cd".charAt(number % 5), interval());
    const keyMs = nowMs, numIdeas = ideas.length;
    await type("e", 6000);
    delays[name].push(ideas[numIdeas] - keyMs);
  }
}
print(delays);
"""


def run_program(npm_package: NpmPackage, program: str) -> Any:
    return json.loads(npm_package.run("node", "--input-type=module", "--eval", WORLD + program))


def test_an_idea_is_requested_on_time_in_every_rhythm(npm_package: NpmPackage) -> None:
    for name, delays in run_program(npm_package, RHYTHMS).items():
        median, p90 = statistics.median(delays), statistics.quantiles(delays, n=10)[-1]
        print(f"{name}: median {median:.0f} ms, p90 {p90:.0f} ms")
        assert 1000 <= median <= 1250
        assert p90 <= 1500
    assert run_program(npm_package, "latencyMs = 1300; await type('The', 3000); print(ideas);") == [1500]


FRAGMENT = """
latencyMs = LATENCY_MS;
answer = (name) => name === "predict" ? [["FRAGMENT", 9]].slice(predictions.length - 1) : [[" old man was gone,", 9]];
await type("The", 900);
WRITER
await run(3000);
print(shown());
"""


@pytest.mark.parametrize(
    ("fragment", "latency_ms", "writer", "expected"),
    [
        (" sea", 40, "", [" old man was gone,", " sea"]),
        (" sea was", 150, "", [" old man was gone,", " sea was"]),
        (" sea was calm", 40, "", [" sea was calm", " old man was gone,"]),
        (" sea", 700, "latencyMs = 40;", [" sea", " old man was gone,"]),  # it has stood for 540 ms
        (" sea", 40, "completer.choose(1);", [" sea"]),
        (" sea was", 40, "completer.acceptWord();", ["was", " old man was gone,"]),
    ],
)
def test_an_idea_replaces_a_fragment_that_was_left_standing(
    npm_package: NpmPackage, fragment: str, latency_ms: int, writer: str, expected: list[str]
) -> None:
    program = FRAGMENT.replace("FRAGMENT", fragment).replace("WRITER", writer).replace("LATENCY_MS", str(latency_ms))
    assert run_program(npm_package, program) == expected


def test_an_idea_stays_while_it_is_typed(npm_package: NpmPackage) -> None:
    program = """
    answer = (strategy) => (strategy === "predict" ? [] : [[" old man was gone. He", 9]]);
    await type("The", 3000);
    const num = predictions.length, ghosts = [];
    for (const letter of " old") await type(letter, 2000), ghosts.push(ghost());
    print([ghosts, predictions.length - num, ideas.length]);
    """
    ghosts = ["old man was gone.", "ld man was gone.", "d man was gone.", " man was gone."]
    assert run_program(npm_package, program) == [ghosts, 0, 1]


def test_at_a_pause_ideas_come_and_stay_while_they_are_typed(npm_package: NpmPackage) -> None:
    """In the mode `pauses`. What none of them agrees with closes them, and the next pause brings others."""
    program = """
    completer.mode = "pauses";
    answer = () => [[" and the sea", 9], [" of it", 9]];
    await type("The", 100), press("Escape"); // what the pause would bring does not come
    await run(6000);
    for (const letter of " old man") await type(letter, 60 + 30 * (text.length % 3));
    const numEarly = ideas.length, ghosts = [];
    await run(500);
    for (const letter of " and") await type(letter, 1200), ghosts.push(ghost());
    text = text.slice(0, -1), completer.changed({ inputType: "deleteContentBackward" }), ghosts.push(ghost());
    const num = ideas.length;
    await type("~");
    const numLeft = shown().length;
    await run(500);
    print([numEarly, num, ghosts, numLeft, ideas.length]);
    """
    ghosts = ["and the sea", "nd the sea", "d the sea", " the sea", "d the sea"]
    assert run_program(npm_package, program) == [0, 1, ghosts, 0, 2]


def test_a_steady_writer_sees_no_list_before_a_pause(npm_package: NpmPackage) -> None:
    """The first answer says what the writer types, so that it stays on show."""
    program = """
    const whole = "The old man looked at the sea and", opened = [];
    answer = () => [[`${whole.slice(text.length)} then`, 9], ["; otherwise", 9]];
    for (const letter of whole) await type(letter, 100), opened.push(view.isListed);
    const isShown = ghost() === " then";
    await run(500);
    print([isShown, opened.some(Boolean), view.isListed]);
    """
    assert run_program(npm_package, program) == [True, False, True]
    before_text = program.replace("opened = [];", 'opened = []; after = "\\n\\nmore";')  # which a list would hide
    assert run_program(npm_package, before_text) == [True, False, False]


# The first answer comes for "a", the second for "ab".
ALTERNATIVES = """
completer.minUsefulness = 2;
const answers = ANSWERS, found = IDEAS;
answer = (strategy) => (strategy === "predict" ? answers.shift() ?? [] : found);
await type("a", 100);
await type("b", found.length ? 3000 : 100);
print(shown());
"""


@pytest.mark.parametrize(
    ("answers", "ideas", "expected"),
    [
        ([[], [(" White,", 9), (" Smith,", 9), (" white", 9)]], [], [" White,", " Smith,"]),
        ([[], [("ter.", 9), ("ter", 9), ("ters", 9)]], [], ["ter.", "ters"]),
        ([[], [(" “The", 9), (" the sea", 9), ("the", 9)]], [], [" “The", "the"]),
        ([[], [(" “file”:", 9), (" file", 9), (" 3.", 9), (" 3", 9)]], [], [" “file”:", " 3."]),
        ([[], [("'s", 9), ("s", 9)]], [], ["'s", "s"]),
        ([[("b sea", 5)], [(" sea and more", 9), (" hat", 1)]], [], [" sea"]),  # on show: it stays; of too little use
        ([[], [(" White", 9)]], [(" White house,", 9), (" Smith", 9), (" white", 9)], [" White house,", " Smith"]),
    ],
)
def test_suggestions_begin_with_different_words(
    npm_package: NpmPackage, answers: list[Any], ideas: list[Any], expected: list[str]
) -> None:
    program = ALTERNATIVES.replace("ANSWERS", json.dumps(answers)).replace("IDEAS", json.dumps(ideas))
    assert run_program(npm_package, program) == expected


def test_a_correction_is_listed_and_replaces_the_word_unless_the_text_changes(npm_package: NpmPackage) -> None:
    program = """
    client.complete = async ({ context, corrections }) => {
      if (!corrections) ideas.push(nowMs);
      const replaces = context.match(/[a-z]*$/)[0].length;
      return { id: "1", sentences: [{ value: "government", replaces, seed: 1 }], errors: [{ code: "misspelled" }] };
    };
    await type("the goverm", 3000);
    const { isListed, chosen: { text: word, rest, isCorrection } } = view;
    text += "x", completer.changed();
    const numLeft = view.suggestions.length;
    await run(3000);
    completer.accept();
    print([isListed, word, rest, isCorrection, numLeft, text, ideas.length]);
    """
    assert run_program(npm_package, program) == [True, "government", "", True, 0, "the government ", 0]
