"""`python -m tests.bench COMMAND`; `make bench BENCH=COMMAND ARGS="…"` does the same."""

from __future__ import annotations

import sys

from deploy.terminal import labelled
from shared.errors import StartError
from tests.bench.cli import parser
from tests.bench.results import err

# A spawned contender imports this module too.
if __name__ == "__main__":
    args = parser().parse_args()
    try:
        sys.exit(args.run(args))
    except StartError as error:
        err.print(labelled("bench:", "red", str(error)), highlight=False, soft_wrap=True)
        sys.exit(1)
