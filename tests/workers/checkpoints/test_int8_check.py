"""int8 where a checkpoint keeps its quality in it, else bf16 or fp32; the measured ratio is cached."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import cpu_features
from tests.cpus import ZEN_3, pretend
from tests.workers.helpers import EMBEDDED, run_python
from workers.checkpoints import int8_check
from workers.checkpoints.int8_check import PAGE, Int8Check, cached_int8_check, check_int8, perplexity
from workers.checkpoints.measured import _fingerprint
from workers.engine.cpu.linear import LinearMaker
from workers.engine.cpu_kernels import load_kernels
from workers.engine.failures import LoadFailure
from workers.engine.loader import load_model, smooth_quant
from workers.engine.model.transformer import Norm
from workers.text.tokenizer import Tokenizer

THIS_CPU = cpu_features.read()
TOKENIZER = Tokenizer.from_directory(EMBEDDED, 8192)


def test_perplexity_is_that_of_transformers(reference: Any) -> None:
    ids = TOKENIZER.encode(PAGE.read_text(encoding="utf-8"))[:512]
    with torch.inference_mode():
        loss = reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    ours = perplexity(load_model(EMBEDDED, dtype="fp32"), ids)
    assert ours == pytest.approx(math.exp(float(loss)), rel=1e-4)


def test_the_embedded_checkpoint_keeps_its_perplexity_in_int8_within_one_percent() -> None:
    """With the kernels of every instruction set that this CPU has, to the last bit."""
    ids = TOKENIZER.encode(PAGE.read_text(encoding="utf-8"))
    loads = [load_model(EMBEDDED, dtype="int8", kernels=load_kernels(one.name)) for one in THIS_CPU.instruction_sets]
    [in_int8] = {perplexity(loaded, ids) for loaded in loads}
    check = check_int8(lambda dtype: load_model(EMBEDDED, dtype=dtype), TOKENIZER)
    assert check.choose_dtype() == ("int8", None)
    assert 0.99 < check.ratio < 1.01
    assert check.ratio == in_int8 / perplexity(load_model(EMBEDDED, dtype="fp32"), ids)


def test_smoothquant_keeps_the_product_and_lowers_the_int8_error() -> None:
    generator = torch.Generator().manual_seed(0)
    gain, bias, weight = torch.ones(256), torch.zeros(256), torch.randn(64, 256, generator=generator)
    gain[:3] = torch.tensor([40.0, 0.0, 1e-4])  # a large channel, a constant one, and a small one
    weight[:, 3] = 0  # an unused channel
    x = torch.randn(32, 256, generator=generator)
    norm = Norm(gain, bias, 1e-5)
    expected = norm(x) @ weight.T
    new_norm, new_weight = smooth_quant(norm, weight)
    torch.testing.assert_close(new_norm(x) @ new_weight.T, expected, rtol=1e-4, atol=1e-4)

    def error(norm: Norm, weight: torch.Tensor) -> float:
        linear = LinearMaker("int8")(weight.contiguous(), None)
        return float((linear(norm(x)) - expected).norm() / expected.norm())

    assert error(new_norm, new_weight) < error(norm, weight) / 2


def test_a_checkpoint_that_loses_quality_in_int8_is_rejected_and_measured_once(tmp_path: Path) -> None:
    """Outlier weights raise each row's scale, so all other weights of the row lose precision."""
    spoiled = tmp_path / "spoiled"
    shutil.copytree(EMBEDDED, spoiled)
    weights = {name: tensor.float() for name, tensor in load_file(spoiled / "model.safetensors").items()}
    for name, tensor in weights.items():
        if name.endswith("attn.c_proj.weight"):
            tensor[0] *= 3000
        if name.endswith(("c_attn.weight", "c_attn.bias")):
            tensor[..., 2 * 384] /= 3000  # the first value, so that in fp32 it is the same model
    save_file(weights, spoiled / "model.safetensors")
    cache = tmp_path / "cache"
    check = cached_int8_check(spoiled, TOKENIZER, cache)
    assert check.ratio > 1.01
    assert check.choose_dtype()[0] == ("bf16" if cpu_features.read().has_bf16 else "fp32")
    [kept] = cache.iterdir()
    assert json.loads(kept.read_text()) == {"ratio": check.ratio}
    kept.write_text(json.dumps({"ratio": 7.0}))
    assert cached_int8_check(spoiled, TOKENIZER, cache).ratio == 7.0


def test_an_entry_of_an_older_version_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the dtype as well, in a file without the kernels' name, of a CPU that might not compute in it."""
    monkeypatch.setattr(int8_check, "check_int8", lambda *_: Int8Check(1.005))
    old = json.dumps({"dtype": "bf16", "ratio": 3.0})
    (tmp_path / f"{_fingerprint(EMBEDDED)}.json").write_text(old)
    assert cached_int8_check(EMBEDDED, TOKENIZER, tmp_path).ratio == 1.005
    [new] = set(tmp_path.iterdir()) - {tmp_path / f"{_fingerprint(EMBEDDED)}.json"}
    new.write_text(old)
    assert cached_int8_check(EMBEDDED, TOKENIZER, tmp_path).ratio == 1.005


def test_a_pipe_in_the_place_of_a_result_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_check, "check_int8", lambda *_: Int8Check(1.005))
    path = tmp_path / f"{_fingerprint(EMBEDDED)}-int8.json"
    os.mkfifo(path)
    assert cached_int8_check(EMBEDDED, TOKENIZER, tmp_path).ratio == 1.005
    assert json.loads(path.read_text()) == {"ratio": 1.005}
    assert [*tmp_path.iterdir()] == [path]


def test_bf16_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ZEN_3)
    with pytest.raises(LoadFailure, match=r"AMD Ryzen 7 5800U .* has avx2\."):
        load_model(tmp_path / "absent", dtype="bf16")


def test_a_limit_of_onednn_counts_as_well() -> None:
    """The variable is read once in a process, so another process has to try."""
    code = "from workers.engine.devices import cpu_dtype_problem as p; print(p('bf16'), p('int8'), p('fp32'))"
    problem, int8, fp32 = run_python(code, ONEDNN_MAX_CPU_ISA="AVX2").stdout.rsplit(maxsplit=2)
    assert "bf16" in problem
    assert (int8, fp32) == ("None", "None")
