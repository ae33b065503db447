"""SmolLM2-135M as transformers has unpacked it, once on this machine for all tests that are not about GGUF files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import transformers

from kvd.bench.smollm2 import model_file
from kvd.cli.demo import model


def load() -> tuple[Any, Any]:
    """Model and tokenizer."""
    weights = model_file().stat()
    name = f"kvd-smollm2-{os.getuid()}-{transformers.__version__}-{weights.st_size}-{weights.st_mtime_ns}"
    folder = Path(tempfile.gettempdir()) / name
    model.unpack(folder)
    return model.load_model(folder), model.load_tokenizer(folder)
