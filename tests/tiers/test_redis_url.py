from __future__ import annotations

from pathlib import Path

import pytest

from kvd.errors import ConfigError
from kvd.tiers.redis_tier import RedisOptions, RedisTier
from kvd.tiers.redis_url import Node, RedisAddress, Secret, parse_redis_url

SECRET = "s3cr3t!word"


def test_each_scheme():
    parse = lambda url: parse_redis_url(url, {})  # noqa: E731
    assert parse("unix:///run/r.sock") == RedisAddress(nodes=(Node("/run/r.sock", 0),))
    assert parse("unix:///run/r.sock?db=3").db == 3
    assert parse("redis://host") == RedisAddress(nodes=(Node("host", 6379),))
    assert parse("redis://[::1]:7000/2") == RedisAddress(nodes=(Node("::1", 7000),), db=2)
    tls = parse("rediss://host:1?ca_file=/ca&cert_file=/c&key_file=/k")
    assert (tls.tls, tls.ca_file, tls.cert_file, tls.key_file) == (True, "/ca", "/c", "/k")
    cluster = parse("redis+cluster://a:1,b:2")
    assert (cluster.cluster, cluster.tls, cluster.nodes) == (True, False, (Node("a", 1), Node("b", 2)))
    assert parse("rediss+cluster://a:1").tls


def test_where_the_password_comes_from(tmp_path: Path):
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    environ = {"KVD_REDIS_PASSWORD": "from the default", "OTHER": "from another"}
    found = {
        url: parse_redis_url(url, environ).password.reveal()
        for url in (
            "redis://host",
            "redis://:in-the-url@host",
            "redis://host?password_env=OTHER",
            f"redis://host?password_file={file}",
        )
    }
    assert list(found.values()) == ["from the default", "in-the-url", "from another", SECRET]
    address = parse_redis_url("redis://ann:p%40ss@host", {})
    assert (address.user, address.password.reveal()) == ("ann", "p@ss")
    assert parse_redis_url("unix:///s?user=ann", {}).user == "ann"


def test_no_secret_shows_anywhere(tmp_path: Path):
    address = parse_redis_url(f"redis://ann:{SECRET}@host:1/2", {})
    with RedisTier(address) as tier:
        shown = [str(address), repr(address), f"{address.password}", repr(tier.status()), str(vars(tier))]
    assert not any(SECRET in text for text in shown)
    assert str(address) == "redis://ann@host:1?db=2"
    assert repr(Secret(SECRET)) == "***"


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("http://ann:{}@host", "must begin with"),
        ("ann:{}@host", "must begin with"),
        ("", "must begin with"),
        ("redis://ann:{}@", "needs a host"),
        ("redis://ann:{}@host:99999", "port from 1 to 65535"),
        ("redis://ann:{}@host:port", "port from 1 to 65535"),
        ("redis://ann:{}@[::1", "brackets"),
        ("redis://ann:{}@a,b", "only redis\\+cluster"),
        ("redis://ann:{}@host/notanumber", "database"),
        ("redis://ann:{}@host?db=-1", "database"),
        ("redis+cluster://ann:{}@host/1", "only database 0"),
        ("redis://ann:{}@host?pasword_file=/x", "did you mean password_file"),
        ("redis://ann:{}@host?ca_file=/x", "use rediss"),
        ("rediss://ann:{}@host?cert_file=/x", "without key_file"),
        ("redis://ann:{}@host?password_env=UNSET", "not set"),
        ("redis://ann:{}@host?password_file=/does/not/exist", "cannot be read"),
        ("unix://ann:{}@relative.sock", "three slashes"),
        ("unix:///" + "x" * 120, "kernel's limit"),
    ],
)
def test_a_url_that_cannot_work_says_why_and_shows_no_secret(rest: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_redis_url(rest.format(SECRET), {})
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "options",
    [
        {"ttl_s": 0},
        {"ttl_s": -5},
        {"ttl_s": 10**9},
        {"ttl_s": True},
        {"prefix": "a*"},
        {"prefix": "{slot}"},
        {"prefix": "x" * 65},
        {"codec": "gzip"},
        {"control_timeout_s": 0},
        {"connect_timeout_s": 1e9},
        {"bulk_nbytes_per_s": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]):
    with pytest.raises(ConfigError):
        RedisOptions(**options)
