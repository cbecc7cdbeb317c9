"""What one rank refuses, all ranks have to hear of: they would wait for it in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from thinwire.errors import ThinwireError
from thinwire.lane import Group, Lane
from thinwire.sync.channel import Subject


@contextmanager
def telling_peers(process_group: Group, timeout: timedelta | None) -> Iterator[None]:
    """Around checks of something that ranks read for themselves, before they agree on a configuration.

    A rank that raises ValueError here says why where the others open their conversation, who then raise MismatchError
    with the reason.
    """
    try:
        yield
    except ValueError as error:
        subject = Subject("attach", f"refused: {error}")
        lane = Lane(process_group, timeout)
        try:
            with suppress(ThinwireError):
                lane.submit(lambda lane: lane.channel(subject).open()).wait()
        finally:
            lane.close()
        raise
