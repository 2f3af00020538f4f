"""boto3's `sagemaker-runtime`, unmodified, through a stand-in for SageMaker's front."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError


@pytest.fixture(scope="module")
def runtime(sagemaker_url: str) -> Any:
    return boto3.client(
        "sagemaker-runtime", endpoint_url=sagemaker_url, region_name="eu-central-1",
        aws_access_key_id="test", aws_secret_access_key="test",
    )  # fmt: skip


def invoke(runtime: Any, body: dict[str, Any], **options: str) -> Any:
    response = runtime.invoke_endpoint(
        EndpointName="tercet", ContentType="application/json", Body=json.dumps(body), **options
    )
    return json.load(response["Body"])


def test_the_patsnap_request_answers_three_strings(runtime: Any) -> None:
    output = invoke(runtime, {"input": "amazon"})["output"]
    assert len(output) == 3
    assert all(isinstance(text, str) and text for text in output)


def test_the_other_dialects(runtime: Any) -> None:
    [generated] = invoke(runtime, {"inputs": "The sea was", "parameters": {"max_new_tokens": 5}})
    assert generated["generated_text"]
    assert len(invoke(runtime, {"prompt": "The sea was", "n": 2, "max_tokens": 5})["choices"]) == 2
    assert invoke(runtime, {"context": "The sea was"}, CustomAttributes="session=s")["sentences"]


def test_a_refusal_reaches_the_caller(runtime: Any) -> None:
    with pytest.raises(ClientError) as refused:
        invoke(runtime, {"inputs": "The sea was", "parameters": {"max_new_tokens": -5}})
    assert refused.value.response["Error"]["Code"] == "ModelError"
    assert refused.value.response["OriginalStatusCode"] == 422
    assert "max_new_tokens" in refused.value.response["OriginalMessage"]
