"""Events of a step on named tracks, as a Chrome trace that opens in https://ui.perfetto.dev.

Predicted and measured steps have the same form, so that they lie side by side as two processes of one file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One piece of work on a track.

    Args:
        name: name of the work, such as "encode group 3".
        track: name of its worker: "compute", "channel", a thread. Events of one track do not overlap, or are nested.
        start_seconds: start on the clock of its process.
        seconds: duration.
        arguments: JSON values that a click on it shows.
    """

    name: str
    track: str
    start_seconds: float
    seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


def chrome_trace(processes: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Return a trace for `json.dump`: one process per item, tracks as its threads, times in microseconds.

    Processes and tracks keep their order of appearance; events are in order of time. Each process starts at 0, so
    that steps can be compared.

    Raises:
        ValueError: an event of negative length, or a time that is not finite.

    Example:
        >>> trace = chrome_trace({"predicted": [Event("backward", "compute", 0.0, 0.5)]})
        >>> [event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
        [500000.0]
    """
    records: list[dict[str, Any]] = []
    for process, (name, events) in enumerate(processes.items(), 1):
        tracks = {track: number for number, track in enumerate(dict.fromkeys(event.track for event in events), 1)}
        records += _names(process, name, tracks)
        records += _works(process, events, tracks)
    return {"displayTimeUnit": "ms", "traceEvents": records}


def _names(process: int, name: str, tracks: Mapping[str, int]) -> list[dict[str, Any]]:
    def record(kind: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}

    records = [record("process_name", 0, {"name": name}), record("process_sort_index", 0, {"sort_index": process})]
    for track, thread in tracks.items():
        records.append(record("thread_name", thread, {"name": track}))
        records.append(record("thread_sort_index", thread, {"sort_index": thread}))
    return records


def _works(process: int, events: Sequence[Event], tracks: Mapping[str, int]) -> list[dict[str, Any]]:
    origin = min((event.start_seconds for event in events), default=0.0)
    records = []
    for event in sorted(events, key=lambda event: (event.start_seconds, -event.seconds)):
        start, seconds = 1e6 * (event.start_seconds - origin), 1e6 * event.seconds
        if not (0 <= start < float("inf") and 0 <= seconds < float("inf")):
            raise ValueError(f"{event.name!r} starts at {event.start_seconds} s and takes {event.seconds} s: no event")
        about = {"name": event.name, "pid": process, "tid": tracks[event.track], "args": dict(event.arguments)}
        records.append({"ph": "X", **about, "ts": start, "dur": seconds})
    return records
