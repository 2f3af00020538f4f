"""What `tercet serve --sagemaker` makes of a container's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cloud.sagemaker import sagemaker_environment
from shared.errors import StartError
from shared.masters.startup import check_access, check_exposure
from shared.setting_values import Address
from shared.settings import Settings
from tests.deploy.command_line.test_cli import tercet


def test_the_defaults_are_sagemakers(tmp_path: Path) -> None:
    found = sagemaker_environment({}, tmp_path)
    settings = Settings.load(found)
    assert settings.server.bind == Address("0.0.0.0", 8080)
    assert [str(spec) for spec in settings.model.models] == [f"model={tmp_path}"]
    assert settings.limits.timeout_s < 60
    assert settings.server.grace_s <= 25
    assert settings.allows_host("model.aws.local:8080")
    assert settings.job_store == "none"
    check_access(settings)  # an address beyond loopback without a key
    check_exposure(settings, settings.server.bind)


def test_settings_of_the_environment_win(tmp_path: Path) -> None:
    environ = {"TERCET_BIND": "127.0.0.1:9", "TERCET_GRACE_S": "3", "TERCET_MODELS": "embedded"}
    settings = Settings.load(environ | sagemaker_environment(environ, default_path=tmp_path))
    assert (settings.server.bind.port, settings.server.grace_s, settings.model.models[0].name) == (9, 3.0, "embedded")


def test_the_given_directory_comes_before_the_default_one_and_the_hubs(tmp_path: Path) -> None:
    default, given = tmp_path / "default", tmp_path / "given"
    environ = {"HF_MODEL_ID": "openai-community/gpt2", "HF_TASK": "text-generation", "TERCET_MODELS": "embedded"}

    def source(model_path: Path | None) -> str:
        return sagemaker_environment(environ, model_path, default)["TERCET_MODELS"]

    assert source(None) == "model=openai-community/gpt2"  # there is no default directory
    default.mkdir()
    assert source(None) == "model=openai-community/gpt2"  # it has no files
    (default / "config.json").touch()
    assert source(None) == f"model={default}"
    assert source(given) == f"model={given}"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "There is no model to serve"),
        ({"HF_MODEL_ID": "gpt2", "HF_TASK": "text-classification"}, "HF_TASK=text-classification is not served"),
        ({"HF_MODEL_ID": "gpt2", "TERCET_TIMEOUT_S": "56"}, "TERCET_TIMEOUT_S must be at most 55"),
        ({"HF_MODEL_ID": "gpt2", "TERCET_GRACE_S": "26"}, "TERCET_GRACE_S must be at most 25"),
        ({"HF_MODEL_ID": "a,b"}, "has a comma"),
    ],
)
def test_what_cannot_serve_in_a_container_is_refused(environ: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=message):
        sagemaker_environment(environ, default_path=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ([], {"TERCET_SAGEMAKER": "1", "HF_TASK": "a"}, "HF_TASK=a is not served"),
        (["--sagemaker"], {"HF_TASK": "a"}, "HF_TASK=a is not served"),
        (["/some/where"], {}, "belongs to --sagemaker"),
    ],
)
def test_the_setting_does_what_the_option_does_and_a_directory_needs_it(
    arguments: list[str], environ: dict[str, str], message: str
) -> None:
    done = tercet("serve", *arguments, **environ)
    assert (done.returncode, message in done.stderr) == (1, True)
