"""Errors of the command line that say what is missing: the package to install, and the file that was not written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from thinwire.errors import MissingPackageError

EXTRAS = {"matplotlib": "plot", "numba": "cpu", "pyroute2": "testbed", "scikit-learn": "train"}


def missing_package(package: str, purpose: str) -> MissingPackageError:
    """Return the error that ``purpose`` needs ``package``, which one of thinwire's extras brings."""
    return MissingPackageError(f"{purpose} needs {package}: pip install 'thinwire[{EXTRAS[package]}]'")


@contextlib.contextmanager
def naming(path: object) -> Iterator[None]:
    """Have an error of the system say which file it was: one of a write, as for want of space, does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
