"""One inference process of the demo: `python -m kvd.cli.demo.worker RUNTIME_DIR DOCUMENT QUESTION LABEL UNPACKED`.

An ordinary client of the daemon. The first one unpacks the model into the folder UNPACKED, for all of them. Tells its
events on standard output and takes its cues from standard input.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd.cli.demo import documents, model
from kvd.cli.demo.events import Answered, Checked, Event, Loading, Ready, encode

MAX_WAIT_S = 120.0
"""For a prefill that another process has under way, on a slow machine."""
WARM_UP_TOKENS = 32
"""A first pass finds cold pages and makes kernels; every time told here is that of a process in use."""


class _FirstToken:
    """A streamer that notes when the first generated token came."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.at_s = 0.0

    def put(self, _tokens: object) -> None:
        # generate puts the prompt first.
        self._num_puts += 1
        if self._num_puts == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to show."""


def main(runtime_dir: str, document: str, question: str, label: str, unpacked: str) -> None:
    """Loads, answers, checks; one step for each cue."""
    text = documents.read(document)
    tell = _event_stream()
    folder = Path(unpacked)
    stages = iter(("starting torch", "unpacking the model", "loading the weights", "naming the weights", "warming up"))

    def next_stage(num_done: int) -> None:
        tell(Loading(stage=next(stages), num_done=num_done, num_stages=5))

    next_stage(0)
    import kvd_client
    from kvd_client.engines.transformers import attach, namespace

    next_stage(1)
    model.unpack(folder)
    tokenizer = model.load_tokenizer(folder)
    input_ids = model.encode_prompt(tokenizer, text, question)
    next_stage(2)
    llm = model.load_model(folder)
    next_stage(3)
    namespace(llm)
    next_stage(4)
    _generate(llm, input_ids[:, :WARM_UP_TOKENS], None)
    with kvd_client.connect(runtime_dir, label=label) as client:
        tell(Ready(session=client.session_id, num_prompt_tokens=input_ids.shape[1]))
        if not _cued("ask"):
            return
        started_s = time.perf_counter()
        with attach(client, llm, input_ids, wait_s=MAX_WAIT_S) as cache:
            attached_s = time.perf_counter()
            output, first_token_s = _generate(llm, input_ids, cache)
            tell(
                Answered(
                    num_cached_tokens=cache.num_cached_tokens,
                    num_copied_bytes=cache.num_copied_bytes,
                    attach_s=attached_s - started_s,
                    first_token_s=first_token_s - started_s,
                    text=tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True).strip(),
                )
            )
            if not _cued("check"):
                return
            control, control_s = _generate_alone(llm, input_ids, cache.num_cached_tokens)
            tell(Checked(first_token_s=control_s, is_equal=control.tolist() == output.tolist()))
            _cued("stop")


def _generate(llm: Any, input_ids: Any, cache: Any) -> tuple[Any, float]:
    """The greedy output ids and when the first of them came."""
    streamer = _FirstToken()
    output = llm.generate(
        input_ids, cache=cache, max_new_tokens=model.MAX_NEW_TOKENS, do_sample=False, streamer=streamer
    )
    return output, streamer.at_s


def _generate_alone(llm: Any, input_ids: Any, num_cached: int) -> tuple[Any, float]:
    """Output ids and seconds to the first token without kvd.

    The prompt is computed in the same two parts, prefix and rest: matrices of other shapes round otherwise, so only
    then can every bit be equal.
    """
    import torch
    from transformers import DynamicCache

    started_s = time.perf_counter()
    cache = DynamicCache(config=llm.config)
    if num_cached:
        with torch.no_grad():
            llm(input_ids[:, :num_cached], cache=cache, logits_to_keep=1)
    output, first_token_s = _generate(llm, input_ids, cache)
    return output, first_token_s - started_s


def _event_stream() -> Callable[[Event], None]:
    """What writes events to standard output. Everything else that is printed goes to standard error from now on."""
    handle = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: Event) -> None:
        os.write(handle, encode(event))

    return tell


def _cued(word: str) -> bool:
    """Whether the next line is this cue; False at the end of input, when nobody listens any more."""
    return sys.stdin.readline().strip() == word


if __name__ == "__main__":
    main(*sys.argv[1:])
