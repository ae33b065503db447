"""transformers: what one process has prefilled, the next one finds.

Start `kvd serve`, then run this twice (or in two terminals): `python clients/examples/transformers_shared.py`.
"""

from __future__ import annotations

import time

from kvd.cli.demo import documents
from kvd.cli.demo.model import encode_prompt, load_model, load_tokenizer
from kvd_client.engines.transformers import shared

model, tokenizer = load_model(), load_tokenizer()  # SmolLM2-135M; any causal language model of transformers will do
input_ids = encode_prompt(tokenizer, documents.read("pump")[:4000], "How much does the pump weigh?")

with shared(model) as statistics:  # the one line
    start = time.perf_counter()
    output = model.generate(input_ids, max_new_tokens=1, do_sample=False)
    taken_s = time.perf_counter() - start

print(
    f"first token after {taken_s:.2f} s: {statistics.num_cached_tokens} of {statistics.num_prompt_tokens} prompt "
    f"tokens were there{': ' * bool(statistics.last_reason)}{statistics.last_reason}"
)
