"""What users import. A name leaves or changes only with a word in CHANGELOG.md."""

from __future__ import annotations

import inspect

import pytest

import kvd_client
import kvd_client.aio

PUBLIC = {"Blobs", "Cache", "Client", "KVLayout", "Namespace", "Sequence", "connect"}


def test_the_client_library_offers_these_names():
    assert set(kvd_client.__all__) >= PUBLIC
    for name in kvd_client.__all__:
        assert hasattr(kvd_client, name)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_thing_is_documented(name):
    thing = getattr(kvd_client, name)
    assert inspect.getdoc(thing)
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        if not member.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("name", ["Blobs", "Client", "Cache", "Sequence"])
def test_both_clients_have_the_same_verbs(name):
    def verbs(thing: type) -> set[str]:
        return {member for member in dir(thing) if not member.startswith("_")}

    sync, twin = verbs(getattr(kvd_client, name)), verbs(getattr(kvd_client.aio, name))
    assert {verb.removeprefix("a") if verb == "aclose" else verb for verb in twin} == sync
