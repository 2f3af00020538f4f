"""`tercet serve --sagemaker`: the settings of a SageMaker container, from what SageMaker gives to it.

SageMaker runs a container with the argument `serve`, puts the files of `model.tar.gz` into `/opt/ml/model`, sends
requests to port 8080, gives up on one after 60 s, and kills the container 30 s after SIGTERM
(docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html). `HF_MODEL_ID` and `HF_TASK` are those of
Hugging Face's containers. Knows no gunicorn and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.errors import StartError
from shared.home import absolute_path
from shared.settings import Settings

MODEL_PATH = Path("/opt/ml/model")
MODEL_NAME = "model"
TASK = "text-generation"
MAX_TIMEOUT_S = 55.0
MAX_GRACE_S = 25.0
# The supervisor may need some seconds more than the grace until the last process is gone.
DEFAULTS = {
    "TERCET_BIND": "0.0.0.0:8080",
    "TERCET_HOSTS": "*",
    "TERCET_JOBS": "none",
    "TERCET_TIMEOUT_S": "50",
    "TERCET_GRACE_S": "20",
}


def sagemaker_environment(
    environ: Mapping[str, str], model_path: Path | None = None, default_path: Path = MODEL_PATH
) -> dict[str, str]:
    """Variables to set before the settings are loaded. Settings in `environ` stay as they are.

    Args:
        model_path: directory of the model; None: `default_path` if it has files, else `HF_MODEL_ID`, else
            `TERCET_MODELS`.

    Raises:
        StartError: there is no model, the task is another than text generation, or the server would be slower than
            SageMaker waits.
    """
    if (task := environ.get("HF_TASK") or TASK) != TASK:
        raise StartError(f"HF_TASK={task} is not served: GPT-2 generates text, set HF_TASK={TASK}.")
    found = {name: value for name, value in DEFAULTS.items() if not environ.get(name, "").strip()}
    found["TERCET_SAGEMAKER"] = "1"
    if (source := _source(environ, model_path, default_path)) is not None:
        if "," in source:
            raise StartError(f"The model's name {source!r} has a comma: rename it.")
        found["TERCET_MODELS"] = f"{MODEL_NAME}={source}"
    settings = Settings.load({**environ, **found})
    if settings.limits.timeout_s > MAX_TIMEOUT_S:
        raise StartError(f"TERCET_TIMEOUT_S must be at most {MAX_TIMEOUT_S:g} here: SageMaker waits for 60 s.")
    if settings.server.grace_s > MAX_GRACE_S:
        raise StartError(f"TERCET_GRACE_S must be at most {MAX_GRACE_S:g} here: SageMaker kills after 30 s.")
    return found


def _source(environ: Mapping[str, str], model_path: Path | None, default_path: Path) -> str | None:
    """A directory or a repository of the hub; None: `TERCET_MODELS` has the models.

    Raises:
        StartError: there is none.
    """
    if model_path is not None:
        try:
            return str(absolute_path(str(model_path)))
        except ValueError as error:
            raise StartError(f"The model's path {model_path} {error}.") from error
    if default_path.is_dir() and any(default_path.iterdir()):
        return str(default_path)
    if repository := environ.get("HF_MODEL_ID", "").strip():
        return repository
    if environ.get("TERCET_MODELS", "").strip():
        return None
    raise StartError(
        f"There is no model to serve: {default_path} has no files. Create the SageMaker model with a model.tar.gz of "
        "config.json, model.safetensors and tokenizer.json, or set HF_MODEL_ID to a repository of the hub."
    )
