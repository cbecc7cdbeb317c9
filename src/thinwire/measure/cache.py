"""Links and compressors are measured once on a machine: what was measured is kept in a file for each setting."""

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

from thinwire.plan.speeds import Codec, MeasuredLink

_VERSION = 2


@dataclass(frozen=True)
class Setting:
    """What measured speeds depend on. Others are measured for any other setting.

    Args:
        host: name of the machine of rank 0.
        device: that models are on.
        torch: its version.
        world_size: ranks.
        link: between them: an address, an interface, an emulated rate.
        threads: of a rank.
    """

    host: str
    device: str
    torch: str
    world_size: int
    link: str
    threads: int

    @classmethod
    def here(cls, device: torch.device, world_size: int, link: str = "") -> Setting:
        """Of this process; ``link`` is by default where its ranks meet."""
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(platform.node(), name, torch.__version__, world_size, link or address, torch.get_num_threads())

    def path(self) -> Path:
        """Where it is kept: in $XDG_CACHE_HOME/thinwire, by default ~/.cache/thinwire."""
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return Path(root) / "thinwire" / f"speeds-{digest[:16]}.json"


@dataclass(frozen=True)
class Speeds:
    """What is known of a setting already."""

    link: MeasuredLink | None = None
    codecs: tuple[Codec, ...] = ()

    def codec(self, compressor: str, exchange: str) -> Codec | None:
        known = (codec for codec in self.codecs if (codec.compressor, codec.exchange) == (compressor, exchange))
        return next(known, None)

    def having(self, codecs: Sequence[Codec], link: MeasuredLink) -> Speeds:
        """With newer ones in place of those of the same compressor and exchange."""
        newer = {(codec.compressor, codec.exchange) for codec in codecs}
        kept = (codec for codec in self.codecs if (codec.compressor, codec.exchange) not in newer)
        return Speeds(link, (*kept, *codecs))

    def to_json(self) -> dict[str, Any]:
        link = None if self.link is None else self.link.to_json()
        return {"version": _VERSION, "link": link, "codecs": [codec.to_json() for codec in self.codecs]}

    @classmethod
    def from_json(cls, data: object) -> Speeds:
        """What is not understood was never measured."""
        if not isinstance(data, Mapping) or data.get("version") != _VERSION:
            return cls()
        try:
            link = None if data["link"] is None else MeasuredLink.from_json(data["link"])
            return cls(link, tuple(Codec.from_json(codec) for codec in data["codecs"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()


def load(setting: Setting) -> Speeds:
    """What is kept of a setting; nothing if there is no file, or one that cannot be read."""
    try:
        return Speeds.from_json(json.loads(setting.path().read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return Speeds()


def save(setting: Setting, speeds: Speeds) -> None:
    """Keep it, in one piece; a machine without a place for it measures again next time."""
    path, text = setting.path(), json.dumps({"setting": asdict(setting), **speeds.to_json()}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
