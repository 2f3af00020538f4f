"""Settings: parsing, validation of all variables together, and the table of settings."""

import re
from pathlib import Path

import pytest

from shared.errors import StartError
from shared.home import START_DIRECTORY
from shared.setting_values import ModelSpec, PoolUrl, without_passwords
from shared.settings import Settings, service_links
from tests.deploy.paths import path_settings


def test_models_and_remote_workers_are_read_and_written_alike() -> None:
    models = Settings.load({"TERCET_MODELS": "small*2, medium ,legal=/models/legal-gpt2*3,x=org/name"}).model.models
    sources = [("small", None, 2), ("medium", None, 1), ("legal", "/models/legal-gpt2", 3), ("x", "org/name", 1)]
    assert models == tuple(ModelSpec(*each) for each in sources)
    assert Settings.load({"TERCET_MODELS": "synthetic:small"}).model.models == (ModelSpec("synthetic:small"),)
    pool = "small=https://gpu-a.example:8100-8103, medium=http://[::1]:9000/medium/"
    small, medium = Settings.load({"TERCET_POOL": pool}).remote.pool
    assert small == PoolUrl("small", "https", "gpu-a.example", 8100, 8103)
    assert medium == PoolUrl("medium", "http", "::1", 9000, 9000, "/medium")
    assert f"{small}, {medium}/" == pool


def test_all_wrong_variables_are_named_at_once() -> None:
    environ = {"TERCET_BINDD": "x", "TERCET_BIND": "8000", "TERCET_MAX_BATCH": "0", "TERCET_ROLE": "gateway"}
    environ |= {"TERCET_COMPUTE": "gpu", "TERCET_TIMEOUT_S": ".5"}
    with pytest.raises(StartError) as caught:
        Settings.load(environ)
    message = str(caught.value)
    assert "TERCET_BINDD is not a setting" in message
    assert "TERCET_BIND='8000' must be host:port" in message
    assert "TERCET_MAX_BATCH='0' must be a whole number from 1 to 512" in message
    assert "TERCET_COMPUTE='gpu' must be one of auto, cpu" in message
    assert "TERCET_TIMEOUT_S='.5' must be a number from 0.05 to 600, like 30" in message
    assert "TERCET_ROLE" not in message


WRONG = {
    "MODELS": ["small,small", "small*0", "legal=", "../etc", "/a*2"],
    "DEVICES": ["gpu0", "cuda:0,cuda:0"],
    "POOL": [
        *("https://gpu-a.example:8100", "small=gpu-a.example:8100", "small=https://gpu-a.example"),
        *("small=https://gpu-a.example:8103-8100", "small=https://gpu-a.example:8100?x=1"),
        *("small=https://key@gpu-a.example:8100", "small=http://a:1,small=http://a:1"),
    ],
    "POOL_BIND": ["8100"],
    "TIMEOUT_S": ["nan", "-1", "inf", "1_0"],
    "DTYPE": ["int4"],
    "JOBS": [
        *("sqlite:", "postgres://db"),
        *("dynamodb://x", "dynamodb://jobs?profile=x", "dynamodb://", "dynamodb://" + "a" * 256, "dynamodb://job:s"),
    ],
    "QUEUE": ["4097", "1_000", "+5", "-1", "5.5", "0x10", "true"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(StartError, match=f"TERCET_{name}="):
        Settings.load({f"TERCET_{name}": value})


def test_plain_values_are_converted_by_their_type() -> None:
    """Each variable sets its own field: two groups have one named `queue`."""
    texts = {"QUEUE": " 0 ", "JOB_QUEUE": "8", "TIMEOUT_S": "2.5", "LOG": "debug", "JOBS": "none"}
    settings = Settings.load({f"TERCET_{name}": text for name, text in texts.items()})
    assert (settings.limits.queue, settings.jobs.queue, settings.limits.timeout_s) == (0, 8, 2.5)
    assert (settings.server.log, settings.job_store) == ("debug", "none")
    assert Settings.load({"TERCET_QUEUE": ""}) == Settings.load({})


def test_a_job_store() -> None:
    home = Path("~").expanduser()
    assert Settings.load({}).job_store == f"sqlite:{home}/.local/state/tercet/jobs-8000.sqlite3"
    assert Settings.load({"TERCET_JOBS": "sqlite:~/jobs"}).job_store == f"sqlite:{home}/jobs"
    for url in ("none", "redis://:secret@db:6379/1", "dynamodb://jobs?region=eu-central-1&endpoint=http://127.0.0.1:8"):
        assert Settings.load({"TERCET_JOBS": url}).job_store == url


def test_a_refused_job_store_does_not_show_its_password() -> None:
    with pytest.raises(StartError) as caught:
        Settings.load({"TERCET_JOBS": "redi://user:secret@db:6379"})
    assert "secret" not in str(caught.value)
    assert "db:6379" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1:٨٠٠٠", "127.0.0.1:８０００", "127.0.0.1:8000²", "127.0.0.1:", "127.0.0.1", ":8000", "127.0.0.1:0"),
        *("127.0.0.1:65536", "127.0.0.1:+80", "127.0.0.1: 80", "::1:8000", "[::1:8000", "::1]:8000", "[127.0.0.1]:80"),
        *("[localhost]:80", "[::1]x:80", "a b:80", "http://127.0.0.1:80", "127.0.0.1:80:90"),
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(StartError, match="must be host:port with a port from 1 to 65535"):
        Settings.load({"TERCET_BIND": text})


@pytest.mark.parametrize(
    ("bind", "is_loopback", "url"),
    [
        ("127.0.0.1:1", True, "http://127.0.0.1:1"),
        ("127.1.2.3:1", True, "http://127.1.2.3:1"),
        ("[::1]:1", True, "http://[::1]:1"),
        ("localhost:65535", True, "http://localhost:65535"),
        ("0.0.0.0:1", False, "http://127.0.0.1:1"),
        ("[::]:1", False, "http://[::1]:1"),
        ("192.0.2.7:1", False, "http://192.0.2.7:1"),
        ("write.example:1", False, "http://write.example:1"),
        ("localhost.example:1", False, "http://localhost.example:1"),
    ],
)
def test_which_addresses_only_this_machine_reaches(bind: str, is_loopback: bool, url: str) -> None:
    settings = Settings.load({"TERCET_BIND": bind})
    assert (settings.server.bind.is_loopback, settings.url) == (is_loopback, url)
    assert Settings.load({"TERCET_BIND": bind, "TERCET_TLS_CERT": "c"}).url == url.replace("http", "https")


HOSTS = "write.example,*.notes.example,my_service"
OUR_HOSTS = (
    *("localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "[::1]", "192.0.2.7"),
    *("write.example", "WRITE.example:80", "a.notes.example", "A.b.Notes.example:1", "my_service", "bound.example"),
    *("localhost.", "LocalHost.:8000", "tercet.localhost", "a.b-c.LOCALHOST:8000", "notes.localhost.:8000"),
    *("127.0.0.1.:8000", "write.example.", "a.notes.example.:80"),
)
OTHER_HOSTS = (
    *(
        "evillocalhost",
        "localhost..",
        "write.example..",
        "localhost.example.",
        "a.localhost.evil",
        "evil.example:8000",
        "localhost.evil.example",
    ),
    *("evil.write.example", "write.example.evil", "notes.example", "evilnotes.example", "a.notes.example.evil"),
    *("2130706433", "127.1"),
)
MALFORMED_HOSTS = (
    *(".localhost", ".notes.example", "[localhost]evil.com", "[localhost]"),
    *("localhost:evil.com", "localhost:80evil", "localhost:80:90", "localhost:", "localhost:٨٠", "localhost:-1"),
    *("localhost:123456", "[::1", "::1", "[::1]evil.com", "[::1]:evil", "[127.0.0.1]", "localhost evil.com"),
    *("localhost,evil.com", "localhost/", "user@localhost", "localhost\tevil", "http://localhost", "localhost#"),
    *("localhost?", "*", ".", "loc\u0430lhost", "[::1%25eth0]"),
)


@pytest.mark.parametrize("host", OUR_HOSTS)
def test_hosts_that_name_this_server(host: str) -> None:
    assert Settings.load({"TERCET_HOSTS": HOSTS, "TERCET_BIND": "Bound.example:80"}).allows_host(host)


@pytest.mark.parametrize("host", ["", *OTHER_HOSTS, *MALFORMED_HOSTS])
def test_other_hosts_are_refused_and_a_star_allows_all_but_malformed_ones(host: str) -> None:
    """HTTP/1.0 has no Host header."""
    assert not Settings.load({"TERCET_HOSTS": HOSTS}).allows_host(host)
    assert Settings.load({"TERCET_HOSTS": "*"}).allows_host(host) is (host not in MALFORMED_HOSTS)


@pytest.mark.parametrize(
    "hosts",
    [
        *("*.", "**", "a.*", "*a.example", "*.*.example", "write.example:80", "http://write.example", "a b", "a..b"),
        *("писать.example", ".example", "[::1]"),
    ],
)
def test_a_host_pattern_that_could_match_nothing_is_refused(hosts: str) -> None:
    with pytest.raises(
        StartError, match=r"a host is a name without a port, \*\.name for its subdomains, or \* for any"
    ):
        Settings.load({"TERCET_HOSTS": f"write.example,{hosts}"})


# As they are listed, where that differs from what is set.
ORIGINS = {
    "https://Notes.example/": "https://notes.example",
    "http://a.example:80": "http://a.example",
    "https://b.example:443": "https://b.example",
    "http://c.example:443": "",
    "http://[::1]:9": "",
    # Obsidian on desktops and on iOS; apps; extensions. VS Code makes a host for each view.
    **dict.fromkeys(("app://obsidian.md", "capacitor://localhost", "ionic://localhost", "app://-", "app://*"), ""),
    **dict.fromkeys(("wails://wails.localhost:34115", "chrome-extension://abcdefghijklmnop", "vscode-webview://*"), ""),
    "tauri://localhost/": "tauri://localhost",
    "moz-extension://3f2b8c1a-0d5e-4a8f-9b6c-7d1e2f3a4b5c": "",
    "moz-extension://*/": "moz-extension://*",
    "safari-web-extension://0F5C-97B4": "safari-web-extension://0f5c-97b4",
    "file://": "",
    "file:///": "file://",
}


def test_origins_are_listed_as_browsers_send_them() -> None:
    listed = Settings.load({"TERCET_ORIGINS": f" {' ,'.join(ORIGINS)}"}).access.origins
    assert listed == tuple(shown or origin for origin, shown in ORIGINS.items())


OTHER_ORIGINS = (
    *("https://*.example", "https://*", "http://localhost:*", "*://localhost", "https://a.example/path"),
    *("chrome-extension://abcdefghijklmnop/popup.html", "ftp://a.example", "ws://localhost:3000", "file://*"),
    *("a.example", "https://", "https://a.example:port", "https://u@a.example", "app://", "app://a*"),
    "tauri:localhost",
)
SPECIAL_ORIGINS = {
    "*": r"has '\*', which would open the server to every page on the web",
    "null": "has 'null', the origin of any page in a sandboxed frame or from a file",
}


@pytest.mark.parametrize("origin", [*OTHER_ORIGINS, *SPECIAL_ORIGINS])
def test_other_origins_are_refused(origin: str) -> None:
    reason = SPECIAL_ORIGINS.get(origin, f"has {re.escape(repr(origin))}")
    with pytest.raises(StartError, match=reason + r".*an origin is http\(s\)://host"):
        Settings.load({"TERCET_ORIGINS": origin})


def test_every_setting_is_listed_with_its_default_unit_and_reason() -> None:
    groups = Settings.reference()
    titles = [title.partition(":")[0] for title, _ in groups]
    assert titles == ["Server", "Models", "Workers of this machine", "Limits", "Access", "Jobs", "Several machines"]
    rows = {row.variable: row for _, group in groups for row in group}
    assert rows["TERCET_JOB_QUEUE"] == (
        "TERCET_JOB_QUEUE",
        "1000",
        "jobs",
        "jobs that may be queued or running; an API key may have a quarter of them",
    )
    assert rows["TERCET_DTYPE"].unit == "auto, fp32, bf16, fp16, int8"
    assert rows["TERCET_CACHE_DIR"].reason.endswith("where it cannot be written to, each start makes them anew")
    assert all(text for row in rows.values() for text in row)
    assert len(rows) == sum(len(group) for _, group in groups)


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    name, secret = "TERCET_JOBS", tmp_path / "secret"
    secret.write_text("redis://:s3cret@db:6379/0\n")
    settings = Settings.load({f"{name}_FILE": str(secret)})
    assert "s3cret" in str(settings.jobs.store)
    with pytest.raises(StartError, match=f"{name} and {name}_FILE are both set"):
        Settings.load({name: "redis://db:6379/0", f"{name}_FILE": str(secret)})
    with pytest.raises(StartError, match=rf"{name}_FILE='.*/none' cannot be read: No such file"):
        Settings.load({f"{name}_FILE": str(tmp_path / "none")})
    secret.write_text("redis:/:s3cret@db")
    with pytest.raises(StartError, match=f"{name}=") as caught:
        Settings.load({f"{name}_FILE": str(secret)})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["TERCET_REDIS", "TERCET_REDIS_FILE"])
def test_a_setting_of_an_earlier_version_is_refused_with_what_does_its_work(name: str) -> None:
    with pytest.raises(StartError, match=f"{name} is no longer a setting, .*load balancer.*TERCET_JOBS=") as caught:
        Settings.load({name: "redis://:s3cret@db:6379/0"})
    assert "s3cret" not in str(caught.value)


def test_only_secrets_may_be_in_files() -> None:
    with pytest.raises(StartError, match="TERCET_MODELS_FILE is not a setting"):
        Settings.load({"TERCET_MODELS_FILE": "/etc/models"})


def test_service_links_of_kubernetes_are_ignored() -> None:
    """In a namespace with services named `tercet` and `tercet-gateway`."""
    links = {
        "TERCET_SERVICE_HOST": "10.0.0.1",
        "TERCET_SERVICE_PORT": "80",
        "TERCET_PORT": "tcp://10.0.0.1:80",
        "TERCET_GATEWAY_SERVICE_PORT_HTTP": "80",
        "TERCET_GATEWAY_PORT_80_TCP": "tcp://10.0.0.1:80",
        "TERCET_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert Settings.load(links) == Settings()
    assert service_links(links | {"TERCET_MODELS": "small", "PORT": "80"}) == sorted(links)
    for name in ("TERCET_PORT", "TERCET_PORTS", "TERCET_GATEWAY", "TERCET_SERVICE_HOSTS"):
        with pytest.raises(StartError, match=f"{name} is not a setting"):
            Settings.load({name: "1"})


def test_a_shown_url_has_no_password() -> None:
    assert without_passwords("redis://user:s3cret@db:6379/0") == "redis://…@db:6379/0"
    assert without_passwords("redis://db:6379/0") == "redis://db:6379/0"


def test_relative_paths_begin_where_tercet_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting, with each form of a relative path that it takes, in a process that runs in another directory."""
    found = set()
    for name in (row.variable for _, group in Settings.reference() for row in group):
        for text in ("p", "./p", "../p q", "ü/p", "sqlite:p"):
            monkeypatch.chdir(tmp_path)
            monkeypatch.delenv(START_DIRECTORY, raising=False)
            try:
                settings = Settings.load({name: text})
            except StartError:
                continue  # not a path
            monkeypatch.setenv(START_DIRECTORY, str(tmp_path))
            monkeypatch.chdir("/")
            assert Settings.load({name: text}) == settings
            monkeypatch.delenv(START_DIRECTORY)
            if Settings.load({name: text}) != settings:
                found.add(name)
    assert found == path_settings() | {"TERCET_JOBS"}


def test_a_secrets_file_begins_where_tercet_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("redis://db:6379/0\n")
    monkeypatch.setenv(START_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = Settings.load({"TERCET_JOBS": "redis://db:6379/0"})
    assert Settings.load({"TERCET_JOBS_FILE": "secret"}) == expected
    assert Settings.load({"TERCET_JOBS_FILE": "~/secret"}) == expected


def test_in_a_directory_that_was_removed_only_relative_paths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert Settings.load({"TERCET_KEYS": "/etc/keys", "TERCET_MODELS": "x=org/name"}).access.keys == Path("/etc/keys")
    with pytest.raises(StartError, match=r"TERCET_KEYS='keys' is relative, but the current directory was removed: "):
        Settings.load({"TERCET_KEYS": "keys"})
    with pytest.raises(StartError, match=r"TERCET_JOBS_FILE='url' cannot be read: it is relative, but .* was removed"):
        Settings.load({"TERCET_JOBS_FILE": "url"})
