"""A file cache of measured speeds, one file per setting: links and compressors are measured once on a machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.lab.missing import cache_home
from thinwire.lab.planning.speeds import Codec, MeasuredLink

_VERSION = 3


@dataclass(frozen=True)
class Setting:
    """All that measured speeds depend on; any other setting is measured for itself.

    Args:
        host: name of the machine of rank 0.
        device: name of the device of the model.
        torch: version of torch.
        world_size: number of ranks.
        link: name of the link between ranks: an address, an interface, an emulated rate.
        threads: number of threads of a rank.
    """

    host: str
    device: str
    torch: str
    world_size: int
    link: str
    threads: int

    @classmethod
    def here(cls, device: torch.device, world_size: int, link: str = "") -> Setting:
        """Return the setting of this process; ``link`` is by default the address at which its ranks meet."""
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(platform.node(), name, torch.__version__, world_size, link or address, torch.get_num_threads())

    def path(self) -> Path:
        """Return the path of its file in $XDG_CACHE_HOME/thinwire, by default ~/.cache/thinwire."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_home() / "thinwire" / f"speeds-{digest[:16]}.json"


@dataclass(frozen=True)
class Speeds:
    """The measured speeds of a setting: its link, or None if not measured, and its codecs."""

    link: MeasuredLink | None = None
    codecs: tuple[Codec, ...] = ()

    def codec(self, compressor: str, exchange: str) -> Codec | None:
        known = (codec for codec in self.codecs if (codec.compressor, codec.exchange) == (compressor, exchange))
        return next(known, None)

    def having(self, codecs: Sequence[Codec], link: MeasuredLink) -> Speeds:
        """Return a copy with ``link`` and ``codecs``, which replace codecs of the same compressor and exchange."""
        newer = {(codec.compressor, codec.exchange) for codec in codecs}
        kept = (codec for codec in self.codecs if (codec.compressor, codec.exchange) not in newer)
        return Speeds(link, (*kept, *codecs))

    def to_json(self) -> dict[str, Any]:
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: object) -> Speeds:
        """Parse `to_json`; anything not understood gives empty speeds, to be measured again."""
        if not isinstance(data, Mapping) or data.get("version") != _VERSION:
            return cls()
        try:
            link = None if data["link"] is None else MeasuredLink.from_json(data["link"])
            return cls(link, tuple(Codec.from_json(codec) for codec in data["codecs"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()


def load(setting: Setting) -> Speeds:
    """Return the cached speeds of a setting, or empty ones if there is no file or an unreadable one."""
    try:
        return Speeds.from_json(json.loads(setting.path().read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return Speeds()


def save(setting: Setting, speeds: Speeds) -> None:
    """Write the speeds of a setting atomically; a machine without a directory for them measures again next time."""
    path, text = setting.path(), json.dumps({"setting": asdict(setting), **speeds.to_json()}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
