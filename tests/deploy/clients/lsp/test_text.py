"""The language server's rules for texts are those of the client module: its own, in Node, answer the same."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from deploy.clients.lsp.text import has_text_after, is_prose, trim_suffix
from tests.deploy.clients.npm.test_prose import CODE, PROSE
from tests.e2e.harness import ROOT
from tests.programs import run_program

PROGRAM = """
import { readFileSync } from "node:fs";
import { isProse } from "./gateway/static/prose.js";
import { hasTextAfter, trimSuffix } from "./gateway/static/text.js";
const [after, before] = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify([after.map(hasTextAfter), after.map(trimSuffix), before.map((text) => isProse(text))]));
"""
AFTER = ["", '."', "**.", "…”) ", " and", ") and", "'s", "’s", ")\nand", "`)"]


def test_the_rules_are_those_of_the_client_module() -> None:
    """For all characters of the Basic Multilingual Plane but controls, and all beginnings of the prose test's texts."""
    assigned = [char for char in map(chr, range(0x10000)) if not unicodedata.category(char).startswith("C")]
    texts = [text for group in (CODE, PROSE) for texts in group.values() for text in texts]
    after, before = AFTER + assigned, [text[:end] for text in texts for end in range(len(text) + 1)]
    done = run_program(
        ["node", "--input-type=module", "--eval", PROGRAM], cwd=ROOT, input=json.dumps([after, before]), check=True
    )
    ours: list[list[Any]] = [[*map(has_text_after, after)], [*map(trim_suffix, after)], [*map(is_prose, before)]]
    for given, own, other in zip((after, after, before), ours, json.loads(done.stdout), strict=True):
        assert [text for text, one, another in zip(given, own, other, strict=True) if one != another] == []
