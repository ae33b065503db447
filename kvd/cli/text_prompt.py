"""A plain text as a prompt of a transformers model: its token ids, and the namespace they are cached under.

Loads tokenizer and model from this machine only. Needs the `transformers` extra (and `gguf` for a GGUF file).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvd.cli.prompts import PromptFile
from kvd.cli.text import one_line
from kvd.errors import EngineUnsupported, InvalidRequest


def prompt_of_text(text: str, model: Path, salt: str) -> PromptFile:
    """The prompt. Raises `InvalidRequest` for a model that cannot be loaded, `EngineUnsupported` for one not served."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise EngineUnsupported("--model needs transformers: pip install kvd-daemon[transformers]") from error
    from kvd_client.engines.transformers import namespace

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    folder: Path = model
    options: dict[str, Any] = {"local_files_only": True}
    if model.is_file():
        folder, options = model.parent, {**options, "gguf_file": model.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"{model} cannot be loaded: {one_line(str(error)) or error!r}") from error
    return PromptFile(namespace(loaded.eval(), salt=salt), tokenizer(text)["input_ids"])
