"""A model's packed weights in a file that every worker of the model maps, so that they share its memory.

A worker that is the only one of its model copies the products' weights to private memory, whose larger pages are read
faster, and maps the rest: of an embedding few rows are ever read. Only int8 models have a file: torch's libraries keep
other weights in layouts of their own.

The file's name says what it was made from. It is written once and never changed, so a mapping stays valid when a
changed checkpoint gets a file of its own and this one is removed. Where it cannot be written, a worker keeps private
memory.

Layout: the arrays, each from a multiple of ALIGNMENT on, packed weights first, in the order in which a step reads them;
an index in MessagePack; the index's position in 8 bytes, and a CRC-32 of all before it in 4.
"""

from __future__ import annotations

import hashlib
import mmap
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import torch

from shared.plain_files import open_lock, open_plain
from workers.engine.cpu.linear import CpuLinear, HugePages, PackedInt8Linear
from workers.engine.cpu_kernels import Kernels, load_kernels
from workers.engine.model.config import ModelConfig
from workers.engine.model.transformer import Layer, LoadedModel, Norm, Transformer, rotations

ALIGNMENT = 64  # a cache line
MAX_OTHERS = 1
LOCK_S = 120.0  # to make a file takes less
_CHUNK_BYTES = 1 << 20
_POSITION_BYTES, _CRC_BYTES = 8, 4
_MADV_COLLAPSE = 25  # <linux/mman.h>, since Linux 6.1; Python does not have it
_PACKAGE = Path(__file__).parents[1]
# What determines the weights' values and layout, besides the checkpoint.
_SOURCES = (
    _PACKAGE / "loader.py",
    *sorted((_PACKAGE / "model").glob("*.py")),
    *(_PACKAGE / "cpu" / name for name in ("layouts.py", "linear.py", "weight_file.py")),
)
Array = np.ndarray[Any, np.dtype[Any]]
log = structlog.get_logger()


class _Place(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    offset: int


class _Index(msgspec.Struct, frozen=True):
    config: ModelConfig
    arrays: dict[str, _Place]


def shared_model(
    directory: Path,
    name: str,
    revision: str,
    make: Callable[[], LoadedModel],
    kernels: Kernels | None = None,
    *,
    is_only_worker: bool = False,
) -> LoadedModel:
    """A model whose weights are a mapping of its file, which is made first if there is none.

    Of the files of other models of this name, and of other revisions, MAX_OTHERS stay.

    Args:
        directory: made if missing.
        name: the model's name in the plan.
        revision: revision of its checkpoint, `config.json` included.
        make: loads the model in int8 to private memory, for `kernels`; its tokenizer is not shared.
        kernels: that multiply; by default this CPU's best.
        is_only_worker: copies the products' weights.
    """
    prefix = f"weights-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    kernels = kernels or load_kernels()
    layout = f"{kernels.block} {kernels.zero_point} {kernels.inverts}"
    digest = hashlib.sha256(f"{torch.__version__} {layout} {revision}".encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    path = directory / f"{prefix}-{digest.hexdigest()[:16]}.bin"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_lock(directory / f"{prefix}.lock", LOCK_S)
    except OSError as error:
        log.warning("weights_not_shared", model=name, reason=error.strerror)
        return make()
    with lock:
        # Workers that start together make it once.
        model = read(path, kernels, is_only_worker)
        if model is None:
            loaded = make()
            if (arrays := _arrays(loaded.model)) is None:
                return loaded
            try:
                _write(path, loaded.config, arrays)
            except OSError as error:  # a full disk
                log.warning("weights_not_shared", model=name, reason=error.strerror)
                return loaded
            del arrays
            loaded = replace(loaded, model=read(path, kernels, is_only_worker) or loaded.model)
            model = loaded.model
            log.info("weights_written", model=name, bytes=path.stat().st_size)
        _remove_others(path, prefix)
    return LoadedModel(model, "cpu", "int8", kernels=kernels)


def read(path: Path, kernels: Kernels | None = None, copies_products: bool = False) -> Transformer | None:
    """The model in a file, mapped read-only but for what is copied; None if there is no file, or it is damaged."""
    products: dict[str, Array] = {}
    try:
        with open_plain(path) as file:
            index = _read_index(file)
            if index is None:
                return None
            mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            if copies_products:
                memory = HugePages()
                for name, place in index.arrays.items():
                    if name.endswith(".packed"):
                        products[name] = memory.take(place.shape[0])
                        file.seek(place.offset)
                        file.readinto(products[name].data)
    except OSError:
        return None
    if not copies_products:
        with suppress(OSError):  # pages of 2 MiB, where the file system has them
            mapping.madvise(_MADV_COLLAPSE)

    def array(name: str) -> Array:
        if name in products:
            return products[name]
        place = index.arrays[name]
        size = int(np.prod(place.shape))
        return np.frombuffer(mapping, place.dtype, size, place.offset).reshape(place.shape)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it cannot know a tensor that must not be written to
        tensors = {name: torch.from_numpy(array(name)) for name in index.arrays}

    config = index.config
    num_outputs = {"qkv": config.qkv_width, "up": config.up_width, "head": config.vocab_size}

    def linear(name: str) -> CpuLinear:
        arrays = array(f"{name}.packed"), tensors[f"{name}.starts"], tensors[f"{name}.factors"]
        width = num_outputs.get(name.rpartition(".")[2], config.n_embd)
        return CpuLinear(PackedInt8Linear(*arrays, width, kernels), tensors.get(f"{name}.bias"), None)

    def norm(name: str) -> Norm:
        return Norm(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), config.norm_epsilon)

    def norm_if_any(name: str) -> Norm | None:
        return norm(name) if f"{name}.weight" in tensors else None

    return Transformer(
        config=config,
        token_embedding=tensors["token_embedding"],
        position_embedding=tensors.get("position_embedding"),
        rotations=rotations(config),
        layers=tuple(
            Layer(
                norm_1=norm(f"{layer}.norm_1"),
                qkv=linear(f"{layer}.qkv"),
                out=linear(f"{layer}.out"),
                norm_2=norm(f"{layer}.norm_2"),
                up=linear(f"{layer}.up"),
                down=linear(f"{layer}.down"),
                query_norm=norm_if_any(f"{layer}.query_norm"),
                key_norm=norm_if_any(f"{layer}.key_norm"),
            )
            for layer in range(config.n_layer)
        ),
        norm=norm("norm"),
        head=linear("head"),
    )


def _remove_others(path: Path, prefix: str) -> None:
    """Remove the files of other revisions but the MAX_OTHERS that were used last; mappings of them stay valid."""
    with suppress(OSError):  # another user's
        path.touch()
        others = [other for other in path.parent.glob(f"{prefix}-*.bin*") if other != path]
        for old in sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)[MAX_OTHERS:]:
            old.unlink(missing_ok=True)


def _arrays(model: Transformer) -> dict[str, Array] | None:
    """A model's weights by name, packed ones first; None if some are in a layout of torch's."""
    linears = dict(_linears(model))
    products = {
        name: linear.product for name, linear in linears.items() if isinstance(linear.product, PackedInt8Linear)
    }
    if len(products) < len(linears):
        return None
    arrays: dict[str, Array] = {f"{name}.packed": product.packed for name, product in products.items()}
    for name, product in products.items():
        arrays[f"{name}.starts"], arrays[f"{name}.factors"] = product.starts.numpy(), product.factors.numpy()
    arrays |= {f"{name}.bias": linear.bias.numpy() for name, linear in linears.items() if linear.bias is not None}
    for name, norm in _norms(model):
        arrays[f"{name}.weight"] = norm.weight.numpy()
        if norm.bias is not None:
            arrays[f"{name}.bias"] = norm.bias.numpy()
    if model.position_embedding is not None:
        arrays["position_embedding"] = model.position_embedding.numpy()
    return arrays | {"token_embedding": model.token_embedding.numpy()}


def _norms(model: Transformer) -> Iterator[tuple[str, Norm]]:
    """The norms by name."""
    for index, layer in enumerate(model.layers):
        for name in ("norm_1", "norm_2", "query_norm", "key_norm"):
            if (norm := getattr(layer, name)) is not None:
                yield f"{index}.{name}", norm
    yield "norm", model.norm


def _linears(model: Transformer) -> Iterator[tuple[str, CpuLinear]]:
    """The linear layers by name, in the order in which a step computes them."""
    for index, layer in enumerate(model.layers):
        for name in ("qkv", "out", "up", "down"):
            yield f"{index}.{name}", getattr(layer, name)
    assert isinstance(model.head, CpuLinear)
    yield "head", model.head


def _write(path: Path, config: ModelConfig, arrays: dict[str, Array]) -> None:
    """Write the file under another name, and rename it; only its owner may read it.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    places = {}
    offset = crc32 = 0
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        written = Path(file.name)
        try:
            for name, array in arrays.items():
                places[name] = _Place(array.dtype.str, list(array.shape), offset)
                content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                padding = bytes(-len(content) % ALIGNMENT)
                file.write(content)
                file.write(padding)
                crc32 = zlib.crc32(padding, zlib.crc32(content, crc32))
                offset += len(content) + len(padding)
            end = msgspec.msgpack.encode(_Index(config, places)) + offset.to_bytes(_POSITION_BYTES, "little")
            file.write(end)
            file.write(zlib.crc32(end, crc32).to_bytes(_CRC_BYTES, "little"))
            file.flush()
            written.replace(path)
        except BaseException:
            with suppress(OSError):
                file.close()
            written.unlink(missing_ok=True)
            raise


def _read_index(file: Any) -> _Index | None:
    """The index of an open file, if it is whole: a machine that lost power may have a file without its content."""
    length = file.seek(0, 2) - _CRC_BYTES
    if length < _POSITION_BYTES:
        return None
    file.seek(0)
    crc32 = 0
    for start in range(0, length, _CHUNK_BYTES):
        crc32 = zlib.crc32(file.read(min(_CHUNK_BYTES, length - start)), crc32)
    if file.read(_CRC_BYTES) != crc32.to_bytes(_CRC_BYTES, "little"):
        return None
    file.seek(length - _POSITION_BYTES)
    index_at = int.from_bytes(file.read(_POSITION_BYTES), "little")
    file.seek(index_at)
    try:
        return msgspec.msgpack.decode(file.read(max(0, length - _POSITION_BYTES - index_at)), type=_Index)
    except msgspec.MsgspecError:  # written by a program with a fault
        return None
