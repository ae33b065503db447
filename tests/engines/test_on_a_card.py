"""A transformers cache whose blocks are on a card: the prefix in one part, the tail in another, and no copy."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvd_client
from kvd_client.engines.transformers import attach
from tests.client.homes import fake_machine
from tests.engines.tiny import greedy, prompt, tiny_model
from tests.support.daemon import running_daemon


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tokens_are_those_of_a_run_without_kvd(tmp_path: Path, attention: str) -> None:  # case E1
    model, ids = tiny_model(attention=attention), prompt(70)
    other = ids.clone()
    other[0, -5:] = 3
    with (
        fake_machine(tmp_path) as machine,
        running_daemon(tmp_path, budget="64MiB", segment="4MiB", machine=machine) as daemon,
        kvd_client.connect(daemon.folder) as client,
    ):
        with attach(client, model, ids) as cache:
            assert greedy(model, ids, 12, cache=cache).tolist() == greedy(model, ids, 12).tolist()
        with attach(client, model, other) as cache:
            assert cache.num_cached_tokens >= 48
            assert greedy(model, other, 12, cache=cache).tolist() == greedy(model, other, 12).tolist()
            assert len(cache.rows[0].parts(0)) == 2
            assert cache.num_copied_bytes == 0
        del cache
