"""Gathers the wheels that a bare machine with a GPU lacks: `python -m tests.bench.gpu.wheels DIRECTORY`.

The versions and hashes are those of requirements/*.txt. Knows pip and the pins. Imports nothing but the standard
library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PINS = ("requirements/serve.txt", "requirements/dev.txt")
PYTHON = "3.12"
# pip matches each platform's number exactly, so each that a wheel may name is listed.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64")

# What a machine with Python 3.12, torch 2.11 with CUDA and transformers 5.17 lacks of what the stages import.
MISSING = (
    *("execnet", "falcon", "gunicorn", "httptools", "msgspec", "pytest-xdist", "rapidfuzz"),
    "structlog",
)
# What it has of what the stages import; nothing of it travels.
PRESENT = (
    *("certifi", "charset-normalizer", "click", "cuda-bindings", "filelock", "fsspec", "hf-xet", "httpcore"),
    *("httpx", "huggingface-hub", "hypothesis", "jinja2", "numpy", "packaging"),
    *("prometheus-client", "psutil", "pytest", "pytest-timeout", "pyyaml", "regex", "requests", "rich"),
    *("safetensors", "scipy", "setuptools", "tokenizers", "torch", "tqdm", "transformers", "triton", "typer"),
    "typing-extensions",
)


def requirements() -> str:
    """The pins of MISSING with their hashes, as a file of pins.

    Raises:
        KeyError: a package has no pin.
    """
    text = "".join((ROOT / name).read_text("utf-8") for name in PINS)
    entries = {
        re.split(r"[=\[\s]", entry)[0].lower(): entry for entry in re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    }
    return "".join(entries[name] for name in MISSING)


def gather(directory: Path) -> list[Path]:
    """Download the wheels; returns them.

    Raises:
        subprocess.CalledProcessError: a wheel cannot be had.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.whl"):
        path.unlink()
    pins = directory / "requirements.txt"
    pins.write_text(requirements())
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(directory), "-r", str(pins)], check=True)
    return sorted(directory.glob("*.whl"))


if __name__ == "__main__":
    for path in gather(Path(sys.argv[1])):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")
