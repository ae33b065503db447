"""What a request's KV depends on beside the model and its tokens: adapter, salt, pictures."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd_client.engines.files import file_digest

_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt"})


@dataclass(frozen=True, slots=True)
class Variant:
    """Fields of a `kvd.hashing.Namespace`. Blocks are shared between requests of the same variant only."""

    adapter: str = ""
    salt: str = ""


class Variants:
    """Tells requests' variants. One thread."""

    def __init__(self) -> None:
        self._adapters: dict[int, tuple[str, str | None]] = {}
        """Id of an adapter -> its path, and its content when it was first seen; None once it is known to be unsure."""

    def of(self, request: Any) -> Variant | None:
        """The variant of a vLLM request; None when what its KV depends on cannot be told."""
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            return None  # the ids stand for nothing
        adapter = ""
        if request.lora_request is not None:
            digest = self._adapter(request.lora_request)
            if digest is None:
                return None
            adapter = f"sha256:{digest}"
        return Variant(adapter, _salt(request.cache_salt, request.mm_features))

    def _adapter(self, lora: Any) -> str | None:
        """Digest of an adapter's files, None when they are not the ones that vLLM has loaded."""
        number, path = lora.lora_int_id, lora.lora_path
        digest = None if lora.load_inplace else folder_digest(Path(path))
        known = self._adapters.setdefault(number, (path, digest))
        if known != (path, digest):
            # vLLM may have loaded the old files or the new ones; nobody can tell which.
            self._adapters[number] = (path, None)
        return self._adapters[number][1]


def folder_digest(folder: Path) -> str | None:
    """SHA-256 over names and contents of an adapter's files; None where there are none to read."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.name[0] != ".")
        parts = [f"{path.name}\0{file_digest(path)}\0" for path in files]
    except OSError:
        return None
    if not any(path.suffix != ".json" for path in files):
        return None
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _salt(cache_salt: str | None, mm_features: Any) -> str:
    """Empty for plain text without a salt. What a placeholder token stands for is told by its item's hash alone."""
    if not cache_salt and not mm_features:
        return ""
    items = [
        [item.modality, item.identifier, item.mm_hash, item.mm_position.offset, item.mm_position.length]
        for item in mm_features
    ]
    text = json.dumps({"salt": cache_salt or "", "items": items})
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
