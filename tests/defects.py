"""`python -m tests.defects`: puts defects of this project's history back, and checks that a test fails for each.

Each defect is one edit that undoes a mending commit, and a test that must fail with it. The edits are applied one at
a time to a copy of the working tree, never to the tree itself. The same tests run on the copy without an edit first,
because a test that fails anyway catches nothing. The exit status is 1 unless every defect is caught, and so also if an
edit no longer applies because the code has changed.

Only tests that `.ci/run` runs count. The command itself is a suite of `make test-all` and takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
KERNELS = "workers/engine/cpu/compiled"
CI_TIERS = "not full and not clients and not deploy"  # what `.ci/run` runs
PASSED = 0  # exit code of pytest


@dataclass(frozen=True)
class Defect:
    """A fault that users met, and the edit that brings it back."""

    area: str  # engine, gateway, jobs, page or deploy
    name: str  # what users see
    mended_by: str  # commit
    file: str  # path from the root
    old: str  # text that occurs once in the file
    new: str  # text that replaces it
    test: str  # pytest's node id, of a test that must fail


DEFECTS = [
    Defect(
        "engine",
        "a slow model computes past the deadline, and the text it has comes too late",
        "addbf46",
        "workers/engine/core.py",
        "now + max(0.0, self._decode_step_s - MARGINS.step_s) if sequence.token_ids else now",
        "now",
        "tests/workers/engine/test_engine.py::test_a_step_that_would_end_past_the_deadline_is_not_begun",
    ),
    Defect(
        "engine",
        "cached prompts of other API keys are found, which shows in times and token counts",
        "658aac4",
        "workers/engine/prefix_cache.py",
        "if entry.scope != scope:",
        "if False:",
        "tests/workers/engine/test_cache_scope.py::test_a_sequence_reads_only_what_its_scope_has_written",
    ),
    Defect(
        "gateway",
        "a greedy completion without a whole word is trimmed to nothing",
        "1b0aeee",
        "gateway/generation/trimming.py",
        "(len(self._text.rstrip()) if self._keeps_partial_word else 0)",
        "0",
        "tests/gateway/generation/test_trimming.py::test_a_completion_without_a_whole_word_is_kept_on_request",
    ),
    Defect(
        "gateway",
        "requests wait until their deadline for workers that die before they are warm",
        "3c1d3e5",
        "gateway/pool/slot_table.py",
        "entry.is_failing = True",
        "entry.is_failing = False",
        "tests/gateway/pool/test_slot_table.py::test_a_slot_whose_workers_die_before_they_are_warm_is_not_expected",
    ),
    Defect(
        "jobs",
        "a job holds defaults that its client has not sent, and a gateway of an earlier version fails it",
        "71bc1399",
        "gateway/api/job_requests.py",
        " if name in sent",
        "",
        "tests/gateway/api/test_jobs.py::test_a_job_holds_the_fields_that_its_client_sent_and_no_others",
    ),
    Defect(
        "jobs",
        "jobs that an earlier version stored are lost at an upgrade",
        "6155815",
        "gateway/jobs/dynamodb.py",
        'if "data" in item:',
        "if False:",
        "tests/gateway/jobs/test_dynamodb.py::test_jobs_of_an_earlier_gateway_are_read",
    ),
    Defect(
        "page",
        "undo reaches into the document that was open before, and garbles the text",
        "b87dc60",
        "gateway/static/text_editor.js",
        "view.dispatch({ effects: this.#history.reconfigure([]) });\n    view.dispatch({\n"
        "      changes: { from: 0, to: length, insert },\n      selection: { anchor, head },\n"
        "      annotations: Transaction.addToHistory.of(false),\n    });\n"
        "    view.dispatch({ effects: this.#history.reconfigure(history()) });",
        "view.dispatch({ changes: { from: 0, to: length, insert }, selection: { anchor, head } });",
        "tests/browser/test_documents.py::test_undo_does_not_reach_into_another_document",
    ),
    Defect(
        "page",
        "text that once did not fit into the browser's storage is lost although there is room",
        "7981891",
        "gateway/static/documents.js",
        "Array.from(this.#unsaved.values())",
        "Array.from(this.#unsaved.values()).slice(-1)",
        "tests/browser/test_documents.py::test_a_full_storage_is_said_and_the_text_can_be_downloaded",
    ),
    Defect(
        "deploy",
        "workers without a slot start, and take an address that no setting names",
        "7a2e9b6",
        "gunicorn.conf.py",
        'if role == "workers" and not plan.slots:',
        "if False:",
        "tests/deploy/tuning/test_planning_pool.py::test_workers_without_a_slot_do_not_start",
    ),
    Defect(
        "deploy",
        "requests wait for a lost node of a Ray cluster",
        "9b9411e",
        "deploy/cloud/ray/pool_state.py",
        'if state.state == "warm" and now - reported_at <= SILENCE_S',
        'if state.state == "warm"',
        "tests/deploy/cloud/ray/test_pool_state.py::test_a_worker_that_has_fallen_silent_has_no_room",
    ),
]


def copy_tree(target: Path) -> None:
    """Copy the files of the working tree that git does not ignore, as they are, and the compiled kernels."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # not removed since it was added
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shutil.copytree(ROOT / KERNELS, target / KERNELS)  # of the same sources: no defect is in them


def run_tests(tree: Path, *tests: str) -> tuple[int, str]:
    """Exit code of pytest and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", CI_TIERS, *tests]
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def outcome(tree: Path, defect: Defect) -> str:
    """What the test of a defect says of a tree with it: "caught" if it fails."""
    path = tree / defect.file
    text = path.read_text() if path.is_file() else ""
    if text.count(defect.old) != 1:
        return f"edit no longer applies to {defect.file}"
    path.write_text(text.replace(defect.old, defect.new))
    try:
        code, output = run_tests(tree, defect.test)
    finally:
        path.write_text(text)
    if code == PASSED:
        return "not caught"
    last = output.strip().rpartition("\n")[2]
    # An error in a fixture, such as a server that did not start, is not a test that fails.
    return "caught" if re.search(r"\b[1-9]\d* failed\b", last) else f"tests did not run (exit code {code}): {last}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="only defects with this text in their area or name")
    wanted = parser.parse_args().k
    defects = [defect for defect in DEFECTS if wanted in f"{defect.area} {defect.name}"]
    console = Console()
    table = Table("area", "defect", "mended by", "result", "s")
    with tempfile.TemporaryDirectory(prefix="defects-") as directory:
        copy_tree(tree := Path(directory))
        code, output = run_tests(tree, *dict.fromkeys(defect.test for defect in defects))
        if code != PASSED:
            console.print(output, markup=False, highlight=False)
            console.print("These tests fail without any defect.")
            return 1
        outcomes = []
        for defect in defects:
            begin = time.monotonic()
            outcomes.append(outcome(tree, defect))
            seconds = f"{time.monotonic() - begin:.0f}"
            table.add_row(defect.area, defect.name, defect.mended_by, outcomes[-1], seconds)
    console.print(table)
    return 0 if outcomes and set(outcomes) == {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
