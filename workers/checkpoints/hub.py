"""Fetches a checkpoint from a model hub into huggingface_hub's cache on this machine.

All that may ask the hub runs in a child process, from `main` on: a name server or hub that never answers then costs a
bounded time, and a process that will fork loads no HTTP client and keeps no thread. A cached snapshot that is whole is
used without asking the hub. `workers.checkpoints.files` knows which files make a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from shared.home import home_directory
from workers.checkpoints.child_process import (
    MIN_BYTES,
    NotDelivered,
    Progress,
    expect,
    fetch_stage,
    limit,
    report,
    report_progress,
    report_result,
    run_child,
)
from workers.checkpoints.files import CheckpointError, Incomplete, check_files, inspect, needed_files, read_config

# Each says where huggingface_hub keeps its cache; else that is in the home directory.
CACHE_VARIABLES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def from_hub(
    name: str, repository: str, revision: str | None, title: str, timeout_s: float | None, on_progress: Progress
) -> Path:
    """The directory in the hub's cache that holds `repository`, fetched first where the cache lacks it.

    Args:
        name: what the plan calls the model.
        revision: a commit, tag or branch; None is the main branch.
        title: what a message to a person calls it.
        timeout_s: how long the hub may take to list the repository. None looks into the cache only.

    Returns:
        A directory whose name is the commit that the revision stands for.

    Raises:
        CheckpointError: the repository cannot be fetched, lacks files, or holds a kind of model that is not served.
    """
    if home_directory() is None and not any(os.environ.get(name) for name in CACHE_VARIABLES):
        # huggingface_hub would make a directory called ~ in the current one.
        raise NotDelivered("the model hub's cache needs a home directory", "set HF_HOME to a directory.")
    option = f" --revision {revision}" if revision else ""
    remedy = (
        f"to serve {title}, let this machine reach a hub, or run `hf download {repository}{option} "
        "config.json model.safetensors tokenizer.json` where one can be reached and copy its cache "
        f"(HF_HOME) here, or name a directory that holds it, as in TERCET_MODELS={name}=/path, "
        "or serve the checkpoint that comes with Tercet, TERCET_MODELS=embedded."
    )
    deadline = "" if timeout_s is None else str(time.monotonic() + timeout_s)
    try:
        return run_child(
            "hub", repository, revision or "", deadline, title=f"fetching {title}", on_progress=on_progress
        )
    except NotDelivered as error:
        raise NotDelivered(error.reason, remedy) from error


def main() -> None:
    """Fetch the repository named on the command line; for the child process."""
    repository, revision, deadline = sys.argv[3], sys.argv[4] or None, sys.argv[5]
    limit()

    def find() -> Path:
        if (cached := _find_cached(repository, revision)) is not None:
            return cached
        if not deadline:
            raise NotDelivered(f"the hub's cache on this machine has no {repository}")
        return _fetch(repository, revision, float(deadline))

    report_result(find, title=f"asking for {repository}")


class _HubFile(NamedTuple):
    """A file as the hub lists it."""

    num_bytes: int  # 0 if not given
    sha256: str | None  # of a large (LFS) file
    blob_id: str | None  # of any other: its git object id


def _find_cached(repository: str, revision: str | None) -> Path | None:
    """The snapshot of this revision, or the newest of the main branch, in the hub's cache, if it is whole."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError as error:
        raise CheckpointError(
            f"{repository!r} is neither a directory on this machine nor the name of a repository "
            "on a hub: give a path like /models/legal-gpt2 or a name like organisation/repository."
        ) from error
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    try:
        inspect(directory)
    except Incomplete as error:
        for file in error.damaged:
            _remove(directory / file)
        return None
    return directory


def _fetch(repository: str, revision: str | None, deadline: float) -> Path:
    """The snapshot of the revision, or of the main branch, with every file that Tercet reads."""
    report_progress(f"Asking the model hub for {repository}", 0.0)
    # At least a second, in case this process took most of the time to start.
    timeout_s = max(deadline - time.monotonic(), 1.0)
    timer = threading.Timer(timeout_s, _time_out)
    timer.daemon = True  # must not delay the end where listing fails
    timer.start()
    commit, files = _list_files(repository, revision, timeout_s)
    timer.cancel()
    if "config.json" not in files:
        check_files(repository, files)
    # config.json first: it may be reason enough not to fetch the weights. By its name, not by its commit, so that the
    # cache records which commit the name stands for.
    directory = _download(repository, revision, {"config.json": files["config.json"]})
    if directory.name != commit:
        raise NotDelivered(f"{repository} changed while it was fetched")
    config = read_config(directory)
    check_files(repository, files, config)
    _download(repository, commit, {file: files[file] for file in needed_files(files)})
    inspect(directory)
    return directory


def _time_out() -> None:
    """Ends the process: a read timeout does not bound a name server, nor an answer that comes byte by byte."""
    report("failed", "no model hub answered")
    os._exit(1)


def _list_files(repository: str, revision: str | None, timeout_s: float) -> tuple[str | None, dict[str, _HubFile]]:
    """The commit that the revision stands for, and its files by name."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(repository, revision=revision, timeout=timeout_s, files_metadata=True)
    except OfflineModeIsEnabled:
        raise NotDelivered("the model hub is switched off (HF_HUB_OFFLINE)") from None
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (401, 403, 404):
            title = f"{repository}@{revision}" if revision else repository
            raise NotDelivered(f"the model hub has no {title}, or shows it only with a token (HF_TOKEN)") from error
        raise NotDelivered(f"the model hub answered with status {status}") from error
    except ValueError as error:
        raise NotDelivered("what answered is not a model hub (see HF_ENDPOINT)") from error
    except Exception as error:  # huggingface_hub does not wrap its transport's errors
        raise NotDelivered("no model hub answered") from error
    files = {
        file.rfilename: _HubFile(file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id)
        for file in info.siblings or ()
    }
    return info.sha, files


def _download(repository: str, revision: str | None, files: Mapping[str, _HubFile]) -> Path:
    """The snapshot's directory with these files in it; `revision` None is the newest of the main branch."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    constants.DOWNLOAD_CHUNK_SIZE = MIN_BYTES  # the bar moves after each
    constants.HF_HUB_DISABLE_XET = True  # that protocol's library can be neither bounded nor interrupted

    class ByteBar(tqdm):
        """Draws nothing, because standard error is no terminal; reports the bytes of a file."""

        most = 0.0  # it may begin anew

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.n > self.most:
                self.most = self.n
                report_progress(*fetch_stage(name, self.n, file.num_bytes or self.total))

    for name, file in files.items():
        report_progress(*fetch_stage(name, 0, file.num_bytes))
        try:
            path = Path(hf_hub_download(repository, name, revision=revision, tqdm_class=ByteBar))
        except NotDelivered:
            raise
        except Exception as error:  # huggingface_hub does not wrap its transport's errors
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise NotDelivered(f"fetching {repository} failed ({reason})") from error
        finally:
            expect(0)
        _check_digest(path, file)
        report_progress(f"Fetching {name}", 1.0)
    return path.parents[name.count("/")]


def _check_digest(path: Path, listed: _HubFile) -> None:
    """Compare a fetched file with the digest that the hub lists for it.

    git names an object by the SHA-1 of "blob", its size and its content (https://git-scm.com/book/en/v2, 10.2).
    """
    with path.open("rb") as file:
        if listed.sha256 is not None:
            is_equal = hashlib.file_digest(file, "sha256").hexdigest() == listed.sha256
        elif listed.blob_id is not None:
            begin = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
            is_equal = hashlib.file_digest(file, lambda: begin).hexdigest() == listed.blob_id
        else:  # a mirror that lists no digests
            is_equal = True
    if not is_equal:
        _remove(path)
        raise NotDelivered(f"{path.name} arrived damaged from the model hub")


def _remove(path: Path) -> None:
    """Remove a file from the hub's cache, because huggingface_hub would keep it."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
