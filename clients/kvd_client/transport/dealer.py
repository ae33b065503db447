"""The DEALER socket of a session, set up the same way by both transports."""

from __future__ import annotations

from typing import Any

import zmq

from kvd.protocol.session import REQUEST_SOCKET
from kvd_client.session.link import Link


def connect(dealer: zmq.Socket[Any], link: Link) -> None:
    """Connects for `link`; the routing id is the session's token, or the daemon drops every message."""
    dealer.setsockopt(zmq.ROUTING_ID, link.token)
    dealer.setsockopt(zmq.LINGER, 0)
    # Another daemon at this address is another session: never reconnect under the old token.
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.connect(f"ipc://{link.runtime_dir / REQUEST_SOCKET}")
