"""`Landing`: nothing that a reply brings is lost, wherever its caller is interrupted.

A signal can raise between any two steps: after the daemon has answered and before the blocks are somebody's. So each
reply is put, in one step, where its asker made a place for it beforehand; the asker takes its blocks over in one step
too, and until then gives them back from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from kvd.block import HASH_NBYTES
from kvd.protocol.replies import Begun, Reply, Reserved
from kvd.protocol.requests import Begin, Request, Reserve, Retain
from kvd.protocol.wire import BLOCK_ID_NBYTES
from kvd_client.session.releases import releases

if TYPE_CHECKING:
    from kvd_client.session.link import Link


class Landing:
    """Where the replies to one verb's requests for blocks come down, one at a time. Every method from any thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._request: Request | None = None
        self._first: list[Reply | None] = []

    def awaits(self, request: Request) -> Request:
        """The request, to be yielded; its reply comes down here."""
        self._request, self._first = request, []
        self._link.landings[request.request_id] = self
        return request

    def receive(self, reply: Reply) -> None:
        """A transport has the reply, for the first time or again after an interruption."""
        if self._settle(reply) is None:
            self._undo(reply)

    def give_up(self) -> None:
        """Nobody took over what the last request brings: it goes back now, or when it comes."""
        reply = self._settle(None)
        if reply is not None:
            self._undo(reply)

    def _settle(self, word: Reply | None) -> Reply | None:
        """Which came first, the reply or None for giving up. Final."""
        # An append is one step, whatever threads and signals there are, and what stands first stays first.
        self._first.append(word)
        return self._first[0]

    def _undo(self, reply: Reply) -> None:
        if self._request is not None and self._link.lost is None:
            for answer in _opposite(self._link, self._request, reply):
                self._link.post(answer)


def _opposite(link: Link, request: Request, reply: Reply) -> Iterable[Request]:
    """What gives back that which a reply brought."""
    give_back = partial(releases, link.next_id, link.epoch)
    if isinstance(request, Begin) and isinstance(reply, Begun):
        cut = reply.num_cached * BLOCK_ID_NBYTES
        num_hash_bytes = reply.num_announced * HASH_NBYTES
        return give_back(
            request.cache,
            blocks=reply.blocks[:cut],
            reserved=reply.blocks[cut:],
            hashes=request.hashes[len(request.hashes) - num_hash_bytes :],
        )
    if isinstance(request, Reserve) and isinstance(reply, Reserved):
        return give_back(request.cache, reserved=reply.blocks)
    if isinstance(request, Retain) and isinstance(reply, Reserved):
        return give_back(request.cache, blocks=request.blocks, reserved=reply.blocks)
    return ()
