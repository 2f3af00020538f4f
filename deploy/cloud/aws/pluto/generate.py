"""POST /generate: invokes the SageMaker endpoint with the request's body, and answers what the endpoint answers."""

import base64
import json
import logging
import os
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

EMPTY = "The request body is empty. Please provide a valid input."
INVALID = "The request body is invalid. Please provide a valid input."
UNAVAILABLE = "The endpoint does not answer. Please try again."
# API Gateway gives an integration 30 s. A generation is not repeated.
CONFIG = Config(connect_timeout=3, read_timeout=25, retries={"total_max_attempts": 1})
logger = logging.getLogger(__name__)
runtime = boto3.client("sagemaker-runtime", config=CONFIG)
Answer = dict[str, Any]


def handler(event: dict[str, Any], _context: object) -> Answer:
    """Takes events of HTTP APIs, in payload format 2.0 and 1.0."""
    body = event.get("body")
    if not body:
        return _text(400, EMPTY)
    try:
        if event.get("isBase64Encoded"):
            body = base64.b64decode(body, validate=True).decode()
        document = json.loads(body)
    except ValueError:
        return _text(400, INVALID)
    if not isinstance(document, dict) or not document.get("inputs"):
        return _text(400, INVALID)
    try:
        answer = runtime.invoke_endpoint(
            EndpointName=os.environ["ENDPOINT_NAME"], ContentType="application/json", Body=json.dumps(document).encode()
        )
    except ClientError as error:
        return _failure(error)
    except BotoCoreError as error:
        logger.warning(json.dumps({"event": "endpoint_unreachable", "error": type(error).__name__}))
        return _text(504, UNAVAILABLE)
    return _answer(200, "application/json", answer["Body"].read().decode())


def _failure(error: ClientError) -> Answer:
    """The container's own refusal where it sent one; else that the endpoint cannot serve now."""
    code, status = error.response["Error"]["Code"], error.response.get("OriginalStatusCode", 0)
    logger.warning(json.dumps({"event": "endpoint_refused", "error": code, "status": status}))
    if code == "ModelError" and 400 <= status < 600:
        return _answer(status, "application/json", error.response.get("OriginalMessage", ""))
    return _text(503, UNAVAILABLE)


def _text(status: int, text: str) -> Answer:
    return _answer(status, "text/plain", text)


def _answer(status: int, content_type: str, body: str) -> Answer:
    return {"statusCode": status, "headers": {"content-type": content_type}, "body": body}
