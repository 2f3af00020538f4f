"""When ideas are requested, and what is shown together: modules of the package, in Node, in virtual time."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from tests.npm_package import NpmPackage

MODULES = "./node_modules/tercet-client"

# A completer of an empty text, with a clock that `run(ms)` moves, and a server that answers within 40 ms. `key(text)`
# types; `sent` has the requests, each with the time.
WORLD = f"""
import {{ Completer }} from "{MODULES}/completer.js";
let nowMs = 0, timers = [], numTimers = 0;
performance.now = () => nowMs;
globalThis.setTimeout = (run, delayMs = 0) => {{
  timers.push({{ id: ++numTimers, atMs: nowMs + delayMs, run }});
  return numTimers;
}};
globalThis.clearTimeout = (id) => (timers = timers.filter((each) => each.id !== id));
const settle = () => new Promise((done) => setImmediate(done));
async function run(ms) {{
  for (const endMs = nowMs + ms; ; await settle()) {{
    const [next] = timers.filter(({{ atMs }}) => atMs <= endMs).sort((a, b) => a.atMs - b.atMs);
    nowMs = next?.atMs ?? endMs;
    if (!next) return;
    timers.splice(timers.indexOf(next), 1);
    next.run();
  }}
}}
let text = "", after = "", view, answer = () => [], latencyMs = 40;
const sent = [];
const complete = (request) => new Promise((done) => {{
  sent.push({{ ...request, atMs: nowMs }});
  const sentences = answer(request).map((each) => ({{ usefulness: 9, seed: 1, ...each }}));
  setTimeout(() => done({{ id: "1", sentences }}), latencyMs);
}});
const completer = new Completer({{
  context: () => text, after: () => after, insertsSpace: true, show: (shown) => (view = shown),
  client: {{ complete, feedback: async () => {{}} }},
  insert: (inserted, numReplaced) => {{
    text = text.slice(0, text.length - numReplaced) + inserted;
    completer.changed();
  }},
}});
const key = async (typed, ms = 0) => {{
  text += typed;
  completer.changed();
  await run(ms);
}};
const ideas = () => sent.filter(({{ strategy }}) => !strategy);
"""

# Times between keys, of which one in 33 of the second kind is a hesitation.
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
    for (let number = 0; number < 30; number += 1) await key("ab cd".charAt(number % 5), interval());
    const keyMs = nowMs, numIdeas = ideas().length;
    await key("e", 6000);
    delays[name].push(ideas()[numIdeas]?.atMs - keyMs);
  }
}
console.log(JSON.stringify(delays));
"""


def run_program(npm_package: NpmPackage, program: str) -> Any:
    return json.loads(npm_package.run("node", "--input-type=module", "--eval", WORLD + program))


def test_an_idea_is_requested_on_time_in_every_rhythm(npm_package: NpmPackage) -> None:
    for name, delays in run_program(npm_package, RHYTHMS).items():
        median, p90 = statistics.median(delays), statistics.quantiles(delays, n=10)[-1]
        print(f"{name}: median {median:.0f} ms, p90 {p90:.0f} ms")
        assert 1000 <= median <= 1250
        assert p90 <= 1500


def test_a_server_that_is_slow_delays_an_idea_only_until_it_has_answered(npm_package: NpmPackage) -> None:
    program = "latencyMs = 1300; await key('The', 3000); console.log(JSON.stringify(ideas().map((each) => each.atMs)));"
    assert run_program(npm_package, program) == [1500]


FRAGMENT = """
const idea = { value: " old man was gone," };
answer = ({ strategy }) => (strategy ? [{ value: FRAGMENT }].slice(sent.length - 1) : [idea]);
await key("The", VISIBLE_MS);
const before = view.suggestions.map(({ rest }) => rest);
WRITER
await run(3000);
console.log(JSON.stringify([before, view.suggestions.map(({ rest }) => rest)]));
"""


@pytest.mark.parametrize(
    ("fragment", "writer", "expected"),
    [
        (" sea", "", [" old man was gone,", " sea"]),
        (" sea was", "", [" old man was gone,", " sea was"]),
        (" sea was calm", "", [" sea was calm"]),
        (" sea", "completer.choose(1);", [" sea"]),
        (" sea was", "completer.acceptWord();", ["was"]),
        (" sea was", "completer.acceptWord(); completer.choose(1);", ["was"]),
    ],
)
def test_an_idea_replaces_a_fragment_that_was_left_standing(
    npm_package: NpmPackage, fragment: str, writer: str, expected: list[str]
) -> None:
    program = FRAGMENT.replace("FRAGMENT", json.dumps(fragment)).replace("WRITER", writer).replace("VISIBLE_MS", "300")
    assert run_program(npm_package, program) == [[fragment], expected]


def test_an_idea_leaves_a_fragment_that_has_just_come(npm_package: NpmPackage) -> None:
    """The fragment comes after 700 ms, the idea after 1,240."""
    program = FRAGMENT.replace("FRAGMENT", '" sea"').replace("WRITER", "latencyMs = 40;").replace("VISIBLE_MS", "700")
    assert run_program(npm_package, "latencyMs = 700;" + program) == [[" sea"], [" sea"]]


# What the first and the second answer say, with their usefulness; then what is shown once they have come.
ALTERNATIVES = """
const answers = ANSWERS;
completer.minUsefulness = 2;
answer = ({ strategy }) => (strategy ? answers.shift() ?? [] : IDEAS);
await key("a", 100);
await key("b", 100);
await run(IDEAS.length ? 3000 : 0);
console.log(JSON.stringify(view.suggestions.map(({ rest }) => rest)));
"""


@pytest.mark.parametrize(
    ("answers", "ideas", "expected"),
    [
        ([[], [(" White,", 9), (" Smith,", 9), (" white", 9)]], [], [" White,", " Smith,"]),
        ([[], [("ter.", 9), ("ter", 9), ("ters", 9)]], [], ["ter.", "ters"]),
        ([[], [(" “The", 9), (" the sea", 9), ("the", 9)]], [], [" “The", "the"]),
        ([[], [(" “file”:", 9), (" file", 9), (" 3.", 9), (" 3", 9)]], [], [" “file”:", " 3."]),
        ([[], [("'s", 9), ("s", 9)]], [], ["'s", "s"]),
        ([[("b sea and", 0.5)], [(" sea", 3)]], [], [" sea"]),  # a fresh estimate
        ([[("b sea", 5)], [(" sea and more", 9)]], [], [" sea"]),  # on show: it stays
        ([[], [(" White,", 1), (" white", 1), (" Smith", 1)]], [" White house,"], [" White house,", " Smith"]),
        ([[], [(" Smith,", 1), (" smith and", 1), (" “Smith”", 1)]], [], []),
    ],
)
def test_suggestions_begin_with_different_words(
    npm_package: NpmPackage, answers: list[list[tuple[str, float]]], ideas: list[str], expected: list[str]
) -> None:
    sentences = [[{"value": value, "usefulness": keys} for value, keys in answer] for answer in answers]
    program = ALTERNATIVES.replace("ANSWERS", json.dumps(sentences))
    program = program.replace("IDEAS", json.dumps([{"value": value} for value in ideas]))
    assert run_program(npm_package, program) == expected
