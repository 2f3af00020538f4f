"""What a plan calls a model, turned into a directory that holds a whole GPT-2 checkpoint.

This module knows the hub, its cache, and which files make a checkpoint; it refuses to know tensors,
devices and servers. It reads sizes, never weights, unpickles nothing and runs no code that comes
with a checkpoint. What is in the hub's cache is used without asking the hub. All that may ask it
happens in a child process: a name server or a hub that never answers then costs a bounded time, and
no thread is left behind in a process that will fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import StartError

Progress = Callable[[str, float], None]
Shape = list[int]

EMBEDDED = Path(__file__).parent / "embedded" / "checkpoint"
HUB_NAMES = {"small": "openai-community/gpt2", "medium": "openai-community/gpt2-medium"}
SYNTHETIC_NAMES = ("synthetic:small", "synthetic:medium")
# Positions and vocabulary of every GPT-2 that OpenAI published.
GPT2_N_CTX, GPT2_VOCAB_SIZE = 1024, 50257

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = ("F64", "F32", "F16", "BF16")
# The limit that the safetensors library keeps.
MAX_HEADER_BYTES = 100_000_000


class CheckpointError(StartError):
    """A checkpoint cannot be served; the message is one sentence that says why and what to do."""


class _NotDelivered(CheckpointError):
    """The hub did not deliver. `reason` is the clause that says why, without a full stop."""

    def __init__(self, reason: str, remedy: str = "try again later.") -> None:
        super().__init__(f"{reason[0].upper()}{reason[1:]}: {remedy}")
        self.reason = reason


class _Incomplete(CheckpointError):
    """Files are missing or `damaged`: fetching them again may help."""

    def __init__(self, message: str, damaged: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is on this machine and whole.

    `name` is what the plan calls it; `directory` (absolute) holds config.json, the tokenizer and
    the weights, for a synthetic model only the tokenizer it borrows; `source` is "hub",
    "directory", "embedded" or "synthetic"; `warning` is a sentence that whoever starts or uses
    this must see.
    """

    name: str
    directory: str
    source: str
    warning: str | None
    n_ctx: int
    vocab_size: int


def _quiet(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


def resolve(
    name: str,
    source: str | None = None,
    *,
    hub_timeout_s: float = 5.0,
    on_progress: Progress = _quiet,
) -> Checkpoint:
    """The checkpoint that the plan calls `name`, fetched from the hub if it is not on this machine.

    `source` is a directory (it starts with ".", "/" or "~", or holds a "/" and exists), else a
    repository of the hub. Without one, `name` is "small", "medium", "embedded", "synthetic:small"
    or "synthetic:medium". `on_progress` is told a file, or what is being done, and the fraction
    that is done. `hub_timeout_s` bounds how long it takes to find out that no hub answers, not the fetching.

    Raises:
        CheckpointError: it is not to be had, not whole, or not of a kind that is served.
    """
    if source is None and name in SYNTHETIC_NAMES:
        return Checkpoint(name, str(EMBEDDED), "synthetic", None, n_ctx=GPT2_N_CTX, vocab_size=GPT2_VOCAB_SIZE)
    if source is None and name == "embedded":
        return _checked(name, EMBEDDED, "embedded")
    if source is None and name not in HUB_NAMES:
        raise CheckpointError(
            f"There is no model called {name}: give it a source, as in {name}=/path/to/checkpoint "
            f"or {name}=organisation/repository, or name one of "
            f"{', '.join((*HUB_NAMES, 'embedded', *SYNTHETIC_NAMES))}."
        )
    where = HUB_NAMES[name] if source is None else source
    if where.startswith((".", "/", "~")) or ("/" in where and Path(where).exists()):
        directory = Path(where).expanduser().absolute()
        if not directory.is_dir():
            raise CheckpointError(
                f"The model {name} is to be read from {directory}, which is not a directory: "
                "name one that holds config.json, model.safetensors and tokenizer.json."
            )
        return _checked(name, directory, "directory")
    return _checked(name, _from_hub(name, where, hub_timeout_s, on_progress), "hub")


def resolve_default(*, hub_timeout_s: float = 5.0, on_progress: Progress = _quiet) -> Checkpoint:
    """GPT-2 small if it is on this machine or can be fetched, else the embedded checkpoint and why.

    Raises:
        CheckpointError: the embedded checkpoint itself is not whole.
    """
    try:
        return resolve("small", hub_timeout_s=hub_timeout_s, on_progress=on_progress)
    except CheckpointError as error:
        reason = error.reason if isinstance(error, _NotDelivered) else str(error).rstrip(".")
        warning = f"{reason}, so the embedded checkpoint is served instead of GPT-2 small"
    return _checked("embedded", EMBEDDED, "embedded", warning)


def _checked(name: str, directory: Path, source: str, warning: str | None = None) -> Checkpoint:
    n_ctx, vocab_size = _inspect(directory)
    return Checkpoint(name, str(directory), source, warning, n_ctx, vocab_size)


# What makes a checkpoint whole ------------------------------------------------------------------


def _inspect(directory: Path) -> tuple[int, int]:
    """Positions and vocabulary of the checkpoint in `directory`, once all of it fits together.

    Raises:
        _Incomplete: files are missing or damaged.
        CheckpointError: it will never be served as it is.
    """
    try:
        files = [path.name for path in directory.iterdir()]
        # First, so that what is no GPT-2 at all is refused for that.
        config = _read_config(directory) if "config.json" in files else {}
        _check_files(str(directory), files)
        _check_weights(directory, config)
        _check_tokenizer(directory, config["vocab_size"])
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read ({error.strerror or error}): let the user that Tercet runs as read it."
        ) from error
    return config["n_positions"], config["vocab_size"]


def _check_files(place: str, files: Collection[str]) -> None:
    """Refuses a checkpoint that lacks files, or has its weights only as pickles.

    `files` lie in `place`, which transformers can load: a directory, or a repository of the hub.

    Raises:
        _Incomplete: as described.
    """
    pickles = sorted(file for file in files if file.endswith(PICKLES))
    has_weights = any(file.endswith(".safetensors") and "/" not in file for file in files)
    if pickles and not has_weights:
        converted = f"{Path(place).name}-safetensors"
        code = (
            "from transformers import AutoModelForCausalLM as Model, AutoTokenizer as Tokenizer; "
            f"[each.from_pretrained({place!r}).save_pretrained({converted!r}) "
            "for each in (Model, Tokenizer)]"
        )
        raise _Incomplete(
            f"{place} has its weights only as a pickle ({pickles[0]}), which can run code when it "
            "is read, so Tercet reads safetensors only: if you trust it, convert it with "
            f"{shlex.join([sys.executable, '-c', code])} and serve the directory ./{converted}."
        )
    missing = [] if "config.json" in files else ["config.json"]
    if not has_weights:
        missing.append(WHOLE)
    if "tokenizer.json" not in files and not {"vocab.json", "merges.txt"} <= set(files):
        missing.append("tokenizer.json (or vocab.json and merges.txt)")
    if missing:
        raise _Incomplete(f"{place} lacks {', '.join(missing)}: name one that holds them all.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise _Incomplete(
            f"{path} is damaged, it is not JSON ({error}): copy or download it again.", (path.name,)
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: copy the right file there.")
    return values


def _read_config(directory: Path) -> dict[str, int]:
    """The sizes in config.json: n_positions, n_embd, n_layer, n_inner and vocab_size."""
    path = directory / "config.json"
    config = _read_json(path)
    if "auto_map" in config:
        raise CheckpointError(
            f"{path} asks to run code that comes with the checkpoint (auto_map), and Tercet never "
            "does: serve a checkpoint of the plain GPT-2 architecture."
        )
    if (architecture := config.get("model_type")) != "gpt2":
        raise CheckpointError(
            f"{path} describes the architecture {architecture!r}, and Tercet serves GPT-2 only: "
            'name a checkpoint whose model_type is "gpt2".'
        )
    width = config.get("n_embd")
    sizes = {
        "vocab_size": config.get("vocab_size"),
        "n_positions": config.get("n_positions", config.get("n_ctx")),
        "n_embd": width,
        "n_layer": config.get("n_layer"),
        "n_inner": config.get("n_inner") or (4 * width if isinstance(width, int) else None),
    }
    checked = {key: value for key, value in sizes.items() if isinstance(value, int) and value > 0}
    if wrong := sizes.keys() - checked.keys():
        raise CheckpointError(
            f"{path} gives no usable {', '.join(sorted(wrong))}: use the config.json that was saved with the weights."
        )
    return checked


def _weight_files(directory: Path) -> list[Path]:
    """Where the engine reads weights: the files an index names, else one, else all there are."""
    if (index := directory / INDEX).is_file():
        named = _read_json(index).get("weight_map")
        files = set(named.values()) if isinstance(named, dict) else set()
        if not files or any(Path(str(file)).name != file for file in files):
            raise CheckpointError(f"{index} does not name weight files beside it: save the checkpoint again.")
        return [directory / file for file in sorted(files)]
    whole = directory / WHOLE
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _check_weights(directory: Path, config: Mapping[str, int]) -> None:
    held: dict[str, tuple[str, Shape]] = {}
    for path in _weight_files(directory):
        if not path.is_file():
            raise _Incomplete(f"{path}, which {INDEX} names, is missing: copy all files there.")
        held |= _read_header(path)
    expected = _expected_shapes(config)
    if absent := [name for name in expected if name not in held]:
        more = f" and {len(absent) - 1} more weights" if len(absent) > 1 else ""
        raise CheckpointError(
            f"The weights in {directory} lack {absent[0]}{more} that config.json asks for: "
            "save the model again together with its own config.json."
        )
    for name, shape in expected.items():
        dtype, found = held[name]
        if found != shape or dtype not in DTYPES:
            raise CheckpointError(
                f"In {directory}, {name} is {dtype} {found} where config.json asks for {shape} in "
                f"{' or '.join(DTYPES)}: save the model again together with its own config.json."
            )


def _expected_shapes(config: Mapping[str, int]) -> dict[str, Shape]:
    """The shape of every weight of a GPT-2, linear layers as Conv1D keeps them: [in, out]."""
    width, inner = config["n_embd"], config["n_inner"]
    shapes: dict[str, Shape] = {
        "wte.weight": [config["vocab_size"], width],
        "wpe.weight": [config["n_positions"], width],
        "ln_f.weight": [width],
        "ln_f.bias": [width],
    }
    linear = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for layer in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = shapes[f"h.{layer}.{norm}.bias"] = [width]
        for name, (num_in, num_out) in linear.items():
            shapes[f"h.{layer}.{name}.weight"] = [num_in, num_out]
            shapes[f"h.{layer}.{name}.bias"] = [num_out]
    return shapes


def _read_header(path: Path) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of every tensor in a safetensors file, by name without `transformer.`.

    The format: 8 bytes, the header's length n, little-endian; n bytes of JSON; then the data, whose
    last tensor ends where the file does, so a file that was cut short is seen without reading it.

    Raises:
        _Incomplete: the file is damaged.
    """

    def damaged(how: str) -> _Incomplete:
        return _Incomplete(f"{path} is damaged, {how}: copy or download it again.", (path.name,))

    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or num_header_bytes > min(MAX_HEADER_BYTES, num_bytes - 8):
            raise damaged("it has no safetensors header")
        try:
            header = json.loads(file.read(num_header_bytes))
            header.pop("__metadata__", None)
            num_data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            tensors = {
                name.removeprefix("transformer."): (entry["dtype"], entry["shape"]) for name, entry in header.items()
            }
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise damaged("its safetensors header cannot be read") from error
    if num_bytes != (announced := 8 + num_header_bytes + num_data_bytes):
        raise damaged(f"it has {num_bytes} bytes and its header announces {announced}")
    return tensors


def _check_tokenizer(directory: Path, vocab_size: int) -> None:
    """A token id past the embedding's end would stop a worker at the first request that uses it."""
    path = directory / "tokenizer.json"
    if path.is_file():
        values = _read_json(path)
        try:
            ids = [*values["model"]["vocab"].values()]
            ids += [token["id"] for token in values.get("added_tokens", ())]
            largest = max(ids)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a byte-level BPE tokenizer with a vocabulary: "
                "use the tokenizer.json that belongs to the model."
            ) from error
    else:
        path = directory / "vocab.json"
        largest = max(_read_json(path).values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path} has token ids up to {largest}, and the model has {vocab_size} tokens: "
            "use the tokenizer that belongs to the model."
        )


# The hub, from the process that asks -----------------------------------------------------------

_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from workers.checkpoints import _child; _child()"


def _from_hub(name: str, repository: str, timeout_s: float, on_progress: Progress) -> Path:
    """The directory in the hub's cache that holds `repository`, fetched first if need be.

    Raises:
        CheckpointError: as `resolve`.
    """
    title = f"GPT-2 {name}" if repository == HUB_NAMES.get(name) else repository
    remedy = (
        f"to serve {title}, let this machine reach a hub, or run `hf download {repository} "
        "config.json model.safetensors tokenizer.json` where one can be reached and copy its cache "
        f"(HF_HOME) here, or name a directory that holds it, as in TERCET_MODELS={name}=/path, "
        "or serve the checkpoint that comes with Tercet, TERCET_MODELS=embedded."
    )
    root = str(Path(__file__).parents[1])
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
                        raise _NotDelivered(reason, remedy)
                    case {"directory": str(path)}:
                        directory = Path(path)
        finally:
            if patience is not None:
                patience.cancel()
            _dismiss(child)
    if timed_out.is_set():
        raise _NotDelivered("no model hub answered", remedy)
    if directory is None:
        raise _NotDelivered(f"fetching {title} ended with status {child.returncode}", remedy)
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


# The hub, in the child -------------------------------------------------------------------------


def _child() -> None:
    """Obtains the repository named on the command line; tells the parent in lines of JSON."""
    repository, timeout_s = sys.argv[2], float(sys.argv[3])
    to_parent = sys.stdout
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**message: str | float) -> None:
        print(json.dumps(message), file=to_parent, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not for the parent
        try:
            directory = _cached(repository) or _fetched(repository, timeout_s, say)
        except _NotDelivered as error:
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
        _inspect(directory)
    except _Incomplete as error:
        for file in error.damaged:  # the client would take it for a good one
            _forget(directory / file)
        return None
    return directory


def _fetched(repository: str, timeout_s: float, say: Callable[..., None]) -> Path:
    """The snapshot of the repository's main branch, every file there and checked.

    Raises:
        _NotDelivered: no hub answered, or it did not deliver.
        CheckpointError: what it has is not served.
    """
    say(asking=repository)
    sizes = _list_files(repository, timeout_s)
    say(answered=repository)
    if "config.json" not in sizes:
        _check_files(repository, sizes)
    # First, as it may be reason enough to leave the rest. It also fixes the commit.
    directory = _download(repository, "config.json", None, sizes, say).parent
    commit = directory.name
    _read_config(directory)
    _check_files(repository, sizes)
    for file in _needed(sizes):
        _download(repository, file, commit, sizes, say)
    _inspect(directory)
    return directory


def _list_files(repository: str, timeout_s: float) -> dict[str, int]:
    """Names and sizes (bytes; 0: not told) of the repository's files, as the hub lists them."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(repository, timeout=timeout_s, files_metadata=True)
    except OfflineModeIsEnabled:
        raise _NotDelivered("the model hub is switched off (HF_HUB_OFFLINE)") from None
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (401, 403, 404):
            reason = f"the model hub has no {repository}, or shows it only with a token (HF_TOKEN)"
        else:
            reason = f"the model hub answered with status {status}"
        raise _NotDelivered(reason) from error
    except ValueError as error:
        raise _NotDelivered("what answered is not a model hub (see HF_ENDPOINT)") from error
    except Exception as error:  # the client lets its transport's errors through
        raise _NotDelivered("no model hub answered") from error
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
        raise _NotDelivered(f"fetching {file} of {repository} failed ({why})") from error
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
    raise _NotDelivered(f"{path.name} arrived damaged from the model hub")


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
