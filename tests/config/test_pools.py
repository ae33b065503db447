"""`[[pools]]`: what a rule may say, and that every mistake names the rule, the key and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.build import pool_rules
from kvd.config.keys import POOL_KEYS
from kvd.config.load import load
from kvd.config.pool_rule import MAX_RULES, PoolRule, is_pattern
from kvd.config.reference import markdown
from kvd.errors import ConfigError
from kvd.service.pool_rules import PoolPolicy


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "kvd.toml"
        path.write_text(text)
        return path

    return write


def test_what_a_rule_leaves_out_is_as_in_tiers(toml):
    path = toml(
        '[tiers]\nspill = "on_second_hit"\nafter_promote = "drop"\n'
        '[[pools]]\nname = "fast"\nmodels = ["llama*"]\nspill = "write_through"\n'
        '[[pools]]\nname = "mine"\nengines = ["vllm/*"]\nusers = ["root", 1001]\nafter_promote = "retain"\n'
    )
    config = load(path, {}).config
    assert [rule.name for rule in config.pools] == ["fast", "mine"]
    rules = pool_rules(config)
    assert rules.policy("") == PoolPolicy(spill="on_second_hit", after_promote="drop")
    assert rules.policy("fast") == PoolPolicy(spill="write_through", after_promote="drop")
    assert rules.policy("mine") == PoolPolicy(spill="on_second_hit", after_promote="retain")
    assert rules.rules[1].uids == {0, 1001}


def test_flags_and_variables_leave_the_rules_alone(toml):
    config = load(toml('[[pools]]\nname = "a"\n'), {"KVD_TIERS_SPILL": "write_through"}).config
    assert config.pools == (PoolRule(name="a"),)
    assert pool_rules(config).policy("a").spill == "write_through"


NAMED = '[[pools]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pools]\nname = 'a'", ["[[pools]]"]),
        ("pools = 1", ["[[pools]]"]),
        ("pools = [1]", ["[[pools]]"]),
        ("[[pool]]\nname = 'a'", ["pool", "did you mean pools?"]),
        ("[[pools]]\nspill = 'on_evict'", ["number 1", "no name"]),
        ("[[pools]]\nname = ''", ["name of [[pools]] number 1", "1 to 64", "not ''"]),
        ("[[pools]]\nname = 'a b'", ["name of [[pools]] number 1", "not 'a b'"]),
        ("[[pools]]\nname = 3", ["name of [[pools]] number 1", "not 3"]),
        (NAMED * 2, ["name of [[pools]] number 2", "number 1", "'a'"]),
        (NAMED + "spil = 'on_evict'", ["spil", "number 1, 'a'", "did you mean spill?"]),
        (NAMED + "zzz = 1", ["zzz", "after_promote"]),
        (NAMED + "spill = 'never'", ["spill of [[pools]] number 1, 'a'", "on_evict, write_through", "not 'never'"]),
        (NAMED + "after_promote = true", ["after_promote", "retain, drop"]),
        (NAMED + "models = 'llama*'", ["models", "a list", "not 'llama*'"]),
        (NAMED + "models = []", ["models", "1 to 256 patterns", "not []"]),
        (NAMED + "models = ['']", ["models", "not ['']"]),
        (NAMED + "models = [1]", ["models", "not [1]"]),
        (NAMED + "models = ['x', 'llama[12']", ["models", "every [ closed", "not 'llama[12'"]),
        (NAMED + "engines = ['[!]']", ["engines", "not '[!]'"]),
        (NAMED + "users = ['no such user']", ["users", "'no such user'", "no such user"]),
        (NAMED + "users = [-1]", ["users", "user names and numbers", "not [-1]"]),
        (NAMED + "users = [true]", ["users", "not [True]"]),
        (NAMED + "users = []", ["users", "not []"]),
        ("".join(f"[[pools]]\nname = 'r{n}'\n" for n in range(MAX_RULES + 1)), [str(MAX_RULES + 1), str(MAX_RULES)]),
    ],
)
def test_a_wrong_rule_is_one_line_that_names_it(toml, text, words):
    path = toml(text)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["*", "a[bc]", "[]]", "[!]]", "[[]x", "]", "[!a]", ""])
def test_patterns(text):
    assert is_pattern(text)


@pytest.mark.parametrize("text", ["[", "a[", "[]", "[!", "[!]", "[a][b", "x[a]["])
def test_open_brackets_are_no_patterns(text):
    assert not is_pattern(text)


def test_every_key_of_a_rule_is_in_the_reference():
    page = markdown().partition("## [[pools]]")[2]
    for key in POOL_KEYS.values():
        assert f"| `{key.field}` | {key.kind} |" in page
        assert f"- `{key.field}`: {key.description}" in page
