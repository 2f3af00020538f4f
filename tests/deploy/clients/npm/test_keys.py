"""Whose a key is, what it takes, and what a typed mark does after it: modules of the package, in Node, in virtual time.

That the page and each adapter pass on keys, marks and compositions is tested in tests/browser.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.deploy.clients.npm.test_completer import run_program
from tests.npm_package import NpmPackage

# What is before the accepted word, and the marks that are typed after it.
REPLACING = {
    "The": "'’-–—.,;:!?…)]}>»›”%‰°/\n",
    'He said, "the': '"',
    "„Der ‚kleine": "“‘",
    "Er sagte: »der": "«",
    "”Den": "”",
    "**The *very _old ~good =new `x": "*_~=`",
    "Let $x + y": "$",
}
OPENING_MARKS = {
    "The": '"“„‘‚«([{*_~=`$@&¿',
    '"No," he said, and the': '"',
    '"A line that ends\nThe': '"',
    "* an item, 2 * 3 * 4 of the": "*",
    "”Nej”, sa den": "”",
    "»Nein«, sagte der": "»",
    "It costs $5 and the": "$",
}
# What is accepted after "The", what is typed then, and what stands after "The" at last.
TYPED = """
 secretary| !| secretary !;  secretary|'s| secretary's;  secretary|– a| secretary – a;  secretary|–a| secretary–a
 secretary|\u00a0:| secretary\u00a0:;  water,|. So| water. So;  water,|, so| water, so;  water,|,.| water.
 water,|)| water,);  water،|؟| water؟;  water，|。| water。
"""
ACCEPT_AND_TYPE = """
const typed = [];
for (const [before, accepted, letters, behind] of CASES) {
  begin(before, behind);
  answer = () => [[accepted, 9]];
  press("Alt+Enter");
  await run(300);
  press("Tab");
  await write(letters);
  typed.push(text);
}
print(typed);
"""


def test_what_is_typed_after_an_acceptance_replaces_its_space_and_its_comma(npm_package: NpmPackage) -> None:
    cases = [
        (before, " secretary", mark, "", f"{before} secretary{space}{mark}")
        for marks, space in ((REPLACING, ""), (OPENING_MARKS, " "))
        for before, each in marks.items()
        for mark in each
    ]
    for accepted, letters, text in (case.split("|") for case in re.split("; |\n", TYPED.strip("\n"))):
        cases.append(("The", accepted, letters, "", f"The{text}"))
    cases += [('("The', " water,", f"{mark} So", after, f'("The water{mark} So') for mark, after in ("!)", '?"')]
    typed = run_program(npm_package, ACCEPT_AND_TYPE.replace("CASES", json.dumps([case[:4] for case in cases])))
    for case, text in zip(cases, typed, strict=True):
        assert text == case[4], case


SUGGESTION = ' to Mr. Lowe, whom she saw "again!" and again. Then'
WORD, CLAUSE, SENTENCE = "to ", "to Mr. Lowe, ", 'to Mr. Lowe, whom she saw "again!" and again. '


# Options, keys, and what these take.
CHORDS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "Alt+ArrowRight", WORD),
    ({}, "Control+ArrowRight", WORD),
    ({}, "Alt+End", CLAUSE),
    ({}, "Alt+PageDown", SENTENCE),
    ({"tabTakes": "word"}, "Tab", WORD),
    ({"tabTakes": "word"}, "Tab Tab Alt+End", CLAUSE),
    ({"keys": {"acceptClause": ["F4"]}}, "F4 Alt+ArrowRight", f"{CLAUSE}whom "),
    ({}, "Alt+End Tab", f"{SENTENCE}Then "),
]
TAKE = """
const taken = [];
answer = () => [[SUGGESTION, 9]];
for (const [options, keys] of CHORDS) {
  begin("I wrote");
  Object.assign(completer, options);
  await type("", 300);
  for (const chord of keys.split(" ")) press(chord), await run(300);
  taken.push([text, ghost()]);
}
print(taken);
"""


def test_a_chord_takes_a_part_and_the_rest_stays(npm_package: NpmPackage) -> None:
    program = TAKE.replace("SUGGESTION", json.dumps(SUGGESTION)).replace("CHORDS", json.dumps(CHORDS))
    for (_, keys, taken), (text, ghost) in zip(CHORDS, run_program(npm_package, program), strict=True):
        assert text == f"I wrote {taken}", keys
        assert "Then" in taken or ghost == SUGGESTION.removeprefix(f" {taken}"), keys


# How a word is taken: what the writer presses or types before and to do so. Enter and the arrows are the text's then.
WAYS = {
    "unasked": "Alt+ArrowRight",
    "asked": "Alt+Enter Alt+ArrowRight",
    "chosen": "Alt+ArrowDown Alt+ArrowRight",
    "chosen, typed": "Alt+ArrowDown Alt+ArrowUp type Alt+ArrowRight",
    "asked, plain arrow": "Alt+Enter ArrowRight",
    "asked, typed": "Alt+Enter type ArrowRight",
    "asked, chosen": "Control+Space ArrowDown ArrowUp Alt+ArrowRight",
    "asked, two words": "Alt+Enter Alt+ArrowRight Alt+ArrowRight",
    "asked, undone": "Alt+Enter Alt+ArrowRight undo",
}
WHOSE = """
const whose = [];
for (const ways of WAYS) {
  begin("It was");
  answer = () => [[" the old man and the sea", 9], [" a day like the others", 9]];
  await type(" for", 300);
  for (const chord of ways) {
    if (chord === "type") await type(ghost().slice(0, 2));
    else if (chord === "undo") text = "It was for", completer.changed({ inputType: "historyUndo" });
    else press(chord);
    await run(300);
  }
  const rest = ghost(), keys = ["ArrowRight", "ArrowDown", "ArrowUp", "Enter"].filter((key) => press(key));
  press("Alt+ArrowDown");
  whose.push([rest !== "", keys, press("Enter")]);
}
print(whose);
"""


def test_enter_and_arrows_are_the_texts_after_a_word_was_taken_until_a_choice(npm_package: NpmPackage) -> None:
    program = WHOSE.replace("WAYS", json.dumps([way.split() for way in WAYS.values()]))
    for way, whose in zip(WAYS, run_program(npm_package, program), strict=True):
        assert whose == [True, [], True], way


# Keys with Alt, and their places: those that type a character in some layout, such as an accent for the next letter, or
# on Windows the number of a character; and those that do not.
TYPES = (
    "# Digit3, € Digit2, “ Digit2, ¡ Digit1, @ Digit2, ² Digit2, é Digit2, 2 Digit1, Dead Digit1, 1 Numpad1, "
    "¶ Enter, → ArrowRight, Dead ArrowDown, لا ArrowUp"
)
ACCEPTS = "1 Digit1, 2 Digit2, Unidentified Digit2, ArrowRight ArrowRight"


def test_a_chord_that_types_a_character_is_the_editors(npm_package: NpmPackage) -> None:
    typing, accepting = ([each.split() for each in keys.split(", ")] for keys in (TYPES, ACCEPTS))
    events = [*typing, ["1", "Digit1", "AltGraph"], *accepting]
    program = f"""
    const handled = [];
    for (const [key, code, modifier] of {json.dumps(events)}) {{
      begin("The old man");
      answer = () => [[" and the sea", 9], [" of the sea", 9]];
      press("Alt+Enter");
      await run(300);
      handled.push(press(key, {{ code, altKey: true, getModifierState: (name) => name === modifier }}));
    }}
    print(handled);
    """
    assert run_program(npm_package, program) == [False] * (len(typing) + 1) + [True] * len(accepting)


def test_keys_of_an_input_method_are_left_to_it(npm_package: NpmPackage) -> None:
    """Safari ends the composition before it sends the key: only the key code is the input method's."""
    program = """
    begin("The old man");
    answer = () => [[" and the sea", 9], [" of the sea", 9]];
    press("Alt+Enter");
    await run(300);
    const keys = ["Enter", "Tab", "Escape", "ArrowDown", "ArrowUp", "ArrowRight"].flatMap((key) => [key, `Alt+${key}`]);
    const whose = [{ isComposing: true }, { keyCode: 229 }, { isComposing: true, keyCode: 229 }];
    const taken = keys.filter((key) => whose.some((each) => press(key, each)));
    print([taken, text, ghost(), press("Enter"), text]);
    """
    expected = [[], "The old man", " and the sea", True, "The old man and the sea "]
    assert run_program(npm_package, program) == expected


# What is composed letter by letter; after an arrow, what it is converted to. Where it stands, each letter requests.
# After a bar, letters are deleted, which requests nothing.
COMPOSED = """
t th the; é ét été; d don don’t; м мо море; य यह; th thé; t th the | th t
に にほ にほん → 日本; ｎ に → 二; ニ ニホ → ニホ; ㅎ 하 한 → 한; ㄋ ㄋㄧ → 你; 你 你好 → 你好
"""
# Keys of a keyboard on Windows and Linux, and on a Mac: Pinyin is Latin letters until it is converted. Those of a touch
# screen have no place.
KEYS = [["Process", "KeyN"], ["n", "KeyN"]]
TOUCH_KEY = ["Unidentified", ""]
COMPOSE = """
const requested = [];
for (const [letters, converted, [key, code]] of COMPOSED) {
  begin("The sea ");
  for (const each of letters) {
    if (key) press(key, { code, keyCode: 229 });
    await compose(each);
  }
  const numComposed = predictions.length;
  await commit(converted || letters.at(-1));
  requested.push([numComposed, predictions.length - numComposed]);
}
print(requested);
"""


def test_composed_letters_request_predictions_unless_they_will_be_converted(npm_package: NpmPackage) -> None:
    cases: list[tuple[list[str], str, list[str]]] = [(["n", "ni", "ni h"], "你好", key) for key in KEYS]
    expected = [[0, 1] for _ in KEYS]
    for case in re.split("; |\n", COMPOSED.strip()):
        letters, _, converted = case.partition(" → ")
        inserted, _, deleted = letters.partition(" | ")
        cases.append(([*inserted.split(), *deleted.split()], converted, []))
        expected.append([0, 1] if converted else [len(inserted.split()), 0])
    cases += [(["t", "th"], "", TOUCH_KEY), (["t", "te", "teh"], "the", [])]  # the last is corrected at its end
    expected += [[2, 0], [3, 1]]
    requested = run_program(npm_package, COMPOSE.replace("COMPOSED", json.dumps(cases)))
    for case, numbers, each in zip(cases, requested, expected, strict=True):
        assert numbers == each, case


def test_letters_that_were_converted_once_are_converted_again(npm_package: NpmPackage) -> None:
    """A touch keyboard for Pinyin is recognised after its first word, and one for Latin text likewise."""
    program = """
    begin("The sea ");
    const requested = [];
    for (const [letters, committed] of [[["ni"], "你"], [["h", "hao"], "hao"], [["t", "th"], "th"]]) {
      const num = predictions.length;
      for (const each of letters) await compose(each);
      requested.push(predictions.length - num);
      await commit(committed);
      await type(" ", 100);
    }
    print(requested);
    """
    assert run_program(npm_package, program) == [1, 0, 2]


CLOSING = ['"', ")", "**", ".", "”)", "'.", "_", "]]", "$"]
TEXT = ["or", " the house", "ing."]
BEFORE = """
const found = [];
for (const after of AFTER) {
  begin("He said that he did", after);
  answer = () => [[" not go home", 9]];
  await type(" so", 300);
  const num = predictions.length;
  press("Tab");
  found.push([num, text]);
}
print(found);
"""


def test_words_are_suggested_before_closing_marks_and_no_text(npm_package: NpmPackage) -> None:
    """No space comes with the last word before a mark."""
    found = run_program(npm_package, BEFORE.replace("AFTER", json.dumps(CLOSING + TEXT)))
    suggested, nothing = [1, "He said that he did so not go home"], [0, "He said that he did so"]
    for after, result in zip(CLOSING + TEXT, found, strict=True):
        assert result == (suggested if after in CLOSING else nothing), after
