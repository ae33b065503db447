"""A machine with fake NVIDIA cards: the compiled driver, the folder that its processes share, and what it can be told.

Each machine has a copy of the library of its own: loading it anew is how one process gets a driver that was never
started.

Device memory is nameless memfds, so nothing is ever in /dev/shm and a killed process leaves nothing; who holds how much
is told by locks on empty files in the machine's folder, which the kernel drops with their holders. No card can read
another's memory (no P2P). What it does not copy: kernels, memory that contexts take for themselves, or work that goes
on by itself (asynchronous work is done within some later driver call of the same process). An importer must be allowed
to open /proc/<pid>/fd of the exporter: same user, or root.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    name: str
    uuid: str
    mib: int
    compute_capability: str
    display: bool = False

    def __str__(self) -> str:
        digits = self.uuid.removeprefix("GPU-").replace("-", "")
        return f"{self.name}|{digits}|{self.mib}|{self.compute_capability}|{int(self.display)}"


P40 = Card("Tesla P40", "GPU-a0b1c2d3-e4f5-0011-2233-445566778899", 64, "6.1")
RTX_3050 = Card("NVIDIA GeForce RTX 3050", "GPU-b7000000-0000-0000-0000-000000003050", 32, "8.6", display=True)

FOR_EVER_MS = -1
"""Asynchronous work stays undone until somebody waits for it."""


def build() -> Path:
    """The compiled driver, made once per state of its sources."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"kvd-fakecuda-{os.getuid()}-{digest}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "libcuda.so.1"
            subprocess.run(
                ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", made]
                + [source for source in sources if source.suffix == ".c"]
                + ["-lpthread"],
                check=True,
            )
            # Renamed within one folder, so that nobody ever loads half of it.
            partial = built.with_suffix(f".{os.getpid()}")
            shutil.copy(made, partial)
            partial.rename(built)
    return built


class FakeMachine:
    """`environ` is what a process on it needs."""

    def __init__(self, folder: Path, *cards: Card, delay_ms: int = FOR_EVER_MS) -> None:
        self.cards = cards or (P40, RTX_3050)
        self.state = folder / "fakecuda"
        self.state.mkdir()
        self._fired = self.state / "fired"
        self.library = folder / "libcuda.so.1"
        shutil.copy(build(), self.library)
        self.environ: Mapping[str, str] = {
            "KVD_LIBCUDA": str(self.library),
            "KVD_FAKECUDA_STATE": str(self.state),
            "KVD_FAKECUDA_DEVICES": ";".join(map(str, self.cards)),
            "KVD_FAKECUDA_DELAY_MS": str(delay_ms),
        }

    def _in_process(self) -> ctypes.CDLL:
        # The same file gives the very library that the code under test has loaded.
        return ctypes.CDLL(str(self.library))

    def fail(self, rules: str) -> None:
        """Injects errors into this process's driver: "cuMemAlloc_v2:2=2" (see fake.c); "" ends it.

        `fired` begins anew.
        """
        self._fired.unlink(missing_ok=True)
        self._in_process().fakecuda_fail(rules.encode())

    def fired(self) -> list[str]:
        """What rules did to calls of any process of the machine: "cuMemAlloc_v2:2=2" for code 2 in its second call.

        A test that injects an error asserts that it came: where the call is never made, nothing was tested.
        """
        return self._fired.read_text().splitlines() if self._fired.exists() else []

    def num_calls(self, function: str) -> int:
        """Calls of a driver function in this process since `forget_calls`."""
        count = self._in_process().fakecuda_calls
        count.restype = ctypes.c_long
        return int(count(function.encode()))

    def forget_calls(self) -> None:
        self._in_process().fakecuda_forget_calls()

    def end_of_process(self) -> int:
        """Does to this process's driver what its exit would; how many references to contexts it had left."""
        return int(self._in_process().fakecuda_end_of_process())

    def lose_card(self, number: int, code: int = 719) -> None:
        """From now on every call on that card fails, in every process, for good."""
        (self.state / f"lost.{number}").write_text(str(code))

    def held_nbytes(self, number: int = 0) -> int:
        """Memory of a card that living processes hold. Without asking any driver."""
        total = 0
        for line in _locked_files(self.state):
            _, card, _, nbytes = line.split(".")
            if int(card) == number:
                total += int(nbytes)
        return total


def _locked_files(folder: Path) -> set[str]:
    """Names of ledger files that somebody holds a lock on, as the kernel lists them."""
    inodes = {entry.inode(): entry.name for entry in os.scandir(folder) if entry.name.startswith("held.")}
    held = set()
    for line in Path("/proc/locks").read_text().splitlines():
        inode = int(line.split()[5 if "->" not in line else 6].rsplit(":", 1)[1])
        if inode in inodes:
            held.add(inodes[inode])
    return held
