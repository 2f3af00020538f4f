"""`tercet calibrate` end to end: on prose with the embedded checkpoint, and from metrics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import cli
from shared.errors import StartError
from tests.deploy.calibrate.test_feedback import FEEDBACK

ROOT = Path(__file__).parents[3]
PROSE = ROOT / "workers/checkpoints/page.txt"


def calibrate(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", "calibrate", *args],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "150", **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_both_settings_are_fitted_to_prose() -> None:
    done = calibrate(str(PROSE), "--passages", "2", "--words", "4", "--price", "0")
    assert done.returncode == 0, done.stderr
    lines = re.fullmatch(r"TERCET_PREDICT_TEMPERATURE=([\d.]+)\nTERCET_MIN_USEFULNESS=([\d.]+)\n", done.stdout)
    assert lines is not None, done.stdout
    assert 0.1 <= float(lines[1]) <= 10
    assert re.search(r"\d+ predicted words at \d+ moments: log-loss [\d.]+ nats", done.stderr)
    assert re.search(r"each saves [\d.]+ keys on average", done.stderr)


def test_a_price_that_nothing_pays_prints_the_temperature_alone() -> None:
    done = calibrate(str(PROSE), "--passages", "1", "--words", "1", "--price", "50")
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert done.stdout.startswith("TERCET_PREDICT_TEMPERATURE=")
    assert "No threshold pays" in done.stderr


def test_the_threshold_is_fitted_to_metrics_of_a_file_or_a_url_with_the_api_key(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer tct_key" else 401)
            self.end_headers()
            self.wfile.write(FEEDBACK.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        done, refused = (
            calibrate("--metrics", url, "--price", "0.05", TERCET_API_KEY=key) for key in ("tct_key", "tct_other")
        )
        server.shutdown()
        thread.join()
    assert done.stdout == "TERCET_MIN_USEFULNESS=0.5\n"
    metrics = tmp_path / "metrics.txt"
    metrics.write_text(FEEDBACK, encoding="utf-8")
    assert calibrate("--metrics", str(metrics), "--price", "0.2").stdout == "TERCET_MIN_USEFULNESS=2\n"
    assert "Feedback on predictions" in done.stderr
    assert refused.returncode == 1
    assert "set TERCET_API_KEY" in refused.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "name prose"),
        (("--metrics", "a", str(PROSE)), 2, "takes no prose"),
        (("--models", "embedded*2", str(PROSE)), 2, "name one model"),
        (("--metrics", "nowhere.txt"), 1, "nowhere.txt cannot be read"),
        (("--metrics", "http://127.0.0.1:1/metrics"), 1, "No server answers at http://127.0.0.1:1/metrics"),
    ],
)
def test_what_is_wrong_is_said(args: tuple[str, ...], code: int, message: str) -> None:
    done = CliRunner(env={"COLUMNS": "150"}).invoke(cli, ["calibrate", *args])
    assert done.exit_code == code
    assert message in done.stderr + str(done.exception)
    assert isinstance(done.exception, (StartError, SystemExit))
