"""Answers of the function, in the form of an HTTP API (payload 2.0)."""

from __future__ import annotations

import json
import sys
from typing import Any

from shared.errors import PROBLEM_JSON, TercetError

Answer = dict[str, Any]


def json_answer(status: int, body: object, **headers: str) -> Answer:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")) + "\n"
    return _answer(status, text, {"content-type": "application/json", **headers})


def problem_answer(error: TercetError) -> Answer:
    headers = {name.lower(): value for name, value in error.headers.items()}
    return _answer(error.status, error.problem().decode(), {"content-type": PROBLEM_JSON, **headers})


def _answer(status: int, body: str, headers: dict[str, str]) -> Answer:
    return {"statusCode": status, "headers": {"cache-control": "no-store", **headers}, "body": body}


def log(event: str, **fields: object) -> None:
    """A line of JSON for CloudWatch. No prompt and no whole id may be among the fields."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
