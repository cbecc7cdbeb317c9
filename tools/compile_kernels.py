"""Compile the kernels for this processor on all cores, before tests, so that no test waits for a compiler.

python tools/compile_kernels.py
"""

from __future__ import annotations

import time

from thinwire.lab.testbed.kernels import compile_ahead

LINE_SECONDS = 5.0


def main() -> None:
    """Compile what is missing, with a line of progress now and then; print nothing where nothing is missing."""
    started = shown = time.monotonic()

    def show(description: str | None, done: int, total: int) -> None:
        nonlocal shown
        if description is not None:
            print(description, flush=True)
        elif time.monotonic() - shown >= LINE_SECONDS or done == total > 0:
            shown = time.monotonic()
            print(f"compiling kernels: {done} of {total}, {shown - started:.0f} s", flush=True)

    compile_ahead(on_progress=show)


if __name__ == "__main__":
    main()
