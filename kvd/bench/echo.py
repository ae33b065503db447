"""The limit of a request: a process that answers every message with itself, waiting as the daemon's loop does.

`python -m kvd.bench.echo ENDPOINT`: a ROUTER, two quiet sockets and an epoll descriptor in one ZeroMQ poller, as many
and of the kinds that the daemon watches, until standard input ends.
"""

from __future__ import annotations

import select
import sys

import zmq


def main(endpoint: str) -> None:
    """Serves until standard input ends."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(endpoint)
    watched = select.epoll()
    watched.register(sys.stdin.fileno(), select.EPOLLIN)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    for name in ("admission", "arrivals"):
        quiet = context.socket(zmq.PAIR)
        quiet.bind(f"inproc://{name}")
        poller.register(quiet, zmq.POLLIN)
    poller.register(watched.fileno(), zmq.POLLIN)
    print("ready", flush=True)
    while True:
        ready = dict(poller.poll())
        if router in ready:
            router.send_multipart(router.recv_multipart())
        if watched.fileno() in ready:
            break
    watched.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    main(sys.argv[1])
