"""What a gateway checks of `TERCET_POOL` before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from shared.errors import StartError
from shared.remote_pools import check_pool
from shared.settings import Settings

KEY = "k" * 40


def load(folder: Path, pool: str, **settings: str) -> Settings:
    """Settings with a usable key and authority, unless they are given as ""."""
    key, ca = folder / "pool.key", folder / "ca.pem"
    key.write_text(KEY)
    key.chmod(0o600)
    trustme.CA().cert_pem.write_to_path(ca)
    values = {"pool": pool, "pool_key": str(key), "pool_ca": str(ca), **settings}
    return Settings.load({f"TERCET_{name.upper()}": value for name, value in values.items()})


@pytest.mark.parametrize(
    ("pool", "settings"),
    [
        ("small=https://gpu-a.example:8100-8103", {}),
        ("small=https://gpu-a.example:8100", {"pool_ca": ""}),
        ("small=http://127.0.0.1:8100,medium=http://localhost:8101", {}),
        ("small=http://[::1]:8100", {}),
        ("small=http://10.0.0.7:8100", {"insecure": "1"}),
        ("small=http://10.0.0.7:8100", {"insecure": "1", "pool_key": ""}),
        ("", {"pool_key": "", "pool_ca": ""}),
    ],
)
def test_a_pool_is_accepted(tmp_path: Path, pool: str, settings: dict[str, str]) -> None:
    check_pool(load(tmp_path, pool, **settings))


@pytest.mark.parametrize(
    ("pool", "settings", "text"),
    [
        ("small=http://10.0.0.7:8100", {}, r"unencrypted: use https://.*TERCET_INSECURE=1"),
        ("small=http://gpu-a.example:8100", {}, r"TERCET_POOL has small=http://gpu-a\.example:8100"),
        ("small=https://gpu-a.example:8100", {"pool_key": ""}, r"TERCET_POOL needs TERCET_POOL_KEY"),
        ("small=https://gpu-a.example:8100", {"pool_key": "/nonexistent"}, r"TERCET_POOL_KEY\) cannot be read"),
        ("small=https://gpu-a.example:8100", {"pool_ca": "/nonexistent"}, r"\(TERCET_POOL_CA\).*No such file"),
        ("small=https://gpu-a.example:8100", {"pool_ca": __file__}, r"\(TERCET_POOL_CA\) has no certificates"),
        ("small=https://gpu-a.example:1-65535", {}, r"names 65535 ports, of at most 256"),
    ],
)
def test_a_pool_is_refused(tmp_path: Path, pool: str, settings: dict[str, str], text: str) -> None:
    with pytest.raises(StartError, match=text) as caught:
        check_pool(load(tmp_path, pool, **settings))
    assert KEY not in str(caught.value)
