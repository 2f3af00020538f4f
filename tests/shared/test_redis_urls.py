"""URLs of Redis, and what is said about wrong ones."""

from __future__ import annotations

import pytest

from shared.errors import StartError
from shared.redis_urls import RedisUrl, parse_redis_url
from shared.settings import Settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://db", RedisUrl("redis://db", (("db", 6379),))),
        ("rediss://u:p@[::1]:1/2", RedisUrl("rediss://u:p@[::1]:1/2", (("::1", 1),))),
        (
            "redis+sentinel://a:1,b,[::1]:3/mymaster",
            RedisUrl("redis://a:1", (("a", 1), ("b", 26379), ("::1", 3)), "mymaster"),
        ),
        (
            "rediss+sentinel://u:p%40@a/m-1.x/5?sentinel_username=s&ssl_ca_certs=/a%20b&sentinel_password=q%26",
            RedisUrl(
                "rediss://u:p%40@a/5?ssl_ca_certs=%2Fa+b",
                (("a", 26379),),
                "m-1.x",
                (("username", "s"), ("password", "q&")),
            ),
        ),
    ],
)
def test_a_url_is_read(text: str, expected: RedisUrl) -> None:
    assert parse_redis_url(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redis+sentinel://a:1,b:2", "must name the primary that the Sentinels watch"),
        ("redis+sentinel://a:1/0/mymaster", "must name the primary"),
        ("redis+sentinel://a:1/my master", "must name the primary"),
        ("redis+sentinel://a:1,,b:2/m", "has '' where a host"),
        ("redis+sentinel://a:70000/m", "has 'a:70000' where a host"),
        ("redis+sentinel://a:x/m", "has 'a:x' where a host"),
        ("redis-sentinel://a:1/m", "must be sqlite:<file>, redis://"),
        ("redis+sentinels://a:1/m", "must be sqlite:<file>, redis://"),
        ("redis://a:1,b:2/0", "redis+sentinel://"),
        ("redis://a:70000", "has 'a:70000' where a host"),
        *((f"redis://{wrong}", "must be redis://") for wrong in ("a:six", ":6379", "/0")),
        ("redis://a/mymaster", "must be redis://"),
    ],
)
def test_a_wrong_url_is_refused_with_the_form(text: str, message: str) -> None:
    with pytest.raises(StartError) as caught:
        Settings.load({"TERCET_JOBS": text})
    assert message in str(caught.value)
    assert "TERCET_JOBS" in str(caught.value)


def test_a_refusal_shows_no_password() -> None:
    with pytest.raises(StartError) as caught:
        Settings.load({"TERCET_JOBS": "redis+sentinel://:secret@a:x/m?sentinel_password=hidden&ssl_ca_certs=/a"})
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)
