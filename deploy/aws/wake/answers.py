"""Answers of the function, in the form of an HTTP API (payload 2.0), and errors as problem details (RFC 9457).

The shape of an error and its codes are the gateway's (`shared.errors`).
"""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

Answer = dict[str, Any]


class Refusal(Exception):
    """A request that is answered with an error.

    Attributes:
        detail: what is wrong and what to do.
        errors: names of fields, with what each must be.
    """

    def __init__(self, status: int, code: str, title: str, detail: str, errors: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.title = title
        self.detail = detail
        self.errors = errors or {}

    @property
    def answer(self) -> Answer:
        body: dict[str, Any] = {
            "type": f"urn:tercet:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.errors:
            body["errors"] = [{"field": field, "message": message} for field, message in self.errors.items()]
        headers = {"retry-after": str(1 + secrets.randbelow(3))} if self.status in {429, 503} else {}
        return json_answer(self.status, body, content_type="application/problem+json", **headers)


def invalid(field: str, message: str) -> Refusal:
    return Refusal(422, "invalid_request", "Invalid request", f"{field} {message}.", {field: message})


def json_answer(status: int, body: object, *, content_type: str = "application/json", **headers: str) -> Answer:
    return {
        "statusCode": status,
        "headers": {"content-type": content_type, "cache-control": "no-store", **headers},
        "body": json.dumps(body, ensure_ascii=False, separators=(",", ":")) + "\n",
    }


def log(event: str, **fields: object) -> None:
    """A line of JSON for CloudWatch. No prompt and no whole id may be among the fields."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
