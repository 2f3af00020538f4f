"""The entry of a stage's process, importable without torch: the run itself never loads it."""

from __future__ import annotations

from deploy.bench.gpu.context import Context


def main(name: str, context: Context) -> None:
    """Run a stage in this process, which has been forked for it."""
    from deploy.bench.gpu import stage_process

    stage_process.main(name, context)
