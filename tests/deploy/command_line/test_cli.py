"""The command line: settings, plan, keys, and what `tercet plan` and `tercet serve` refuse."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from deploy.tuning.planning import make_plan
from shared.api_keys import read_keys
from shared.errors import StartError
from shared.free_memory import cache_budget_bytes
from shared.plan import Plan, Slot
from shared.setting_values import ModelSpec
from shared.settings import Compute, Settings
from tests.cpus import ZEN_3, pretend
from tests.e2e.harness import free_port
from tests.gateway.pool.helpers import sends, serving_tcp
from tests.programs import run_program
from tests.settings import make_settings

ROOT = Path(__file__).parents[3]


def run_module(module: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A module as a program, with nothing of this process's environment."""
    return run_program(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/dev/null/home", **environ},
        timeout=60,
    )


def tercet(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_module("deploy", *args, **environ)


def test_the_version_is_that_of_the_checkout_and_a_command_that_does_not_exist_is_answered_with_the_nearest() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tercet("--version").stdout == f"tercet {declared}\n"
    done = tercet("sevre")
    assert (done.returncode, "Did you mean 'serve'?" in done.stderr) == (2, True)


def test_the_page_of_settings_is_current() -> None:
    """After a change of a setting: `tercet settings --markdown >docs/SETTINGS.md`."""
    done = tercet("settings", "--markdown")
    assert done.returncode == 0
    assert done.stdout == (ROOT / "docs/SETTINGS.md").read_text()


def test_settings_shows_current_values_and_refuses_wrong_ones() -> None:
    done = tercet("settings", TERCET_QUEUE="many", COLUMNS="200")
    assert done.returncode == 1
    assert "many" in done.stdout
    assert "TERCET_QUEUE='many' must be a whole number" in done.stderr


@pytest.mark.parametrize("environ", [{}, {"COLUMNS": "20"}], ids=["piped", "narrow"])
def test_settings_never_cuts_a_name_or_a_default(environ: dict[str, str]) -> None:
    lines = tercet("settings", **environ).stdout.splitlines()
    for row in [row for _, rows in Settings.reference() for row in rows]:
        end = f"default {row.default})"
        assert any(line.startswith(f"{row.variable} ") and line.endswith(end) for line in lines), row


UNSENDABLE = "tercet: The request cannot be sent: a text is not UTF-8"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        *(
            (["Once", "--url", url], 2, "--url")
            for url in ("127.0.0.1:8000", "localhost", "ftp://a", "http://", "http://[::1", "http://a:x")
        ),
        # A surrogate stands for a byte of the command line that is not UTF-8.
        (["a\udcff"], 1, UNSENDABLE),
        (["a", "--model", "\udcff"], 1, UNSENDABLE),
        (["a", "--temperature", "nan"], 1, UNSENDABLE),
    ],
)
def test_complete_refuses_what_is_not_the_url_of_a_server_and_what_json_cannot_hold(
    args: list[str], code: int, words: str
) -> None:
    done = tercet("complete", *args)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (code, "", False)
    assert words in " ".join(done.stderr.split())


def test_complete_says_that_a_server_is_not_tercet() -> None:
    with serving_tcp(sends(b"HTTP/1.1 501 Unsupported method\r\nContent-Length: 6\r\n\r\n<html>")) as server:
        done = tercet("complete", "Once", "--url", f"http://{server.address}")
    assert (done.returncode, "is not Tercet" in done.stderr) == (1, True)


def test_the_language_server_needs_standard_input() -> None:
    command = ["sh", "-c", 'exec "$0" -m deploy lsp <&-', sys.executable]
    done = run_program(command, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tercet: `tercet lsp` is started by an editor")


def test_plan_prints_the_plan_that_it_writes(tmp_path: Path) -> None:
    environ = {
        "TERCET_RUN_DIR": str(tmp_path),
        "TERCET_DEVICES": "cuda:0,cuda:1",
        "TERCET_MODELS": "embedded*2,synthetic:small",
        "TERCET_COMPUTE": "cpu",
    }
    done = tercet("plan", "--write", "--json", **environ)
    plan = msgspec.json.decode(done.stdout, type=Plan)
    assert [(slot.device, slot.model) for slot in plan.slots] == [
        (device, model) for device in ("cuda:0", "cuda:1") for model in ("embedded", "embedded", "synthetic:small")
    ]
    assert msgspec.json.decode((tmp_path / "plan.json").read_bytes(), type=Plan) == plan
    assert "cuda:1" in tercet("plan", **environ).stdout


@pytest.mark.parametrize(
    ("directory", "written", "count"),
    [
        ("a,b", '"{}"', 1),
        ("a*2", '"{}"*3', 3),
        ("a, b*2", "'{}'", 1),
        ('a"b,c', "'{}'*2", 2),
        ("it's", "{}*2", 2),
        ("a,b", "{}", "a,b"),
        ("a*2", "{}", "a*2"),
        ("a,b,c*2", "{},embedded", "a,b,c*2"),
        ("a*2,b", "{}", "a*2,b"),
        ("a,b", '"{}', "quotation mark is not closed"),
    ],
)
def test_plan_reads_a_directory_of_any_name(tmp_path: Path, directory: str, written: str, count: int | str) -> None:
    """Or says how to write it, where it could mean another."""
    model = tmp_path / directory
    model.symlink_to(ROOT / "workers/checkpoints/embedded")
    models = f"mine={written.format(model)}"
    environ = {"TERCET_RUN_DIR": str(tmp_path / "run"), "TERCET_DEVICES": "cpu", "TERCET_MODELS": models}
    if isinstance(count, int):
        settings = Settings.load(environ)
        assert [slot.model for slot in make_plan(settings, {}).slots] == ["mine"] * count
        spec = ModelSpec("mine", str(model), count)
        assert Settings.load({"TERCET_MODELS": str(spec)}).model.models == settings.model.models == (spec,)
    else:
        wanted = f'write mine="{tmp_path / count}" for it' if count.startswith("a") else count
        with pytest.raises(StartError, match=re.escape(wanted)):
            make_plan(Settings.load(environ), {})


@pytest.mark.parametrize(
    ("devices", "count", "refusal"),
    [(("cuda:0", "cuda:2"), 1, "names cuda:2, but 2 GPUs are visible"), (("cpu",), 65, "65 workers")],
)
def test_a_missing_device_and_too_many_workers_are_refused(
    tmp_path: Path, devices: tuple[str, ...], count: int, refusal: str
) -> None:
    settings = make_settings(run_dir=tmp_path, devices=devices, models=(ModelSpec("embedded", None, count),))
    with pytest.raises(StartError, match=refusal):
        make_plan(settings, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_the_kv_caches_of_cpu_workers_share_a_part_of_the_free_memory_or_have_the_bound_that_is_set(
    tmp_path: Path,
) -> None:
    def planned(cache_mb: int = 0, **counts: int) -> list[Slot]:
        models = tuple(ModelSpec(f"synthetic:{name}", None, count) for name, count in counts.items())
        settings = make_settings(run_dir=tmp_path / "run", devices=("cpu",), models=models, cache_mb=cache_mb)
        plan = make_plan(settings, {})
        assert plan.gpus == []
        return plan.slots

    (one,) = planned(small=1)
    assert one.memory is None
    most = (48 * (256 + 1024) + 1) * 12 * 2 * 768 * 2
    assert one.cache_bytes is not None
    assert one.cache_bytes <= most
    for slot in planned(small=16, medium=1):
        assert slot.cache_bytes is not None
        assert slot.cache_bytes <= cache_budget_bytes(16)
    (bounded,) = planned(600, small=1)
    assert bounded.cache_bytes == 600_000_000
    with pytest.raises(StartError, match=r"TERCET_CACHE_MB=400 .* at least 491, or a smaller batch"):
        planned(400, small=1)


@pytest.mark.parametrize(("devices", "compute"), [(("cpu",), "auto"), (("cuda:0",), "cpu")])
def test_a_dtype_that_the_cpu_cannot_compute_in_stops_the_start(
    devices: tuple[str, ...], compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, ZEN_3)
    models = (ModelSpec("embedded"),)
    made = make_settings(run_dir=tmp_path, devices=devices, compute=compute, models=models, dtype="bf16")
    with pytest.raises(StartError, match=r"no bf16, .*: AMD Ryzen 7 5800U .* has avx2\. Set TERCET_DTYPE="):
        make_plan(made, {})
    make_plan(make_settings(made, dtype="auto"), {})


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    environ = {"TERCET_KEYS": str(tmp_path / "keys"), "COLUMNS": "200"}
    made = tercet("key", "new", "my editor", "--rate", "60", "--concurrency", "0", **environ)
    key = made.stdout.strip()
    [record] = read_keys(tmp_path / "keys")
    assert made.returncode == 0
    assert key.startswith("tct_")
    assert key not in made.stderr
    listed = tercet("key", "list", **environ).stdout
    for text in (record.id, "my editor", "60", "no limit"):
        assert text in listed
    assert record.sha256 not in listed
    assert tercet("key", "revoke", record.id, **environ).returncode == 0
    assert read_keys(tmp_path / "keys")[0].revoked is not None


@pytest.mark.parametrize(
    ("args", "keys", "message"),
    [
        (("new", "n"), None, "Set TERCET_KEYS"),
        (("list",), "missing", "cannot be read"),
        (("revoke", "nothing"), "keys", "no key with the id 'nothing'"),
        (("new", "n", "--rate", "-1"), "keys", "--rate"),
    ],
)
def test_key_commands_say_what_is_wrong(tmp_path: Path, args: tuple[str, ...], keys: str | None, message: str) -> None:
    (tmp_path / "keys").touch(0o600)
    done = tercet("key", *args, **({"TERCET_KEYS": str(tmp_path / keys)} if keys else {}))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_beyond_loopback_is_refused_however_the_gateway_is_started(tmp_path: Path) -> None:
    port = free_port()
    environ = {
        "TERCET_BIND": f"0.0.0.0:{port}",
        "TERCET_RUN_DIR": str(tmp_path / "r"),
        "TERCET_DEVICES": "cpu",
        "TERCET_MODELS": "embedded",
    }
    refusal = f"Other machines could use the gateway at 0.0.0.0:{port} without an API key"
    served = tercet("serve", **environ)
    assert (served.returncode, served.stderr.count("\n")) == (1, 1)
    assert refusal in served.stderr
    # gunicorn's own option overrides TERCET_BIND.
    loopback = environ | {"TERCET_BIND": f"127.0.0.1:{port}"}
    for settings, args in ((environ, ()), (loopback, ("--bind", f"0.0.0.0:{port}"))):
        gunicorn = run_module("gunicorn", *args, TERCET_ROLE="gateway", **settings)
        assert gunicorn.returncode != 0
        assert refusal in gunicorn.stderr
    # The next check fails: this one has passed.
    permitted = tercet("serve", "--insecure", **environ | {"TERCET_DEVICES": "cuda:7", "CUDA_VISIBLE_DEVICES": ""})
    assert "cuda:7" in permitted.stderr
