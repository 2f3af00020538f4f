"""What a resource says about its methods: `operations`, from which `gateway.api.openapi` writes the OpenAPI document.

A resource declares a class attribute, for example:

    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="Jobs",
            summary="Create a job",
            bodies=(parse_job_request,),
            answers={202: Answer("The job is queued.", {JSON: Job}, headers={"Location": "Address of the job."})},
            errors=(InvalidJson, InvalidRequest, NotReady),
        )
    }

Types are the msgspec types that parse requests and render answers, so the document cannot differ from them. A type's
docstring and the `Meta.description` of its fields become the texts of its schema. Not declared here, because the
builder knows them: HEAD and OPTIONS, the errors of the middleware (such as 401 and 413), the shape of errors (the
resource's `error_format`), and whether the route needs an API key (`gateway.routes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.api.tolerance import TolerantParser
from shared.errors import (
    DeadlineExceeded,
    InvalidJson,
    InvalidRequest,
    NoCompletion,
    NotReady,
    Overloaded,
    QuotaExceeded,
    TercetError,
)
from shared.parsing import BodyParser

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
# What a request for completions may be answered with in every dialect.
COMPLETION_ERRORS: tuple[type[TercetError], ...] = (
    InvalidJson,
    InvalidRequest,
    QuotaExceeded,
    NotReady,
    Overloaded,
    NoCompletion,
    DeadlineExceeded,
)


@dataclass(frozen=True, slots=True)
class Events:
    """Server-sent events: the type of the data of each event, by the event's name; "" for events without a name.

    Data is JSON, but for a literal: `Literal["[DONE]"]`. A tuple has the types of an event that has several.
    """

    types: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with one status.

    Attributes:
        description: a sentence.
        content: types by media type: a msgspec type, a tuple of those that the body may have, `str` for text, `bytes`
            for a file, or `Events`. Empty for no body.
        headers: descriptions of headers that other answers lack, by name.
    """

    description: str
    content: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the path, the query or the headers. Those of a path are required.

    Attributes:
        example: a value that the documentation page sends unless the reader changes it. Empty: none.
    """

    name: str
    place: Literal["path", "query", "header"]
    description: str
    type: Any = str
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of a resource.

    Attributes:
        tag: the section of the documentation page that shows it.
        summary: a few words, without a full stop.
        description: further sentences, in Markdown. Optional.
        bodies: parsers of the request's body; it has to be accepted by one of them. Empty: the method takes no body.
        examples: request bodies by a short name. Each is valid.
        parameters: parameters of the path, the query and the headers.
        answers: answers by status, without errors.
        errors: the errors that the resource raises.
    """

    tag: str
    summary: str
    description: str = ""
    bodies: tuple[BodyParser[Any] | TolerantParser[Any], ...] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    answers: Mapping[int, Answer]
    errors: tuple[type[TercetError], ...] = ()


# Operations by method, in capital letters.
Operations = Mapping[str, Operation]
