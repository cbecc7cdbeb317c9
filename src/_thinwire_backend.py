"""Registers the back end "thinwire" with torch.distributed, when torch is imported.

Torch calls `register` by the entry point in ``torch.backends``. It loads no module of thinwire: the first process group
that is made with the back end does.
"""


def register() -> None:
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend("thinwire", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options, settings):  # type: ignore[no-untyped-def]
    from thinwire.backend import create

    return create(options, settings)
