"""Tercet, self-hosted autocompletion. The command `tercet` is all that is public.

A wheel has the code in `tercet/_app`, with this module as `tercet/__init__.py`: other packages may own names like
`shared` and `deploy` in site-packages. In a checkout the code lies at the top, and the installation adds that to the
path.
"""

from __future__ import annotations

import sys
from pathlib import Path

_APP = Path(__file__).parent / "_app"


def main() -> None:
    """Run the command line with the arguments of this process."""
    if _APP.is_dir():
        sys.path.insert(0, str(_APP))
    from deploy.cli import main as run  # only now is it on the path

    run()
