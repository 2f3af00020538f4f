"""Getting a checkpoint from a model hub, or from its cache on this machine.

What is in the cache is used without asking the hub. All that may ask it happens in a child process: a name
server or a hub that never answers then costs a bounded time, and no thread is left behind in a process that
will fork. Which files make a checkpoint is `workers.checkpoint_files`' knowledge.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.checkpoints.files import INDEX, WHOLE, CheckpointError, Incomplete, check_files, inspect, read_config

Progress = Callable[[str, float], None]


class NotDelivered(CheckpointError):
    """The hub did not deliver. `reason` is the clause that says why, without a full stop."""

    def __init__(self, reason: str, remedy: str = "try again later.") -> None:
        super().__init__(f"{reason[0].upper()}{reason[1:]}: {remedy}")
        self.reason = reason


_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from workers.checkpoints.hub import run_child; run_child()"


def from_hub(name: str, repository: str, title: str, timeout_s: float, on_progress: Progress) -> Path:
    """The directory in the hub's cache that holds `repository`, fetched first if need be.

    `name` is what the plan calls it, `title` what a person does; `timeout_s` bounds how long it takes to find out
    that no hub answers.

    Raises:
        CheckpointError: it is not to be had, not whole, or not of a kind that is served.
    """
    remedy = (
        f"to serve {title}, let this machine reach a hub, or run `hf download {repository} "
        "config.json model.safetensors tokenizer.json` where one can be reached and copy its cache "
        f"(HF_HOME) here, or name a directory that holds it, as in TERCET_MODELS={name}=/path, "
        "or serve the checkpoint that comes with Tercet, TERCET_MODELS=embedded."
    )
    root = str(Path(__file__).parents[2])
    began = time.monotonic()
    timed_out = threading.Event()
    patience: threading.Timer | None = None
    directory: Path | None = None
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD, root, repository, str(timeout_s)],
        stdin=subprocess.PIPE,  # its end tells the child that this process is gone
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:

        def give_up() -> None:
            timed_out.set()
            child.kill()

        try:
            for message in _messages(child):
                match message:
                    case {"asking": str()}:
                        on_progress("asking the model hub", 0.0)
                        # At least a second, in case the child alone took most of the time to start.
                        left_s = max(timeout_s - (time.monotonic() - began), 1.0)
                        patience = threading.Timer(left_s, give_up)
                        patience.start()
                    case {"answered": str()} if patience is not None:
                        patience.cancel()
                    case {"file": str(file), "fraction": float(fraction)}:
                        on_progress(file, fraction)
                    case {"refused": str(sentence)}:
                        raise CheckpointError(sentence)
                    case {"failed": str(reason)}:
                        raise NotDelivered(reason, remedy)
                    case {"directory": str(path)}:
                        directory = Path(path)
        finally:
            if patience is not None:
                patience.cancel()
            _dismiss(child)
    if timed_out.is_set():
        raise NotDelivered("no model hub answered", remedy)
    if directory is None:
        raise NotDelivered(f"fetching {title} ended with status {child.returncode}", remedy)
    return directory


def _messages(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    for line in child.stdout:
        if line.endswith("\n"):  # else the child was killed while it wrote
            yield json.loads(line)


def _dismiss(child: subprocess.Popen[str]) -> None:
    """Ends the child if it is still there, giving it time to remove the file it was writing."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()


# In the child: everything below.


def run_child() -> None:
    """Obtains the repository named on the command line; tells the parent in lines of JSON."""
    repository, timeout_s = sys.argv[2], float(sys.argv[3])
    to_parent = sys.stdout
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**message: str | float) -> None:
        print(json.dumps(message), file=to_parent, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not for the parent
        try:
            directory = _cached(repository) or _fetched(repository, timeout_s, say)
        except NotDelivered as error:
            say(failed=error.reason)
        except CheckpointError as error:
            say(refused=str(error))
        except Exception as error:  # noqa: BLE001  nobody reads a traceback of this process
            say(failed=f"asking for {repository} failed ({type(error).__name__}: {error})")
        else:
            say(directory=str(directory))


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)  # lets the download remove its unfinished file
    time.sleep(2)
    os._exit(1)


def _cached(repository: str) -> Path | None:
    """The repository's newest snapshot in the hub's cache, if it is whole."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repository, "config.json")
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
        for file in error.damaged:  # the client would take it for a good one
            _forget(directory / file)
        return None
    return directory


def _fetched(repository: str, timeout_s: float, say: Callable[..., None]) -> Path:
    """The snapshot of the repository's main branch, every file there and checked.

    Raises:
        NotDelivered: no hub answered, or it did not deliver.
        CheckpointError: what it has is not served.
    """
    say(asking=repository)
    sizes = _list_files(repository, timeout_s)
    say(answered=repository)
    if "config.json" not in sizes:
        check_files(repository, sizes)
    # First, as it may be reason enough to leave the rest. It also fixes the commit.
    directory = _download(repository, "config.json", None, sizes, say).parent
    commit = directory.name
    read_config(directory)
    check_files(repository, sizes)
    for file in _needed(sizes):
        _download(repository, file, commit, sizes, say)
    inspect(directory)
    return directory


def _list_files(repository: str, timeout_s: float) -> dict[str, int]:
    """Names and sizes (bytes; 0: not told) of the repository's files, as the hub lists them."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(repository, timeout=timeout_s, files_metadata=True)
    except OfflineModeIsEnabled:
        raise NotDelivered("the model hub is switched off (HF_HUB_OFFLINE)") from None
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (401, 403, 404):
            reason = f"the model hub has no {repository}, or shows it only with a token (HF_TOKEN)"
        else:
            reason = f"the model hub answered with status {status}"
        raise NotDelivered(reason) from error
    except ValueError as error:
        raise NotDelivered("what answered is not a model hub (see HF_ENDPOINT)") from error
    except Exception as error:  # the client lets its transport's errors through
        raise NotDelivered("no model hub answered") from error
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _needed(listed: Mapping[str, int]) -> list[str]:
    """What Tercet reads of the files a hub lists: tokenizer, weights, nothing that can run."""
    tokenizer = ["tokenizer.json"] if "tokenizer.json" in listed else ["vocab.json", "merges.txt"]
    if WHOLE in listed:
        weights = [WHOLE]
    else:
        weights = [f for f in listed if f.endswith(".safetensors") and "/" not in f]
        weights += [INDEX] if INDEX in listed else []
    return [f for f in ("generation_config.json", *tokenizer, *sorted(weights)) if f in listed]


def _download(
    repository: str,
    file: str,
    commit: str | None,
    sizes: Mapping[str, int],
    say: Callable[..., None],
) -> Path:
    """The file in the hub's cache; `commit` None is the newest of the main branch."""
    from huggingface_hub import hf_hub_download

    class Bar(_Bar):
        num_bytes = sizes.get(file, 0)

        def show(self, fraction: float) -> None:
            say(file=file, fraction=fraction)

    try:
        path = Path(hf_hub_download(repository, file, revision=commit, tqdm_class=Bar))
    except Exception as error:  # the client lets its transport's errors through
        why = str(error).partition("\n")[0] or type(error).__name__
        raise NotDelivered(f"fetching {file} of {repository} failed ({why})") from error
    _verify(path)
    say(file=file, fraction=1.0)
    return path


def _verify(path: Path) -> None:
    """Compares a fetched file with its digest: the cache links to large ones by their SHA-256."""
    if not path.is_symlink() or len(digest := path.readlink().name) != 64:
        return
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == digest:
            return
    _forget(path)
    raise NotDelivered(f"{path.name} arrived damaged from the model hub")


def _forget(path: Path) -> None:
    """Removes a file from the hub's cache, so that it is fetched again."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            (path.parent / path.readlink()).unlink()
        path.unlink()


class _Bar:
    """What huggingface_hub takes for a progress bar, counting the bytes of one file."""

    num_bytes = 0

    def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
        self._done: float = initial
        self._shown = 0.0

    def show(self, fraction: float) -> None:
        raise NotImplementedError

    def update(self, n: float | None = 1) -> None:
        self._done += n or 0
        fraction = self._done / self.num_bytes if self.num_bytes else 0.0
        if fraction >= self._shown + 0.01:
            self._shown = fraction
            self.show(min(fraction, 1.0))

    def update_transfer(self, n: float | None = 1) -> None:
        """Bytes on the wire, where those differ from bytes of the file: not counted."""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Everything else that is called on a bar is looks."""
        return lambda *_, **__: None
