"""A vLLM engine in a process of its own, told what to do by lines of JSON. `Engine` is the test's end of it.

The engine's own steps run in that process too (no multiprocessing), so that a fault can be put at an exact place: a
*trap* does something to the daemon just before the connector does what it is about to do.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_BOUND_S = 300.0
ANSWER_BOUND_S = 120.0
TEST_BOUND_S = START_BOUND_S + 3 * ANSWER_BOUND_S
"""Of a whole test: the first one waits until five engines have started side by side."""
BLOCK_SIZE = 32

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "2000",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'clients'}",
}


class Engine:
    """Starts at once, and takes its time; the first call waits for it."""

    def __init__(self, model: Path, runtime_dir: Path, log: Path, **arguments: Any) -> None:
        """`arguments` of `vllm.LLM`; `connector` among them are settings of ours, None for an engine without it."""
        self._log = log
        arguments = {"connector": {"runtime_dir": str(runtime_dir)}} | arguments
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine", str(model), json.dumps(arguments)],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                bufsize=0,  # what a buffer had read already, select would not see
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._started = False

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self) -> Any:
        if not self._started:
            self._answer(START_BOUND_S)
            self._started = True
        return self._answer(ANSWER_BOUND_S)

    def call(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.answer()

    def generate(self, *prompts: list[int], **arguments: Any) -> dict[str, Any]:
        """`tokens` and `cached`, a list each; what was `loaded` and `saved` in tokens; `faults` by kind.

        Everything that was to be saved is saved when it returns. `salt`, `lora` (a folder) and `num_new` are for all.
        """
        return self.call("generate", prompts=prompts, **arguments)

    def _answer(self, bound_s: float) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], bound_s)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise AssertionError(f"the engine gave no answer:\n{self.log()[-6000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{self.log()[-6000:]}")
        return answer["result"]


class Inside:
    """What runs in the engine's process."""

    here: Inside

    def __init__(self, model: str, connector: dict[str, Any] | None, **arguments: Any) -> None:
        from vllm import LLM

        from kvd_client.engines.vllm import kvd_transfer_config

        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 64,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "disable_log_stats": True,
        }
        if connector is not None:
            defaults["kv_transfer_config"] = kvd_transfer_config(**connector)
        self.llm = LLM(model, **(defaults | arguments))
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.connector = self.scheduler.connector
        self.worker: Any = None
        if connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.worker = get_kv_transfer_group()
        self._loras: dict[str, int] = {}
        Inside.here = self
        self._count_preemptions()

    def generate(
        self,
        prompts: list[list[int]],
        *,
        num_new: int = 6,
        salt: str | None = None,
        lora: str | None = None,
        trap: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        before = self._counts()
        requests = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        request = None
        if lora is not None:
            request = LoRARequest(Path(lora).name, self._loras.setdefault(lora, len(self._loras) + 1), lora)
        spring = _set_trap(**trap) if trap else None
        try:
            outputs = self.llm.generate(
                requests,
                SamplingParams(temperature=0, detokenize=False, ignore_eos=True, max_tokens=num_new),
                lora_request=request,
                use_tqdm=False,
            )
            self.settle()
        finally:
            sprung = spring() if spring else None
        after = self._counts()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "loaded": after["loaded"] - before["loaded"],
            "saved": after["saved"] - before["saved"],
            "faults": dict(after["faults"] - before["faults"]),
            "preempted": after["preempted"] - before["preempted"],
            "sprung": sprung,
        }

    def _counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = {"loaded": 0, "saved": 0, "preempted": self._num_preempted, "faults": Counter()}
        if self.worker is not None:
            counts |= {"loaded": self.worker.num_tokens_loaded, "saved": self.worker.num_tokens_saved}
            counts["faults"] = self.connector.faults + self.worker.faults
        return counts

    def _count_preemptions(self) -> None:
        preempt, self._num_preempted = self.scheduler._preempt_request, 0

        def counted(*positional: Any, **named: Any) -> None:
            self._num_preempted += 1
            preempt(*positional, **named)

        self.scheduler._preempt_request = counted

    def settle(self) -> None:
        """Runs the engine until nothing is left to do, and waits for what is being saved."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            self.llm.llm_engine.step()
        side = self.worker._worker if self.worker is not None else None
        if side is not None:
            side._saves._thread.submit(lambda: None).result(ANSWER_BOUND_S)

    def forget(self) -> bool:
        """vLLM's own prefix cache."""
        return bool(self.llm.reset_prefix_cache())

    def reset(self) -> bool:
        """vLLM's own and kvd's."""
        return bool(self.llm.llm_engine.reset_prefix_cache(reset_connector=True))

    def reason(self) -> str:
        return str(self.connector.reason)

    def corrupt(self, tokens: list[int]) -> None:
        """Flips a byte of a block that kvd holds for these tokens, the second one. This engine has saved it."""
        saving = self.worker._worker._saving
        cache = saving.cache(saving._connected(), self.plain_namespace())
        with cache.sequence(tokens, len(tokens), attach_all=True, announce=False) as sequence:
            block = sequence._core.block_at(1)
            (run,) = sequence._core._cache.memory.runs([block], writable=True)
            (byte,) = os.pread(run.fd, 1, run.offset + 1000)
            os.pwrite(run.fd, bytes([byte ^ 64]), run.offset + 1000)

    def end_pause(self) -> None:
        """As if the time had passed for which a daemon that was not there is left alone."""
        worker = self.worker._worker
        for daemon in (self.connector._scheduler._daemon, worker._loading, worker._saving):
            daemon._not_before_s = float("-inf")

    def plain_namespace(self) -> Any:
        from kvd_client.engines.vllm.names import Variant

        return self.connector._scheduler._names.namespace(0, Variant())

    def namespace(self) -> dict[str, Any]:
        """What names the KV of plain requests."""
        namespace = self.plain_namespace()
        return {"model": namespace.model, "block_tokens": namespace.layout.block_tokens, "text": str(namespace)}


def _set_trap(at: str, do: str, **arguments: Any) -> Callable[[], int]:
    """Does something just before the connector does `at`; returns what takes it away and says how often it sprang."""
    from kvd_client.engines.vllm.saves import Saves
    from kvd_client.engines.vllm.scheduler import SchedulerSide
    from kvd_client.engines.vllm.slabs import Slabs
    from kvd_client.engines.vllm.worker import WorkerSide

    owner, name = {
        "match": (SchedulerSide, "num_matched"),
        "load": (WorkerSide, "_copy_in"),
        "copy_in": (Slabs, "copy_in"),
        "save": (WorkerSide, "_copy_out"),
        "copy_out": (Slabs, "copy_out"),
        "seal": (Saves, "copied"),
    }[at]
    real = getattr(owner, name)
    sprung = 0

    def instead(*positional: Any, **named: Any) -> Any:
        nonlocal sprung
        if not sprung:
            sprung += 1
            _ACTIONS[do](**arguments)
        return real(*positional, **named)

    setattr(owner, name, instead)

    def take_away() -> int:
        setattr(owner, name, real)
        return sprung

    return take_away


def _kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    os.kill(pid, 9)
    select.select([pidfd], [], [], 30)
    os.close(pidfd)


def _flush(runtime_dir: str) -> None:
    import kvd_client

    with kvd_client.connect(runtime_dir) as client:
        client.flush()


def _shorten(tokens: list[int], num_kept: int) -> None:
    """Has kvd forget everything, and gives it the first blocks of a prompt again."""
    import kvd_client

    worker = Inside.here.worker._worker
    with kvd_client.connect(worker._settings.runtime_dir) as client:
        cache = worker._loading.cache(client, Inside.here.plain_namespace())
        kept = tokens[:num_kept]
        with cache.sequence(kept, num_kept, attach_all=True) as sequence:
            content = bytes(sequence.buffer(0, num_kept))
        client.flush()
        with cache.sequence(kept, num_kept) as sequence:
            sequence.buffer(0, num_kept)[:] = content
            sequence.advance(num_kept)
            sequence.commit()


_ACTIONS: dict[str, Callable[..., None]] = {"kill": _kill, "flush": _flush, "shorten": _shorten}


def main() -> None:
    # vLLM, and what it runs, prints to descriptor 1.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, arguments = sys.argv[1], json.loads(sys.argv[2])
    started_s = time.monotonic()
    inside = Inside(model, **arguments)
    print(json.dumps({"result": time.monotonic() - started_s}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            result = getattr(inside, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001
            import traceback

            traceback.print_exc()
            print(json.dumps({"error": repr(error)}), file=answers)
        else:
            print(json.dumps({"result": result}), file=answers)


if __name__ == "__main__":
    main()
