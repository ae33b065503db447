"""What signals do once the daemon no longer looks at them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from kvd.daemon.signals import HANDLED, Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_at_the_end_of_a_stop_changes_nothing(number: signal.Signals):
    code = (
        "import os, select\n"
        "from kvd.daemon.signals import HANDLED, Signals\n"
        "with Signals() as signals:\n"
        f"    os.kill(os.getpid(), {number:d})\n"
        "    select.select([signals], [], [], 10)\n"
        f"    assert signals.take() == [{number:d}]\n"
        "for number in HANDLED:\n"
        "    os.kill(os.getpid(), number)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_stop_signals_do_what_they_did_before():
    before = [signal.getsignal(number) for number in HANDLED]
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert select.select([signals], [], [], 10)[0]
        assert signals.take() == [signal.SIGHUP]
        assert signals.take() == []
    assert [signal.getsignal(number) for number in HANDLED] == before
