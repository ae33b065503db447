"""As `tests.support.serve`, but the loop hangs at its second turn, while the daemon's other threads go on."""

from __future__ import annotations

import itertools
import sys
import threading

import msgspec

from kvd.config.schema import Config
from kvd.daemon import serve
from kvd.server.server import Server

_turn = Server.turn


_num_turns = itertools.count()


def hang_at_the_second_turn(server: Server) -> None:
    if next(_num_turns):
        threading.Event().wait()
    _turn(server)


if __name__ == "__main__":
    Server.turn = hang_at_the_second_turn
    sys.exit(serve(msgspec.json.decode(sys.argv[1], type=Config)))
