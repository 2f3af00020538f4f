"""Packs the Lambda function of `lambda-ec2.yaml`: `python -m deploy.aws.package build/aws`.

The archive's name holds a digest of its content, so CloudFormation updates the function when, and only when, it has
changed. Equal sources make equal archives.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

SOURCES = Path(__file__).parent / "wake"
# Time of every file: the earliest that the format knows.
_TIME = (1980, 1, 1, 0, 0, 0)


def pack(directory: Path) -> Path:
    """Write `tercet-wake-<digest>.zip` and return its path."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(SOURCES.glob("*.py")):
            # Below folders without `__init__.py`: those of Tercet import what Lambda lacks.
            info = zipfile.ZipInfo(f"deploy/aws/wake/{path.name}", _TIME)
            info.external_attr = 0o644 << 16
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = content.getvalue()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"tercet-wake-{hashlib.sha256(data).hexdigest()[:16]}.zip"
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{pack(Path(sys.argv[1]))}\n")
