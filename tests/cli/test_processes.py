"""What psutil tells about a client."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from kvd.cli.processes import UNKNOWN, process, short_command


def test_this_process():
    seen = process(os.getpid(), connected_s=0)
    assert seen.private_nbytes
    assert "py" in seen.command


def test_a_process_that_ended_is_unknown():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process(child.pid, connected_s=0) == UNKNOWN


def test_a_process_younger_than_its_session_is_another_one():
    age = time.time() - psutil.Process().create_time()
    assert process(os.getpid(), connected_s=age + 3600) == UNKNOWN


def test_folders_are_left_out_of_a_command():
    assert short_command(["/usr/bin/python3", "/home/me/run.py", "/data/x"]) == "python3 run.py /data/x"
    assert short_command([]) == ""
