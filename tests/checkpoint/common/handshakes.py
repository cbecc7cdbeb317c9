"""The listener's half of a handshake on a connection of its own, for tests that wait for one caller."""

from __future__ import annotations

import time

from thinwire.checkpoint.holder.frames import HANDSHAKE_SECONDS, Connection, Handshake


def welcome(connection: Connection, secret: bytes, seconds: float = HANDSHAKE_SECONDS) -> None:
    """Shake hands as the side that was connected to; a holder never waits like that (`Handshake`).

    Raises PeerError if the caller proves no line of ``secret``, LostPeerError if all of it takes longer than
    ``seconds``.
    """
    handshake, connection._deadline = Handshake(secret), time.monotonic() + seconds
    while handshake.wanted:
        answer = handshake.feed(connection._read(handshake.wanted))
        if answer:  # after its proof the caller may be gone
            with connection._lost_peer("send"):
                connection._socket.sendall(answer)
    connection._trust(handshake.tags, 1, 2)
    connection._deadline = None
