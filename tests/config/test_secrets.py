"""What may be shown of a URL."""

from __future__ import annotations

import pytest

from kvd.config.keys import KEYS
from kvd.config.secrets import redacted


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("embedded", "embedded"),
        ("", ""),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user@host:6379", "redis://user@host:6379"),
        ("redis://:hunter2@host:6379", "redis://:***@host:6379"),
        ("rediss://user:hunter2@host", "rediss://user:***@host"),
        ("redis+cluster://user:hunter2@one:7000,two:7001", "redis+cluster://user:***@one:7000,two:7001"),
        ("redis://:hun/ter2@host", "redis://:***@host"),
        ("redis://:hun@ter2@host", "redis://:***@host"),
        ("redis://host?password=hunter2&db=1", "redis://host?password=***&db=1"),
        ("redis://host?password_env=NAME", "redis://host?password_env=NAME"),
    ],
)
def test_a_password_becomes_stars(url, shown):
    assert redacted(url) == shown


def test_the_url_is_marked_secret():
    assert KEYS["tiers.redis.url"].format("redis://u:hunter2@h") == "redis://u:***@h"
