"""What must be equal for one llama.cpp to read another's state: weights, build of the engine, options."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvd.errors import EngineUnsupported
from kvd_client.engines.files import file_digest

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_ENGINE_FILE = re.compile(r"llama|ggml|mtmd")


def weights_digest(model: Path) -> str:
    """Hexadecimal SHA-256 over all files of a GGUF model. Reads them whole the first time (about 1 GB/s).

    Raises `EngineUnsupported` when they cannot be read.
    """
    files = [model]
    if found := _SPLIT.search(model.name):
        stem, count = model.name[: found.start()], int(found[2])
        files = [model.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    digest = hashlib.sha256(b"kvd gguf weights 1")
    for file in files:
        try:
            digest.update(bytes.fromhex(file_digest(file)))
        except OSError as error:
            raise EngineUnsupported(
                f"the weights cannot be told apart from others: {file}: {error.strerror}"
            ) from error
    return digest.hexdigest()


def build_digest(pid: int | str = "self") -> str:
    """Hexadecimal SHA-256 over the code of llama.cpp that a process has loaded: its program and libraries.

    A version string would do for official builds, but not for one's own ("b0-unknown"). Raises `EngineUnsupported`.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
        paths = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "r-xp" in line and "/" in line}
        files = sorted((path for path in paths if _ENGINE_FILE.search(path.name)), key=lambda path: path.name)
        # The folder says nothing about the build, and two installations of one build have different ones.
        parts = [f"{path.name}\0{file_digest(path)}\0" for path in files]
    except OSError as error:
        raise EngineUnsupported(f"the build of llama.cpp cannot be told: {error}") from error
    if not parts:
        raise EngineUnsupported(f"process {pid} has loaded nothing that looks like llama.cpp")
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def options_digest(options: Iterable[str]) -> str:
    """Hexadecimal SHA-256 over options in their order; of those that name files (adapters), over their content too."""
    digest = hashlib.sha256(b"kvd llama.cpp options 1")
    for option in options:
        for piece in (option, *_contents(re.split(r"[,:=]", option) if option else ())):
            digest.update(f"{len(piece.encode())}:{piece}".encode())
    return digest.hexdigest()


def _contents(pieces: Sequence[str]) -> list[str]:
    try:
        return [f"content {file_digest(Path(piece))}" for piece in pieces if piece and Path(piece).is_file()]
    except OSError as error:
        raise EngineUnsupported(f"an option names a file that cannot be read: {error}") from error


def set_name(family: str, model: Path, *, weights: str, build: str, options: str) -> str:
    """The name of the set of blobs; `kvd status` shows its beginning, `kvd flush --model` takes it whole."""
    rest = hashlib.sha256(f"{build}\0{options}".encode()).hexdigest()
    return f"{family} {model.stem[:64]}@sha256:{weights}+{rest}"
