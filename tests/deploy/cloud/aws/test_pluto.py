"""API Gateway's functions in front of an endpoint: the template's own sources, run against a real container.

Each function is its source in the template alone, with the variables that the template gives to it. What is not shown:
API Gateway and IAM.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cloud.aws import deploy_commands
from tests.clients.sagemaker_front import sagemaker_front
from tests.deploy.cloud.aws.cloud import INVOKE, REGION, Cloud
from tests.deploy.cloud.aws.stacks import load_template, role_actions
from tests.deploy.packaging.dockerfile import image
from tests.e2e.container import Container, running_container
from tests.e2e.harness import TERCET, serving
from tests.gateway.jobs.servers import AWS_ENVIRON
from tests.workers.checkpoints.conftest import hub
from tests.workers.checkpoints.hub_server import Hub
from workers.checkpoints.resolve import EMBEDDED

__all__ = ["hub"]

PROMPT = "The old man looked at the sea and"
EMPTY = "The request body is empty. Please provide a valid input."
INVALID = "The request body is invalid. Please provide a valid input."
Invoke = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def front_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_container(tmp_path_factory.mktemp("t")) as container, sagemaker_front(container.url) as url:
        yield url


@pytest.fixture
def lambda_of(front_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Invoke]:
    """Starts a function of the template."""

    def start(function: str, runtime_url: str = front_url) -> Invoke:
        properties = load_template("pluto.yaml")["Resources"][function]["Properties"]
        values = {"EndpointName": "tercet", "AWS::URLSuffix": "amazonaws.com"}
        given = {name: values[value["Ref"]] for name, value in properties["Environment"]["Variables"].items()}
        lambdas = {"AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION, **AWS_ENVIRON}
        for name, value in {**lambdas, "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": runtime_url, **given}.items():
            monkeypatch.setenv(name, value)
        index: dict[str, Any] = {"__name__": "index"}
        exec(properties["Code"]["ZipFile"], index)
        return lambda event: dict(index["handler"](event, None))

    return start


def event_2(body: str | None, *, is_base64: bool = False) -> dict[str, Any]:
    """An HTTP API's event in payload format 2.0, as far as the functions read it."""
    event: dict[str, Any] = {"version": "2.0", "isBase64Encoded": is_base64}
    return event if body is None else {**event, "body": body}


def event_1(body: str | None) -> dict[str, Any]:
    """The same in payload format 1.0, which has a null for no body."""
    return {"version": "1.0", "isBase64Encoded": False, "body": body}


def test_generate_answers_what_the_endpoint_answers(lambda_of: Callable[..., Invoke]) -> None:
    invoke = lambda_of("GenerateFunction")
    body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "do_sample": False}})
    events = (event_2(body), event_1(body), event_2(base64.b64encode(body.encode()).decode(), is_base64=True))
    answers = [invoke(event) for event in events]
    assert [answer["statusCode"] for answer in answers] == [200] * 3
    assert answers[0]["headers"] == {"content-type": "application/json"}
    [generation] = json.loads(answers[0]["body"])
    assert generation["generated_text"]
    assert len({answer["body"] for answer in answers}) == 1

    for nothing in (event_2(None), event_2(""), event_1(None)):
        assert (invoke(nothing)["statusCode"], invoke(nothing)["body"]) == (400, EMPTY)
    for invalid in ("{}", '{"inputs": ""}', '{"text": "x"}', "[1]", "not JSON"):
        assert (invoke(event_2(invalid))["statusCode"], invoke(event_2(invalid))["body"]) == (400, INVALID)
    assert invoke(event_2("%%%", is_base64=True))["body"] == INVALID

    refusal = invoke(event_2(json.dumps({"inputs": PROMPT, "parameters": {"top_k": -2}})))
    assert refusal["statusCode"] == 422
    assert json.loads(refusal["body"])["error_type"] == "validation"


def test_generate_answers_503_or_504_when_the_endpoint_cannot(lambda_of: Callable[..., Invoke], cloud: Cloud) -> None:
    cloud.fail(INVOKE, "ThrottlingException", status=400)
    cloud.fail(INVOKE, "ValidationError", "Endpoint tercet not found", status=400, first=2)
    invoke = lambda_of("GenerateFunction", cloud.url)
    request = event_2(json.dumps({"inputs": PROMPT}))
    for _ in range(2):
        assert invoke(request)["statusCode"] == 503
    assert lambda_of("GenerateFunction", "http://127.0.0.1:9")(request)["statusCode"] == 504


def test_endpoint_answers_the_invocation_address(lambda_of: Callable[..., Invoke]) -> None:
    answer = lambda_of("EndpointFunction")({**event_2(None), "routeKey": "GET /endpoint"})
    assert answer["statusCode"] == 200
    assert answer["body"] == f"https://runtime.sagemaker.{REGION}.amazonaws.com/endpoints/tercet/invocations"


@pytest.mark.usefixtures("deployer")
def test_the_command_asks_a_real_container(
    front_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", front_url)
    deploy_commands.sagemaker(image="tercet", instance_type="ml.c5.xlarge")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(PROMPT)]
    assert len(lines) == 3
    deploy_commands.sagemaker(destroy=True)


class PlutoContainer(Container):
    """The image as SageMaker starts it for the published Pluto program: its `envs`, the argument `serve`, and no more.

    Only the port is another, and the caches and the run directory are the test's.
    """

    command = (*TERCET, "serve")

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        of_image, own = image("sagemaker"), self.environ
        assert [*of_image.entrypoint, "serve"] == ["tercet", "serve"]
        self.environ = {name: value for name, value in own.items() if not name.startswith("TERCET_")}
        self.environ |= {**of_image.environ, "PATH": own["PATH"], "HF_HOME": str(base / "huggingface")}
        self.environ |= {name: own[name] for name in ("TERCET_BIND", "TERCET_RUN_DIR")}
        self.environ |= {"HF_MODEL_ID": "openai-community/gpt2", "HF_TASK": "text-generation"}


def test_a_pluto_program_needs_only_the_uri_of_the_image(
    hub: Hub, tmp_path: Path, lambda_of: Callable[..., Invoke]
) -> None:
    """Its `index.ts` sets HF_MODEL_ID and HF_TASK; the container fetches that repository, and its routes answer."""
    hub.repositories["openai-community/gpt2"] = {
        path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()
    }
    with serving(PlutoContainer(tmp_path / "t")) as container, sagemaker_front(container.url) as url:
        assert "/api/models/openai-community/gpt2" in hub.requests
        answer = lambda_of("GenerateFunction", url)(event_2(json.dumps({"inputs": PROMPT})))
        assert answer["statusCode"] == 200
        [generation] = json.loads(answer["body"])
        assert generation["generated_text"]


def test_each_function_is_short_enough_to_stand_in_the_template_and_imports_what_lambda_has() -> None:
    resources = load_template("pluto.yaml")["Resources"]
    for name in ("GenerateFunction", "EndpointFunction"):
        source = resources[name]["Properties"]["Code"]["ZipFile"]
        assert len(source.encode()) <= 4096
        imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
        assert imported <= {*sys.stdlib_module_names, "boto3", "botocore"}


def test_each_function_may_do_what_it_does_and_no_more() -> None:
    template = load_template("pluto.yaml")
    logs = {"logs:CreateLogStream", "logs:PutLogEvents"}
    assert role_actions(template, "GenerateRole") == {"sagemaker:InvokeEndpoint", *logs}
    assert role_actions(template, "EndpointRole") == logs
    for name in ("Generate", "Endpoint"):
        role = template["Resources"][f"{name}Function"]["Properties"]["Role"]
        assert role == {"Fn::GetAtt": [f"{name}Role", "Arn"]}
    routes = [item["Properties"] for item in template["Resources"].values() if item["Type"].endswith("::Route")]
    assert {route["RouteKey"] for route in routes} == {"POST /generate", "GET /endpoint"}
