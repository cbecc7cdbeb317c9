"""Hooks that stay behind when their model is copied or saved, and that keep nothing alive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn
from weakref import WeakMethod


class Hook:
    """A hook of a module, which stays behind: copies and files of the module have one that does nothing.

    A bound method as a hook takes its object into each copy, with lanes and process groups, which cannot be copied, and
    into each file, which then needs thinwire to be read. What stands in for this one takes any arguments, returns None,
    and comes from the standard library.

    Args:
        method: what is called. Its object lives as long as the hook is on the module, so it must not hold the module.
    """

    def __init__(self, method: Callable[..., object]) -> None:
        self._method = method

    def __call__(self, *args: Any) -> Any:
        return self._method(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    @property
    def __name__(self) -> NoReturn:
        """`torch.jit.script` compiles the hooks of a module by their names."""
        raise AttributeError(
            "torch.jit.script compiles the hooks of a module, and those of thinwire cannot be compiled: script the"
            " module before attach, or after Synchronizer.detach()"
        )


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method as long as its object lives; returns None afterwards.

    For what a parameter holds on to: objects that hold the parameter would keep it alive, and C++ holds the hooks of
    parameters and buckets where no garbage collector finds a cycle.
    """
    weak = WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = weak()
        return None if alive is None else alive(*args)

    return call
