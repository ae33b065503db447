"""The ZeroMQ ROUTER that requests arrive on, with every option that keeps a bad peer from harming the rest."""

from __future__ import annotations

import contextlib
import ctypes
import os

import zmq

from kvd.errors import RuntimeFolderError
from kvd.protocol.wire import MAX_MESSAGE_NBYTES
from kvd.server.admission import ZAP_DOMAIN

HANDSHAKE_TIMEOUT_S = 5
BACKLOG = 128
"""Connections that libzmq may accept in one go before `arrivals` has looked at any of them."""


def seed_libzmq() -> None:
    """Makes the routing ids that libzmq invents unpredictable. Call it before the first ZeroMQ socket of the process.

    libzmq takes the first of them from rand(3), which nobody seeds (or posix_ipc does, with the time in seconds), and
    aborts when a peer has already claimed the id it is about to give out.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


def bind_router(context: zmq.Context[zmq.Socket[bytes]], path: str, *, credits: int) -> zmq.Socket[bytes]:
    """A ROUTER bound to ipc://path. Raises `RuntimeFolderError`.

    Replies to a client that has gone fail (ROUTER_MANDATORY) instead of vanishing; a client that keeps to its credits
    never meets a high-water mark, and one that does not is held up in its own queue.
    """
    with contextlib.ExitStack() as undo:
        router = context.socket(zmq.ROUTER)
        # Whatever goes wrong: a socket left open keeps the context's end waiting for ever.
        undo.callback(router.close)
        router.linger = 0
        router.router_mandatory = True
        router.maxmsgsize = MAX_MESSAGE_NBYTES
        router.sndhwm = router.rcvhwm = 2 * credits
        router.zap_domain = ZAP_DOMAIN
        router.handshake_ivl = HANDSHAKE_TIMEOUT_S * 1000
        router.backlog = BACKLOG
        try:
            router.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise RuntimeFolderError(f"cannot make the socket {path}: {os.strerror(error.errno or 0)}") from error
        undo.pop_all()
    return router
