"""Whether torch's build has code for the card, and what to install when it has not."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cli.doctor_checks import PASCAL, serves


def what_to_install(version: str, arches: Sequence[str], capability: tuple[int, int]) -> str | None:
    """None where kernels of this torch run on the card, else a line that says so and names the command.

    `arches` is torch.cuda.get_arch_list(): torch itself only warns, and fails at the first kernel.
    """
    if serves(arches, capability):
        return None
    major, minor = capability
    wanted, url = ("'torch<2.15'", "CUDA 12.6") if capability in PASCAL else ("torch", "a CUDA that serves it")
    return (
        f"torch {version} has none for sm_{major}{minor}: .venv/bin/python -m pip install --force-reinstall {wanted} "
        f"--index-url URL (that of {url}, from https://pytorch.org/get-started; see docs/p40.md)"
    )
