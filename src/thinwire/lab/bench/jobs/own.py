"""A user's own job, ``module:function`` or ``<file>:function``: the same function for all commands.

The function takes no arguments and is called on every rank, in the environment that torchrun gives it (``RANK``,
``WORLD_SIZE``). It returns the model, a function that makes a batch, a loss (a function of the model and a batch) and,
optionally, the optimizer.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.gradients.parameters import broadcast_all
from thinwire.lab.analyze.failure import first_error
from thinwire.lab.sources import parsed, spec_of
from thinwire.lab.testbed.launch import RanksFailed

if TYPE_CHECKING:
    from thinwire.lab.planning.training import Training

FORM = "module:function or file.py:function, a function that returns (model, make_batch, loss)"
LEARNING_RATE = 0.1
"""Learning rate of the SGD that trains a job without an optimizer; SGD takes sparse gradients too."""


class JobError(ValueError):
    """Raised when a user's own job cannot be made or trained; the message says what to change."""


@dataclass(frozen=True)
class OwnJob:
    """A user's own job by the text that names it; relative to the directory in which it was named.

    A job has no held-out data: it is judged by the loss of one fixed batch a rank, the first that the function makes.
    Its learning rate is constant. ``autocast`` is the dtype of `torch.autocast` around its loss, or empty.
    """

    name: str
    directory: str = field(default_factory=os.getcwd)

    steps: int = 100
    batch_size: int | None = None
    learning_rate: float | None = None
    momentum: float = 0.0
    clip_norm: float | None = None
    autocast: str = ""
    judged_by: str = "training loss of one fixed batch a rank"

    @classmethod
    def parse(cls, text: str) -> OwnJob:
        """Return the job that a text names, without importing it.

        Raises:
            ValueError: the text has another form; there is no such file or module, or no such function in it.
        """
        source, _, function = text.rpartition(":")
        if not source or not function.isidentifier():
            raise ValueError(f"{text!r} does not name a job: give {FORM}")
        if source.endswith(".py") and not Path(source).is_file():
            raise ValueError(f"there is no file {source}: give {FORM}")
        if not _may_have(source, function, text):
            raise ValueError(f"{source} has no function {function!r}: give {FORM}")
        return cls(text)

    def load(self) -> None:
        """Load nothing: the function makes its own data."""

    def training(self, data: object, rank: int, world_size: int, seed: int) -> Training:
        """Make the training on one rank, from random numbers of the seed; batches then differ from rank to rank.

        Raises:
            JobError: there is no such function, or it does not return a training.
        """
        _seed_all(seed)
        training = self.make()
        _seed_all(seed * world_size + rank + 1)
        return training

    def make(self) -> Training:
        """Call the function and check what it returns.

        Raises:
            JobError: as `training`.
        """
        from thinwire.lab.planning.training import Training

        made = self._function()()
        if not (isinstance(made, tuple) and 3 <= len(made) <= 4):
            raise JobError(f"{self.name} returns {_kind(made)}; return (model, make_batch, loss) or with an optimizer")
        model, make_batch, loss, *optimizer = made
        if not isinstance(model, nn.Module) or not callable(make_batch) or not callable(loss):
            kinds = ", ".join(type(part).__name__ for part in made)
            raise JobError(
                f"{self.name} returns ({kinds}); return (model, make_batch, loss): a plain module and two functions"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise JobError(f"{self.name} returns a model under DDP; return the plain module, which is wrapped for you")
        return Training(model, _endless(make_batch, self.name), self._under_autocast(loss), *optimizer)

    def _under_autocast(self, loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
        if not self.autocast:
            return loss

        def cast(model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast("cpu", getattr(torch, self.autocast)):
                return loss(model, batch)

        return cast

    def optimizer_of(self, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of the training, or SGD at `LEARNING_RATE`.

        Raises:
            JobError: what the function returns is no optimizer, or the model has nothing to train.
        """
        if training.optimizer is None:
            trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
            if not trained:
                raise JobError(f"{self.name} returns a model without parameters to train")
            return torch.optim.SGD(trained, lr=LEARNING_RATE)
        if not isinstance(training.optimizer, torch.optim.Optimizer):
            raise JobError(
                f"{self.name} returns {_kind(training.optimizer)} as its optimizer: return a torch.optim one"
            )
        return training.optimizer

    def held_out(self, training: Training, data: object, rank: int, world_size: int) -> tuple[Any, int]:
        """Return the batch that judges the training, and its weight among the ranks."""
        return training.batch(), 1

    def learning_rate_share(self, step: int, steps: int) -> float:
        """Return 1: a schedule of the user's is unknown."""
        return 1.0

    def _function(self) -> Callable[[], Any]:
        source, _, name = self.name.rpartition(":")
        try:
            module = _load_file(Path(self.directory, source)) if source.endswith(".py") else self._import(source)
        except ModuleNotFoundError as error:
            raise JobError(f"cannot import {self.name}: {error}; run from the directory that holds it") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise JobError(f"{source} has no function {name!r}: give {FORM}")
        return function

    def _import(self, name: str) -> ModuleType:
        if self.directory not in sys.path:
            sys.path.insert(0, self.directory)
        return importlib.import_module(name)


@contextmanager
def clear_job_errors() -> Iterator[None]:
    """Raise a `JobError` of a rank as that, in one line, and show an error of the user's code once, without ours."""
    try:
        yield
    except RanksFailed as failed:
        for outcome in failed.outcomes:
            last = (outcome.error or "").strip().rpartition("\n")[2]
            if match := re.match(rf"(?:\w+\.)*{JobError.__name__}: (.*)", last):
                raise JobError(match[1]) from failed
        if error := first_error(failed):
            raise RanksFailed(f"the job failed on rank {error[0]}:\n{error[1]}", failed.outcomes) from failed
        raise


def share_parameters(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, as DDP does; a collective call."""
    tensors = (*model.parameters(), *model.buffers())
    group = dist.group.WORLD
    assert group is not None, "ranks train"
    broadcast_all(filter(torch.is_floating_point, tensors), group)


def _may_have(source: str, function: str, text: str) -> bool:
    """Whether a file or a module may have a function; only modules that are part of Python are imported for that.

    Raises:
        ValueError: there is no such module; or its file is no Python.
    """
    spec = None if source.endswith(".py") else spec_of(source, text)
    path = source if spec is None else spec.origin or ""
    if path.endswith(".py"):
        return _may_define(Path(path), function)
    if path in ("built-in", "frozen"):
        importlib.import_module(source)
    return source not in sys.modules or hasattr(sys.modules[source], function)


def _may_define(path: Path, name: str) -> bool:
    """Whether a source file may define a name: in any statement, or in one that hides its names.

    Raises:
        ValueError: the file is no Python.
    """
    nodes = list(ast.walk(parsed(path)))
    names = {getattr(node, field, None) for node in nodes for field in ("name", "asname", "id")}
    return not names.isdisjoint({name, "*", "__getattr__", "globals", "exec", "setattr"})


def _load_file(path: Path) -> ModuleType:
    """Import a file by its path, with its folder in ``sys.path`` as for a script."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"job_{path.stem}", path)
    assert spec is not None, "the name of a Python file"
    assert spec.loader is not None, "the name of a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _endless(make_batch: Callable[[], Any], name: str) -> Callable[[], Any]:
    def batch() -> Any:
        try:
            return make_batch()
        except StopIteration as ended:
            raise JobError(
                f"make_batch of {name} has no more batches: let it start over, for example with itertools.cycle"
            ) from ended

    return batch


@contextmanager
def same_random_numbers_after() -> Iterator[None]:
    """Go on afterwards with the random numbers that would come now: of Python, numpy, and torch on the CPU."""
    state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(state)
    np.random.set_state(numpy_state)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _kind(value: object) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
