"""The requests that only blobs need: the last of many keys that exists, and forgetting one blob."""

from __future__ import annotations

from kvd.blobs import is_blob_engine
from kvd.errors import InvalidRequest
from kvd.hashing import unpack_hashes
from kvd.protocol import requests
from kvd.protocol.replies import Forgotten, FoundLast, Reply
from kvd.service.attempts import AnswerAttempt
from kvd.service.below import Below, LastSearch
from kvd.service.progress import Progress
from kvd.service.sessions import Session


class BlobVerbs:
    """Each returns its reply, or None when that comes later. They work without a tier below, too."""

    def __init__(self, below: Below | None, progress: Progress, epoch: int) -> None:
        self._below = below
        self._progress = progress
        self._epoch = epoch

    def find_last(self, session: Session, request: requests.FindLast) -> Reply | None:
        """See `kvd.protocol.requests.FindLast`."""
        cache = session.cache(request.cache)
        hashes = unpack_hashes(request.hashes)
        search = LastSearch(cache.pool, hashes) if self._below is None else self._below.find_last(cache, hashes)

        def answer() -> Reply:
            return FoundLast(request.request_id, self._epoch, search.place)

        if search.number is None:
            return answer()
        self._progress.wait_below(AnswerAttempt(session, cache, request, answer), search.number)
        return None

    def forget(self, session: Session, request: requests.Forget) -> Reply | None:
        """See `kvd.protocol.requests.Forget`."""
        cache = session.cache(request.cache)
        hashes = unpack_hashes(request.hashes)
        if not is_blob_engine(cache.namespace.words.engine):
            # Keys and values of a prompt may be in use by everybody who shares the namespace.
            raise InvalidRequest("single blocks can be forgotten in a namespace of blobs only; flush the namespace")
        self._progress.blocks_came_back = True
        if self._below is None or not request.below:
            return Forgotten(request.request_id, self._epoch, cache.pool.forget(cache.namespace, hashes))
        num_blocks, number = self._below.forget(cache, hashes)
        reply = Forgotten(request.request_id, self._epoch, num_blocks)
        self._progress.wait_below(AnswerAttempt(session, cache, request, lambda: reply), number)
        return None
