"""The Lambda function in front of the stopped instance: moto's EC2 and DynamoDB behind a proxy that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.cloud.aws.wake.handler import SweepFailed, make_service
from deploy.cloud.aws.wake_archive import PLATFORM, PYTHON, download_wheels, find_modules, pack
from gateway.jobs.dynamodb import DynamoDbStore, job_of
from gateway.jobs.queue import JobQueue
from gateway.jobs.store import Job
from tests.deploy.cloud.aws.cloud import Cloud
from tests.deploy.cloud.aws.function import PROMPT, USER, Function, deployed_function, in_state
from tests.deploy.cloud.aws.stacks import TEMPLATES, load_template, role_actions
from tests.programs import run_program

CANARY = "canary-91c0aa37"


@pytest.fixture(scope="module")
def deployed(running: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Function]:
    """The stack of the template, and the function's process with its environment, once for this module."""
    with deployed_function(running, tmp_path_factory.mktemp("archive")) as function:
        yield function


@pytest.fixture
def function(deployed: Function) -> Iterator[Function]:
    """The function with a stopped instance and no job."""
    deployed.cloud.forget()
    deployed.erase()
    deployed.stop_instance()
    deployed.sweep()  # its first call looks for the table
    deployed.cloud.forget()
    yield deployed
    deployed.cloud.forget()


@pytest.fixture
def queue(function: Function) -> Iterator[JobQueue]:
    """A gateway's view of the same table."""
    queue = function.open_queue()
    yield queue
    queue.close()


def test_a_request_becomes_a_job_that_a_gateway_runs(function: Function, queue: JobQueue) -> None:
    accepted = function.post(PROMPT)
    assert (accepted.status, accepted.body["state"]) == (202, "queued")
    assert accepted.headers["location"] == f"/jobs/{accepted.body['id']}"
    assert accepted.body["instance"] == {"state": "pending"}
    assert function.cloud.operations() == ["Query", "Query", "PutItem", "DescribeInstances", "StartInstances"]
    assert function.state == "running"
    leased = queue.lease()
    assert leased is not None
    assert json.loads(leased.request) == {"context": PROMPT["prompt"], "n_samples": 2, "length": 8}
    assert function.get(leased.id).body["state"] == "running"
    assert queue.finish(leased, "succeeded", result=b'{"sentences":["\xc3\xa9"]}')
    read = function.get(leased.id)
    assert (read.status, read.body["state"], read.body["result"]) == (200, "succeeded", {"sentences": ["é"]})
    assert read.body["finished_at"] >= read.body["started_at"] >= read.body["created_at"]


def test_a_job_belongs_to_its_principal_and_to_its_key(function: Function) -> None:
    key = {"idempotency-key": "k"}
    job_id = function.post(PROMPT, **key).body["id"]
    assert function.post(PROMPT, **key).body["id"] == job_id
    assert function.post(PROMPT, user="AIDAOTHER", **key).body["id"] != job_id
    for answer in (function.get(job_id, user="AIDAOTHER"), function.get("x" * 24), function.get("short")):
        assert (answer.status, answer.body["code"]) == (404, "unknown_job")
    assert function.get(job_id, user="").status == 401


def test_a_job_expires_and_the_queue_is_bounded_as_the_template_says(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_QUEUE", "2")
    make_service.cache_clear()
    job_id = function.post(PROMPT).body["id"]
    assert function.post(PROMPT, user="AIDAOTHER").status == 202
    full = function.post(PROMPT, user="AIDATHIRD")
    assert (full.status, full.body["code"]) == (503, "overloaded")
    assert int(full.headers["retry-after"]) >= 1
    later = time.time() + float(function.environ["JOB_TTL_S"]) + 2
    monkeypatch.setattr(DynamoDbStore, "now", lambda _: later)
    make_service.cache_clear()
    assert function.get(job_id).status == 410
    make_service.cache_clear()


def test_requests_need_no_signature_where_the_template_says_so(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page in browsers has no AWS credentials. Else a request without a principal is refused."""
    assert function.post(PROMPT, user="").status == 401
    monkeypatch.setenv("AUTHORIZATION", "NONE")
    make_service.cache_clear()
    try:
        created = function.post(PROMPT, user="")
        assert created.status == 202
        assert function.get(created.body["id"], user="").status == 200
    finally:
        make_service.cache_clear()


# The instance.


def test_a_stopping_instance_is_started_by_the_sweep_after_its_stop(function: Function) -> None:
    function.cloud.rewrite("DescribeInstances", in_state("stopping"))
    answer = function.post(PROMPT)
    assert answer.status == 202
    assert answer.body["instance"] == {"state": "stopping", "error": "IncorrectInstanceState"}
    assert answer.headers["retry-after"] == "30"
    assert function.sweep() == {"open": True, "instance": "pending"}
    assert function.sweep() == {"open": True, "instance": "running"}


@pytest.mark.parametrize(
    ("code", "status"), [("InsufficientInstanceCapacity", 500), ("RequestLimitExceeded", 503), ("InternalError", 500)]
)
def test_a_start_that_is_refused_for_a_moment_is_repeated(function: Function, code: str, status: int) -> None:
    function.cloud.fail("StartInstances", code, status=status, times=2)
    assert function.post(PROMPT).body["instance"] == {"state": "pending"}
    assert function.cloud.count("StartInstances") == 3


def test_an_instance_that_never_starts_loses_no_job(function: Function, queue: JobQueue) -> None:
    function.cloud.fail("StartInstances", "InsufficientInstanceCapacity", status=500, times=1000)
    answer = function.post(PROMPT, prefer="wait=1")
    assert answer.status == 202
    assert answer.body["instance"] == {"state": "stopped", "error": "InsufficientInstanceCapacity"}
    with pytest.raises(SweepFailed, match=r"stopped .InsufficientInstanceCapacity"):
        function.sweep()
    function.cloud.forget()
    assert function.sweep()["instance"] == "pending"
    leased = queue.lease()
    assert leased is not None
    assert leased.id == answer.body["id"]


@pytest.mark.parametrize(
    "instance",
    [
        {"state": "running"},
        {"state": "unknown", "error": "InvalidInstanceID.NotFound"},
        {"state": "unknown", "error": "UnauthorizedOperation"},
        {"state": "terminated", "error": "InstanceTerminated"},
    ],
)
def test_an_instance_that_runs_or_cannot_be_started_is_reported_at_once(
    function: Function, instance: dict[str, str]
) -> None:
    if instance["state"] == "unknown":
        function.cloud.fail("DescribeInstances", instance["error"], status=400, times=9)
    else:
        function.cloud.rewrite("DescribeInstances", in_state(instance["state"]), times=9)
    assert function.post(PROMPT).body["instance"] == instance
    assert function.cloud.operations("ec2") == ["DescribeInstances"]


def test_reading_a_job_that_waits_starts_the_instance(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = function.post(PROMPT).body["id"]
    function.stop_instance()
    function.cloud.forget()
    assert "instance" not in function.get(job_id).body
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 6)
    assert function.get(job_id).body["instance"] == {"state": "pending"}
    assert function.cloud.operations() == ["GetItem", "GetItem", "DescribeInstances", "StartInstances"]


def test_a_sweep_without_jobs_does_not_look_at_the_instance(function: Function) -> None:
    assert function.sweep() == {"open": False}
    assert function.cloud.operations() == ["Query"]


# The table.


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
def test_a_confirmation_that_is_lost_makes_no_second_job(function: Function, headers: dict[str, str]) -> None:
    operation = "TransactWriteItems" if headers else "PutItem"
    function.cloud.fail(operation, "InternalServerError", is_performed=True)
    answer = function.post(PROMPT, **headers)
    assert answer.status == 202
    jobs = [item for item in function.items() if item["pk"]["S"].startswith("job:")]
    assert [item["pk"]["S"] for item in jobs] == [f"job:{answer.body['id']}"]
    assert function.cloud.count(operation) == 2


def test_throttling_and_errors_of_dynamodb_are_repeated_and_then_answered(function: Function) -> None:
    function.cloud.fail("PutItem", "ProvisionedThroughputExceededException", status=400, times=2)
    assert function.post(PROMPT).status == 202
    function.cloud.forget()
    function.cloud.fail("PutItem", "InternalServerError", times=100)
    answer = function.post(PROMPT)
    assert (answer.status, answer.body["code"]) == (503, "jobs_unavailable")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "retry-after" in answer.headers
    # Without a job there is nothing to start the instance for.
    assert function.cloud.count("DescribeInstances") == 0


# Requests.


def test_bad_requests_are_answered_with_the_field_and_start_nothing(function: Function) -> None:
    answer = function.post({"prompt": "x", "num_samples": 9})
    assert (answer.status, answer.body["code"]) == (422, "invalid_request")
    assert answer.body["errors"][0]["field"] == "n_samples"
    assert answer.headers["content-type"] == "application/problem+json"
    assert function.post(PROMPT, **{"idempotency-key": "é"}).status == 422
    assert function.post("[").status == 400
    assert function.post({"prompt": "x" * 400_000}).status == 413
    assert function.cloud.operations() == []


def test_the_log_has_neither_prompt_nor_key_nor_whole_id(
    function: Function, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = function.post({"prompt": CANARY}, **{"idempotency-key": CANARY})
    function.cloud.fail("TransactWriteItems", "InternalServerError", CANARY, times=9)
    function.post({"prompt": CANARY}, **{"idempotency-key": f"{CANARY}2"})
    monkeypatch.setattr(JobQueue, "find", lambda *_: dict[str, Job]()[CANARY])
    assert function.get(accepted.body["id"]).status == 500
    logged = capfd.readouterr().out
    # The gateway's modules write plain lines.
    assert [json.loads(line)["event"] for line in logged.splitlines() if line.startswith("{")] == [
        "job_queued",
        "instance_started",
        "job_store_failed",
        "unhandled_exception",
    ]
    assert CANARY not in logged
    assert accepted.body["id"] not in logged


# What is deployed.


def installed_wheel(directory: Path, name: str) -> Path:
    """A library as it is installed here, in the form of a wheel."""
    path = directory / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in files(name) or ():
            if not file.is_absolute() and ".." not in file.parts and file.suffix != ".pyc":
                wheel.write(file.locate(), str(file))
    return path


def test_the_archive_runs_with_pythons_library_and_boto3_alone(function: Function, tmp_path: Path) -> None:
    wheels = [installed_wheel(tmp_path, name) for name in sorted(find_modules()[1])]
    archive = pack(tmp_path, wheels)
    assert pack(tmp_path / "again", wheels).name == archive.name
    task, provided = tmp_path / "task", tmp_path / "provided"
    with zipfile.ZipFile(archive) as content:
        content.extractall(task)
    provided.mkdir()
    for name in ("boto3", "botocore", "jmespath", "s3transfer", "urllib3", "dateutil", "six"):
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        path = Path(found.origin)
        path = path.parent if path.name == "__init__.py" else path
        (provided / path.name).symlink_to(path)
    module, _, name = load_template("lambda-ec2.yaml")["Resources"]["Function"]["Properties"]["Handler"].rpartition(".")
    context = {"http": {"method": "POST", "path": "/jobs"}, "authorizer": {"iam": {"userId": USER}}}
    event = {"routeKey": "POST /jobs", "requestContext": context, "headers": {}, "body": json.dumps(PROMPT)}
    code = (
        f"import sys\nsys.path[:0] = [{str(task)!r}, {str(provided)!r}]\n"
        f"import json, {module} as module\n"
        "class Context:\n    def get_remaining_time_in_millis(self):\n        return 29_000\n"
        f"answer = module.{name}({event!r}, Context())\n"
        "print(json.dumps([answer, module.__file__, sorted(sys.modules)]))"
    )
    done = run_program(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, env={"PATH": os.environ["PATH"], **function.environ}
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer, file, modules = json.loads(done.stdout.splitlines()[-1])
    assert answer["statusCode"] == 202, answer
    assert file.startswith(str(task))
    assert not {"falcon", "torch", "httpx", "gunicorn"} & {*modules}
    assert [job_of(item).state for item in function.items()] == ["queued"]


def test_the_archives_libraries_are_those_of_lambdas_platform(tmp_path: Path) -> None:
    function = load_template("lambda-ec2.yaml")["Resources"]["Function"]["Properties"]
    assert function["Runtime"] == f"python{PYTHON}"
    assert (function["Architectures"], PLATFORM.rpartition("_")[2]) == (["arm64"], "aarch64")
    try:
        wheels = download_wheels(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("pip's index cannot be reached")
    names = {wheel.name.partition("-")[0]: wheel.name for wheel in wheels}
    assert names.keys() == {"msgspec", "structlog"}
    assert f"-cp311-cp311-{PLATFORM}." in names["msgspec"]


# A transaction needs the permissions of its actions; moto checks none.
_TRANSACTION = {"TransactWriteItems": {"PutItem", "DeleteItem"}}


def test_the_roles_allow_exactly_what_is_called(function: Function, queue: JobQueue) -> None:
    template = load_template("lambda-ec2.yaml")

    def used() -> set[str]:
        calls = function.cloud.calls
        function.cloud.forget()
        return {
            f"{call.service}:{name}" for call in calls for name in _TRANSACTION.get(call.operation, {call.operation})
        }

    make_service.cache_clear()
    job_id = function.post(PROMPT, **{"idempotency-key": "k"}).body["id"]
    function.get(job_id)
    function.sweep()
    by_function = used()
    logs = {"logs:CreateLogStream", "logs:PutLogEvents"}
    # Only what is damaged is updated.
    assert role_actions(template, "FunctionRole") == by_function | logs | {"dynamodb:UpdateItem"}
    leased = queue.lease()
    assert leased is not None
    queue.renew(leased)
    queue.finish(leased, "succeeded", result=b"{}")
    queue.cancel_or_delete(leased.id, leased.owner)
    queue.purge()
    # The first boot fetches the archives, and a token if there is one.
    others = {"dynamodb:UpdateItem", "s3:GetObject", "ssm:GetParameter"}
    assert role_actions(template, "InstanceRole") == used() | others


def test_only_the_tagged_instance_may_be_started() -> None:
    resources = load_template("lambda-ec2.yaml")["Resources"]
    statements = resources["FunctionRole"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    (start,) = (each for each in statements if each["Action"] == "ec2:StartInstances")
    assert start["Condition"] == {"StringEquals": {"aws:ResourceTag/tercet-wake": {"Ref": "AWS::StackName"}}}
    assert {"Key": "tercet-wake", "Value": {"Ref": "AWS::StackName"}} in resources["Instance"]["Properties"]["Tags"]
    data = resources["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    assert data["InstanceInitiatedShutdownBehavior"] == "stop"
    assert "SecurityGroupIngress" not in resources["SecurityGroup"]["Properties"]
    routes = [each["Properties"] for each in resources.values() if each["Type"] == "AWS::ApiGatewayV2::Route"]
    assert all(route["AuthorizationType"] == {"Ref": "AuthorizationType"} for route in routes)
    assert load_template("lambda-ec2.yaml")["Parameters"]["AuthorizationType"]["Default"] == "AWS_IAM"


def test_cfn_lint_finds_no_fault_in_the_templates() -> None:
    program = Path(sys.executable).with_name("cfn-lint")
    templates = sorted(TEMPLATES.glob("*.yaml"))
    assert len(templates) == 3
    done = run_program([program, "--include-checks", "I", "--", *templates])
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
