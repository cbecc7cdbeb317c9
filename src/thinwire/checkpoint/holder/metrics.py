"""The figures of a holder's status as Prometheus text, over HTTP."""

from collections.abc import Callable, Iterable
from typing import Any

from thinwire.errors import CorruptMessageError

_MAX_REQUEST_BYTES = 8192
_HOLDER = (
    ("uptime_seconds", "gauge", "Seconds since the holder started", lambda s: s["uptime_seconds"]),
    ("budget_bytes", "gauge", "Limit of all slots together", lambda s: s["budget_bytes"]),
    ("used_bytes", "gauge", "Bytes of all slots", lambda s: s["used_bytes"]),
    ("replication_bytes_total", "counter", "Payload sent to peers as replicas", lambda s: s["bytes_sent"]),
    ("received_bytes_total", "counter", "Payload of replicas that came from peers", lambda s: s["bytes_received"]),
    ("served_bytes_total", "counter", "Payload read by peers that recover", lambda s: s["bytes_served"]),
    ("fetched_bytes_total", "counter", "Payload fetched from peers to recover", lambda s: s["bytes_fetched"]),
    ("scrubbed_bytes_total", "counter", "Bytes of versions reread in idle time", lambda s: s["bytes_scrubbed"]),
    ("damaged_versions_total", "counter", "Versions that were altered in memory, found by rereading",
     lambda s: s["damaged_versions"]),
    ("refused_connections_total", "counter", "Connections refused or closed for what they said, or failed to say",
     lambda s: s["refused_connections"]),
    ("trainer_connections", "gauge", "Connections of processes on this host", lambda s: s["connections"]["trainer"]),
    ("peer_connections", "gauge", "Connections of other holders", lambda s: s["connections"]["peer"]),
    ("unauthenticated_connections", "gauge", "Connections that have proven no secret yet",
     lambda s: s["connections"]["unauthenticated"]),
    ("socket_available", "gauge", "0 if trainers cannot reach the holder because its socket is gone",
     lambda s: int(not s["socket_error"])),
)  # fmt: skip
_SHARD = (
    ("versions", "gauge", "Complete versions of the shard on this host", lambda s: len(s["versions"])),
    ("slot_bytes", "gauge", "Bytes of the shard's slots", lambda s: s["slot_bytes"]),
    ("newest_step", "gauge", "Step of the newest complete version on this host", lambda s: s["newest_local"]),
    ("newest_age_seconds", "gauge", "Seconds since that version was complete", lambda s: s["newest_age_seconds"]),
    ("newest_replicated_step", "gauge", "Step of the newest version that all replicas have",
     lambda s: s["newest_replicated"] if s["role"] == "own" else None),
    ("newest_replicated_age_seconds", "gauge", "Seconds since that version was complete on this host",
     lambda s: s["newest_replicated_age_seconds"] if s["role"] == "own" else None),
    ("pending_bytes", "gauge", "Bytes still to be sent to peers", lambda s: s["bytes_pending"]),
    ("dropped_versions_total", "counter", "Versions that a peer did not take in time", lambda s: s["dropped"]),
    ("trainer_connected", "gauge", "1 while the shard's trainer is connected", lambda s: int(s["trainer"])),
)  # fmt: skip


def prometheus_text(status: dict[str, Any]) -> str:
    """Return ``Holder.status()`` in Prometheus's text format 0.0.4; a figure that is not there yet has no line.

    Names end in their unit, and in ``_total`` if they only grow. Source: prometheus.io, "Exposition formats".
    """
    lines: list[str] = []
    for name, kind, text, value in _HOLDER:
        lines += _family(name, kind, text, [("", value(status))])
    shards = [(_labels(shard), shard) for shard in status["shards"]]
    for name, kind, text, value in _SHARD:
        lines += _family(name, kind, text, [(labels, value(shard)) for labels, shard in shards])
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, Any]]) -> list[str]:
    name = f"thinwire_holder_{name}"
    lines = [f"{name}{labels} {value}" for labels, value in samples if value is not None]
    return [f"# HELP {name} {text}.", f"# TYPE {name} {kind}", *lines] if lines else []


def _labels(shard: dict[str, Any]) -> str:
    of = shard["shard"]
    named = {"run": of["run_id"], "topology": of["topology"], "owner": of["owner"], "role": shard["role"]}
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in named.items()) + "}"


def _escaped(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # a run may be named with half a surrogate pair
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class HttpRequest:
    """One request for `/metrics` or a probe's path, as the preamble of a connection that ends with the answer."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status, self._data = status, b""
        self.wanted = _MAX_REQUEST_BYTES

    def feed(self, data: bytes) -> bytes:
        """Return the answer once the request is complete. Raises CorruptMessageError if it is too long."""
        self._data += data
        self.wanted -= len(data)
        if b"\r\n\r\n" not in self._data:
            if not self.wanted:
                raise CorruptMessageError("a request of more than 8 KiB")
            return b""
        self.wanted = 0
        method, _, rest = self._data.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return _answer("405 Method Not Allowed", "only GET\n")
        if path in _PROBES:
            problem = _PROBES[path](self._status())
            return _answer("503 Service Unavailable" if problem else "200 OK", f"{problem or 'ok'}\n")
        if path == b"/metrics":
            return _answer("200 OK", prometheus_text(self._status()))
        return _answer("404 Not Found", "see /metrics, /healthz, /livez and /readyz\n")


def _not_replicated(status: dict[str, Any]) -> str:
    """Return which shards would be lost with this host; a version that is still being sent has an older copy."""
    own = [shard for shard in status["shards"] if shard["role"] == "own" and shard["versions"]]
    alone = [shard["shard"] for shard in own if shard["newest_replicated"] is None]
    return ", ".join(f"shard {of['owner']} of run {of['run_id']!a} has no copy" for of in alone)


_PROBES: dict[bytes, Callable[[dict[str, Any]], str]] = {
    b"/healthz": lambda status: str(status["socket_error"]),
    b"/livez": lambda status: "",
    b"/readyz": lambda status: str(status["socket_error"]) or _not_replicated(status),
}


def _answer(status: str, text: str) -> bytes:
    body = text.encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
