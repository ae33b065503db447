"""A client process steered over stdin: one JSON command a line, one JSON answer a line."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import torch

import kvd_client
from kvd.errors import KvdError
from kvd_client.session import opened_cache
from tests.client.kv import LAYOUT, MODEL, fill, holds


class Steered:
    def __init__(self, runtime_dir: str) -> None:
        self.client = kvd_client.connect(runtime_dir, label="worker")
        self.cache = self.client.cache(model=MODEL, layout=LAYOUT)
        self.sequences: list[kvd_client.Sequence] = []
        self.tensors: list[torch.Tensor] = []

    def begin(self, tokens: list[int], wait_s: float | None = None) -> int:
        self.sequences.append(self.cache.sequence(tokens, wait_s=wait_s))
        return self.sequences[-1].num_cached_tokens

    def publish(self, tokens: list[int], wait_s: float | None = None) -> int:
        self.begin(tokens, wait_s)
        return self.fill_and_commit()

    def fill_and_commit(self) -> int:
        fill(self.sequences[-1], self.sequences[-1].token_ids)
        return self.sequences[-1].commit()

    def holds(self) -> bool:
        seq = self.sequences[-1]
        return holds(seq, seq.token_ids, seq.num_tokens)

    def get_or_compute(self, tokens: list[int], wait_s: float | None = None) -> dict[str, Any]:
        """Says "computing", with the number of cached tokens, and computes once a line comes."""

        def compute(seq: kvd_client.Sequence) -> None:
            answer({"computing": seq.num_cached_tokens})
            sys.stdin.readline()
            fill(seq, tokens)

        seq = self.cache.get_or_compute(tokens, compute, wait_s=wait_s)
        self.sequences.append(seq)
        return {"cached": seq.num_cached_tokens, "right": holds(seq, tokens, len(tokens))}

    def keep_tensor(self) -> None:
        self.tensors += self.sequences[-1].layer(0)

    def close_sequence(self) -> None:
        self.sequences.pop().close()

    def where(self) -> list[str]:
        return [self.cache.device, self.cache.mode]

    def compute_elsewhere(self) -> list[str]:
        """From now on attends on another card than the pool's, though it sees both: the CPU is that other card."""
        opened_cache.shown_on = lambda _uuid: "cuda:0"
        self.cache = self.client.cache(model=MODEL, layout=LAYOUT, computes_on="cpu")
        return self.where()

    def num_driver_calls(self, function: str) -> int:
        """Of this process, to the fake driver."""
        return int(ctypes.CDLL(os.environ["KVD_LIBCUDA"]).fakecuda_calls(function.encode()))

    def num_parts(self) -> int:
        return len(self.sequences[-1].parts(0))

    def match(self, tokens: list[int]) -> int:
        return self.cache.match(tokens)


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    steered = Steered(sys.argv[1])
    answer("connected")
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        try:
            answer(getattr(steered, command.pop("do"))(**command))
        except KvdError as error:
            answer([type(error).__name__, str(error)])


if __name__ == "__main__":
    main()
