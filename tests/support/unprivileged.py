"""Runs a function as a user without rights, in a child of this process."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable

NOBODY = 65534


def as_nobody(call: Callable[[], bool]) -> bool:
    """What `call` returns as uid 65534; False, and its traceback on stderr, when it raises.

    What it imports must be imported already: the interpreter may lie where that user cannot read.
    """
    with warnings.catch_warnings():
        # Newer interpreters warn of other threads, whose locks the child may find taken; the calls here need none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        held = False
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            held = call()
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            # Not through the interpreter's end: the parent's fixtures are not this child's to tear down.
            os._exit(0 if held else 1)
    _pid, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
