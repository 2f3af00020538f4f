"""Settings: parsing, validation of all variables together, and the table of settings."""

import pytest

from shared.errors import StartError
from shared.settings import Address, ModelSpec, Settings


def test_defaults() -> None:
    settings = Settings.load({})
    assert settings.bind == Address("127.0.0.1", 8000)
    assert (settings.max_batch, settings.placement, settings.models) == (48, "auto", ())


def test_reads_models_with_counts_and_sources() -> None:
    settings = Settings.load({"TERCET_MODELS": "small*2, medium ,legal=/models/legal-gpt2*3,x=org/name"})
    assert settings.models == (
        ModelSpec("small", None, 2),
        ModelSpec("medium"),
        ModelSpec("legal", "/models/legal-gpt2", 3),
        ModelSpec("x", "org/name"),
    )
    assert Settings.load({"TERCET_MODELS": "synthetic:small"}).models == (ModelSpec("synthetic:small"),)


def test_all_wrong_variables_are_named_at_once() -> None:
    environ = {"TERCET_BINDD": "x", "TERCET_BIND": "8000", "TERCET_MAX_BATCH": "0", "TERCET_ROLE": "gateway"}
    with pytest.raises(StartError) as caught:
        Settings.load(environ)
    message = str(caught.value)
    assert "TERCET_BINDD is not a setting" in message
    assert "TERCET_BIND='8000' must be host:port" in message
    assert "TERCET_MAX_BATCH='0' must be a whole number from 1 to 512" in message
    assert "TERCET_ROLE" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODELS", "small,small"),
        ("MODELS", "small*0"),
        ("MODELS", "legal="),
        ("MODELS", "../etc"),
        ("DEVICES", "gpu0"),
        ("DEVICES", "cuda:0,cuda:0"),
        ("TIMEOUT_S", "nan"),
        ("TIMEOUT_S", "-1"),
        ("DTYPE", "int4"),
        ("ORIGINS", "*"),
        ("ORIGINS", "https://a.example/path"),
        ("BIND", "127.0.0.1:99999"),
        ("TEST_STEP_DELAY_MS", "fast"),
        ("TEST_STEP_DELAY_MS", "0=fast"),
        ("TEST_STEP_DELAY_MS", "0=1=2"),
        ("QUEUE", "1_000"),
        ("QUEUE", "+5"),
        ("QUEUE", "-1"),
        ("QUEUE", "5.5"),
        ("QUEUE", "0x10"),
        ("QUEUE", "true"),
        ("TIMEOUT_S", "inf"),
        ("TIMEOUT_S", "1_0"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(StartError, match=f"TERCET_{name}="):
        Settings.load({f"TERCET_{name}": value})


def test_plain_values_are_converted_by_their_type() -> None:
    settings = Settings.load(
        {
            "TERCET_QUEUE": " 0 ",
            "TERCET_TIMEOUT_S": "2.5",
            "TERCET_LOG": "debug",
            "TERCET_TEST_STEP_DELAY_MS": "0=0,1=10.5",
        }
    )
    assert (settings.queue, settings.timeout_s, settings.log) == (0, 2.5, "debug")
    assert settings.test_step_delay_ms == {0: 0.0, 1: 10.5}
    assert Settings.load({"TERCET_QUEUE": ""}) == Settings.load({})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("QUEUE", "4097", "TERCET_QUEUE='4097' must be a whole number from 0 to 4096, like 96."),
        ("TIMEOUT_S", ".5", "TERCET_TIMEOUT_S='.5' must be a number from 0.05 to 600, like 30."),
        ("COMPUTE", "gpu", "TERCET_COMPUTE='gpu' must be one of auto, cpu."),
    ],
)
def test_a_refusal_names_the_variable_the_value_and_the_range(name: str, value: str, message: str) -> None:
    with pytest.raises(StartError) as caught:
        Settings.load({f"TERCET_{name}": value})
    assert str(caught.value) == message


def test_instances_on_different_ports_have_different_run_directories() -> None:
    first, second = (Settings.load({"TERCET_BIND": f"127.0.0.1:{port}"}) for port in (8000, 8001))
    assert first.run_path != second.run_path


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.0.2.7", True),
        ("write.example", True),
        ("WRITE.example:80", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("", False),
        ("[::1", True),
    ],
)
def test_host_header(host: str, is_allowed: bool) -> None:
    assert Settings.load({"TERCET_HOSTS": "write.example"}).allows_host(host) is is_allowed
    assert Settings.load({"TERCET_HOSTS": "*"}).allows_host("evil.example")


def test_every_setting_is_listed_with_its_default_unit_and_reason() -> None:
    rows = Settings.table()
    assert {"TERCET_BIND", "TERCET_RUN_DIR", "TERCET_ORIGINS", "TERCET_LOG"} <= {row[0] for row in rows}
    assert all(text for row in rows for text in row)
