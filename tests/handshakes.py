"""The listener's half of a handshake on a connection that a test made itself: it waits, as no holder does."""

from __future__ import annotations

from thinwire.errors import LostPeerError
from thinwire.holder.frames import Connection, Handshake


def welcome(connection: Connection, secret: bytes) -> None:
    """Wait until the caller has proven the secret. Raises ThinwireError for anybody else."""
    handshake, sock = Handshake(secret), connection._socket
    try:
        while handshake.wanted:
            data = sock.recv(handshake.wanted)
            if not data:
                raise LostPeerError("the caller has hung up")
            sock.sendall(handshake.feed(data))
    except OSError as error:
        raise LostPeerError(f"the caller is lost: {error}") from error
    connection._trust(handshake.tags, 1, 2)
