"""schemathesis against a real server: every route of `/openapi.json` keeps what the document promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from shared.api_keys import new_key
from tests.e2e.harness import ROOT, running

# Requests are the same for the same seed and document; SCHEMATHESIS_SEED=… tries others.
SEED = os.environ.get("SCHEMATHESIS_SEED", "1")
# Random cases of an operation; the examples and the boundaries of its schema come in addition.
MAX_EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "10")
MAX_S = 280
FOLDER = Path(__file__).parent
_REQUESTS = re.compile(r'^tercet_requests_total\{route="([^"]*)",status="(\d+)"\} (\S+)', re.MULTILINE)


def test_no_request_gets_a_5xx_or_an_answer_that_the_document_does_not_declare(short_tmp_path: Path) -> None:
    """No 5xx but refusals, answers as in their schemas, wrong data refused, right data accepted, keys required."""
    key, _ = new_key(short_tmp_path / "keys", "schemathesis", rate=0)
    with running(short_tmp_path, models="embedded*2", keys=str(short_tmp_path / "keys"), api_key=key) as tercet:
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "schemathesis.cli",
                "--config-file",
                str(FOLDER / "schemathesis.toml"),
                "run",
                f"{tercet.url}/openapi.json",
                "--seed",
                SEED,
                "--max-examples",
                MAX_EXAMPLES,
                "--workers",
                "1",
                "--header",
                f"x-api-key: {key}",
                "--phases",
                "examples,coverage,fuzzing",
                "--continue-on-failure",
                "--warnings",
                "off",
                "--no-color",
            ],
            env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.e2e.schemathesis_hooks", "PYTHONPATH": str(ROOT)},
            cwd=short_tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=MAX_S,
        )
        headers = {"x-api-key": key}
        metrics = tercet.client.get("/metrics", headers=headers).text
        num_operations = sum(len(methods) for methods in tercet.client.get("/openapi.json").json()["paths"].values())
        unhandled = tercet.events("unhandled_exception")
    counts = {(route, int(status)): int(float(count)) for route, status, count in _REQUESTS.findall(metrics)}
    refusals = {key: count for key, count in counts.items() if key[1] >= 500}
    print(f"seed {SEED}; {sum(counts.values())} requests; refusals: {refusals}")
    assert result.returncode == 0, result.stdout + result.stderr
    # It leaves out the address that it reads the document from.
    assert f"Tested: {num_operations - 1}\n" in result.stdout, result.stdout
    assert {status for _, status in refusals} <= {503, 504}
    assert not unhandled
    # The run has reached what it is for: completions, refusals of wrong bodies, and of requests without a key.
    assert counts["/autocomplete", 200] >= 5
    assert counts["/autocomplete", 422] >= 20
    assert sum(count for (_, status), count in counts.items() if status == 401) >= 8
