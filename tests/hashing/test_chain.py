"""Chain hashes and namespaces: what is the same anywhere, and what never is."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.block import NamespaceDigest
from kvd.errors import InvalidRequest
from kvd.hashing import Namespace, chain_hashes, encode_tokens, namespace_digest, pack_hashes, unpack_hashes
from kvd.layout import KVLayout

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
BASE = Namespace(model="smollm2@sha256:00", layout=LAYOUT)

_PRINT_HASHES = """
from kvd.hashing import *
from kvd.layout import KVLayout
space = Namespace(model="m", layout=KVLayout(num_layers=30, num_kv_heads=3, head_dim=64), salt="s", adapter="a")
root = namespace_digest(space, "group:kvd")
print(root.hex(), *(h.hex() for h in chain_hashes(root, encode_tokens(range(100_000, 100_064)), 16)))
"""


# case A1
def test_every_interpreter_gives_the_same_hashes():
    printed = set()
    for seed in ("0", "1", "12345", None):
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environ["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_HASHES], env=environ, capture_output=True, text=True, check=True, timeout=60
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    assert len(printed.pop().split()) == 5


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8))
def test_a_hash_is_sha256_over_parent_and_tokens(ids, block_tokens):
    root = NamespaceDigest(hashlib.sha256(b"root").digest())
    expected, parent = [], bytes(root)
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        block = b"".join(value.to_bytes(4, "little") for value in ids[start : start + block_tokens])
        parent = hashlib.sha256(parent + block).digest()
        expected.append(parent)
    assert chain_hashes(root, encode_tokens(ids), block_tokens) == expected


def test_hashes_continue_from_any_block():
    root = namespace_digest(BASE, "t")
    whole = chain_hashes(root, encode_tokens(range(64)), 16)
    assert chain_hashes(whole[1], encode_tokens(range(32, 64)), 16) == whole[2:]


def test_a_token_changes_its_block_and_every_later_one():
    root = namespace_digest(BASE, "t")
    ids = list(range(64))
    before = chain_hashes(root, encode_tokens(ids), 16)
    ids[20] += 1
    after = chain_hashes(root, encode_tokens(ids), 16)
    assert before[0] == after[0]
    assert not set(before[1:]) & set(after[1:])


_OTHERS = {
    "model": dataclasses.replace(BASE, model="smollm2@sha256:01"),
    "engine": dataclasses.replace(BASE, engine="raw/2"),
    "positional": dataclasses.replace(BASE, positional="rope_theta=10000"),
    "adapter": dataclasses.replace(BASE, adapter="sha256:aa"),
    "adapter of other content": dataclasses.replace(BASE, adapter="sha256:ab"),
    "salt": dataclasses.replace(BASE, salt="x"),
    "dtype": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, dtype="bfloat16")),
    "block_tokens": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, block_tokens=32)),
    "num_kv_heads": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, num_kv_heads=6)),
    "num_layers": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, num_layers=60)),
    "head_dim": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, head_dim=128)),
}


# case A4 A5
def test_every_field_makes_another_namespace():
    digests = {namespace_digest(space, "t") for space in (BASE, *_OTHERS.values())}
    assert len(digests) == 1 + len(_OTHERS)
    assert namespace_digest(BASE, "t") == namespace_digest(dataclasses.replace(BASE), "t")


def test_no_field_is_left_out_of_the_digest():
    tags = {tag.decode() for tag, _value in BASE.canonical_fields()}
    named = {field.name for field in dataclasses.fields(Namespace)} - {"layout"}
    assert tags == named | {f"layout.{field.name}" for field in dataclasses.fields(KVLayout)} | {"layout.version"}


def test_tenants_are_apart():
    assert namespace_digest(BASE, "uid:1") != namespace_digest(BASE, "uid:2")


# case A3
@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_fields_never_run_into_each_other(salt, adapter, other_salt, other_adapter):
    one = namespace_digest(Namespace(model="m", layout=LAYOUT, salt=salt, adapter=adapter), "t")
    two = namespace_digest(Namespace(model="m", layout=LAYOUT, salt=other_salt, adapter=other_adapter), "t")
    assert (one == two) == ((salt, adapter) == (other_salt, other_adapter))


# case A3
def test_a_salt_is_not_an_adapter_of_the_same_text():
    def digest(**fields: str) -> NamespaceDigest:
        return namespace_digest(Namespace(model="m", layout=LAYOUT, **fields), "t")

    assert digest(salt="x") != digest(adapter="x")
    assert digest(salt="ab", adapter="c") != digest(salt="a", adapter="bc")
    # Texts that hold the names of fields, as they are hashed.
    assert digest(adapter="xsalty", salt="") != digest(adapter="x", salt="ysalt")
    # And their lengths: without that of a value one could hold the next field.
    field = "\4\0\0\0salt"
    assert digest(adapter=f"x{field}y", salt="") != digest(adapter="x", salt=f"y{field}")


@pytest.mark.parametrize("fields", [{"model": ""}, {"salt": "x" * 5000}, {"adapter": 3}])
def test_a_namespace_that_can_not_be(fields):
    with pytest.raises(InvalidRequest):
        dataclasses.replace(BASE, **fields)


def test_packed_hashes_come_back():
    hashes = chain_hashes(namespace_digest(BASE, "t"), encode_tokens(range(64)), 16)
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    with pytest.raises(InvalidRequest):
        unpack_hashes(b"x" * 33)
