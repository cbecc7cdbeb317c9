"""What is missing: a package to install, a file that was not written, the home of a user who has none."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from thinwire.errors import MissingPackageError

EXTRAS = {"matplotlib": "plot", "numba": "cpu", "pyroute2": "testbed", "scikit-learn": "train"}


def missing_package(package: str, purpose: str) -> MissingPackageError:
    """Return the error that ``purpose`` needs ``package``, which one of thinwire's extras brings."""
    return MissingPackageError(f"{purpose} needs {package}: pip install '.[{EXTRAS[package]}]' in a checkout")


@contextlib.contextmanager
def naming(path: object) -> Iterator[None]:
    """Have an error of the system say which file it was: one of a write, as for want of space, does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def cache_home() -> Path:
    """Return $XDG_CACHE_HOME, by default ~/.cache; where the user has no home, a place where no file can be."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home if os.path.isabs(home) else os.devnull)
