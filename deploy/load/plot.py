"""Plots as PNG files. matplotlib is a development dependency, so it is imported only when a plot is requested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.load.report import Document
from shared.errors import StartError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 144


def check(path: Path) -> None:
    """Check before a run that its plot can be written.

    Raises:
        StartError: matplotlib or the directory is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise StartError("--plot needs matplotlib: `make setup` installs it.") from error
    if not path.parent.is_dir():
        raise StartError(f"--plot {path}: {path.parent} is not a directory.")


def save(figure: Figure, document: Document, path: Path) -> None:
    """Write the figure under a title that names the model and the machine."""
    quick = ", quick run: do not quote" if document.is_quick else ""
    figure.suptitle(f"{document.model}, {document.machine.cores} cores of {document.machine.cpu}{quick}", fontsize=9)
    figure.savefig(path, dpi=DPI)
