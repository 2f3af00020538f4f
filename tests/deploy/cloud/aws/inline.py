"""`python -m tests.deploy.cloud.aws.inline`: puts the functions of deploy/cloud/aws/pluto/ into pluto.yaml.

CloudFormation takes a function's source in the template itself if it is short, so the template needs no bucket. Where a
line of the template ends with `# pluto/NAME.py`, the source stands below it, one level deeper.
"""

from __future__ import annotations

import re
from pathlib import Path

from shared.errors import StartError

DIRECTORY = Path(__file__).parents[4] / "deploy/cloud/aws"
TEMPLATE = DIRECTORY / "pluto.yaml"
# docs.aws.amazon.com/AWSCloudFormation: the property ZipFile of AWS::Lambda::Function's Code.
MAX_SOURCE_BYTES = 4096
_PLACE = re.compile(
    r"^(?P<indent> *)ZipFile: \|  # (?P<path>pluto/\w+\.py)\n(?:(?P=indent) +\S.*\n| *\n)*", re.MULTILINE
)


def inlined(template: str) -> str:
    """The template with the functions' sources as they are now.

    Raises:
        StartError: a source is longer than CloudFormation permits.
    """
    return _PLACE.sub(_block, template)


def _block(match: re.Match[str]) -> str:
    source = (DIRECTORY / match["path"]).read_text(encoding="utf-8")
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise StartError(
            f"deploy/cloud/aws/{match['path']} must be at most {MAX_SOURCE_BYTES} bytes to stand in a template."
        )
    indent = match["indent"]
    lines = (f"{indent}  {line}".rstrip() for line in source.splitlines())
    return "\n".join([f"{indent}ZipFile: |  # {match['path']}", *lines, ""])


if __name__ == "__main__":
    TEMPLATE.write_text(inlined(TEMPLATE.read_text(encoding="utf-8")), encoding="utf-8")
