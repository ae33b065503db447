#!/usr/bin/env python3
"""Shows in under four minutes whether kvd's device pools work on this machine's NVIDIA card, and prints a table.

    make gpu-check            (or: .venv/bin/python tools/gpu_check.py [--device cuda:0])

It needs the checkout, kvd's own Python packages, and torch for the rows about tensors. It takes up to 1 GiB of the
card and gives it back. Run against the tests' fake driver it checks the checker:

    KVD_LIBCUDA=… KVD_FAKECUDA_STATE=… tools/gpu_check.py --device cuda:0

As of this version it has run against the fake driver only, not on hardware: rows of kind "code" compare what the
card's driver answers with what the fake answers, and say where the two differ.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "clients"), str(ROOT / "tools")]

from gpu_checks import codes, deaths, facts, latency, rounds, sharing, speed, tensors  # noqa: E402
from gpu_checks.bench import Bench  # noqa: E402
from gpu_checks.table import Row, Verdict, render  # noqa: E402

from kvd.errors import CudaError, KvdError  # noqa: E402
from kvd.memory.device import choose_device  # noqa: E402

LIMIT_S = 230
CHECKS = (
    ("facts", facts.check),
    ("sharing", sharing.check),
    ("tensors", tensors.check),
    ("codes", codes.check),
    ("rounds", rounds.check),
    ("speed", speed.check),
    ("latency", latency.check),
    ("deaths", deaths.check),
)


class OutOfTime(Exception):
    """The whole check took longer than its bound."""


def main() -> int:
    """0 when every row is as it must be, 1 when one is not, 11 when there is no card to check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help='"auto", "cuda:0" or "cuda:GPU-…"')
    wanted = parser.parse_args().device
    try:
        choice = choose_device(wanted)
    except KvdError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return error.exit_code
    if choice.driver is None or choice.device is None:
        print(f"gpu-check: nothing to check, {choice.reason}", file=sys.stderr)
        return CudaError.exit_code

    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(LIMIT_S)
    rows: list[Row] = []
    began_s = time.monotonic()
    with Bench(choice) as bench:
        for name, check in CHECKS:
            try:
                rows.extend(check(bench))
            except OutOfTime:
                rows.append(Row(name, "stopped", Verdict.WRONG, f"not done within {LIMIT_S} s"))
                break
            except Exception as error:  # noqa: BLE001 - torch's own among them; the other rows are worth having
                rows.append(Row(name, "stopped", Verdict.WRONG, f"{type(error).__name__}: {error}"))
    signal.alarm(0)
    print(render(rows, time.monotonic() - began_s))
    return int(any(row.verdict is Verdict.WRONG for row in rows))


def _out_of_time(_signal: int, _frame: FrameType | None) -> None:
    raise OutOfTime


if __name__ == "__main__":
    sys.exit(main())
