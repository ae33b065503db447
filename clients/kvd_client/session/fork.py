"""fork(2): the child keeps no mapping, no descriptor and no session of its parent.

Mappings are MADV_DONTFORK, so the child has holes there (which may be in use for something else by now: it never
unmaps). Descriptors are closed here. ZeroMQ's own objects are not touched: pyzmq knows that they belong to the
parent.
"""

from __future__ import annotations

import os
import weakref

from kvd_client.session.link import Link

_links: weakref.WeakSet[Link] = weakref.WeakSet()
_guarded: list[Link] = []


def watch(link: Link) -> None:
    """From now on a forked child lets go of what `link` holds."""
    _links.add(link)


def _before() -> None:
    # Nobody maps while the process forks: between mmap and MADV_DONTFORK a child would inherit the mapping.
    _guarded.extend(link for link in list(_links) if link.guard.acquire_for_fork())


def _in_parent() -> None:
    while _guarded:
        _guarded.pop().guard.release_after_fork()


def _in_child() -> None:
    _guarded.clear()
    for link in list(_links):
        link.forget_in_child()
    _links.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
