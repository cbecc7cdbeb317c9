"""Install torch into this environment: its build for CPUs where there is no NVIDIA driver; `make install` calls it.

    python tools/install_torch.py         # the version in constraints.txt
    python tools/install_torch.py 2.15    # another one: `make test-torches`

From PyPI torch comes with CUDA, for which it downloads 3 GB that a machine without a GPU cannot use.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SECONDS = 5.0
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def main() -> None:
    """Install torch unless it is installed; say in one line what is downloaded."""
    if find_spec("torch") is not None:
        return
    if has_driver():
        print("torch: with CUDA, since there is an NVIDIA driver: about 3 GB to download, 4.5 GB on disk", flush=True)
    elif not answers(CPU_INDEX):
        print(
            f"torch: from the index that pip has, since {CPU_INDEX} does not answer within {ANSWER_SECONDS:.0f} s."
            " Which build that has is not known: 200 MB to download for CPUs, about 3 GB with CUDA, as PyPI's",
            flush=True,
        )
    else:
        print(f"torch: its build for CPUs, from {CPU_INDEX}: about 200 MB to download, 0.7 GB on disk", flush=True)
        if pip("--no-deps", "--index-url", CPU_INDEX, "--timeout", "15", "--retries", "1") == 0:
            return
        print(f"torch: {CPU_INDEX} has no build for this Python and machine, so pip's own index", flush=True)
    if status := pip():
        print("torch: where a constraint of yours caps it (`pip config list`), go on with", file=sys.stderr)
        print("       PIP_CONSTRAINT= PIP_CONFIG_FILE=/dev/null make ...", file=sys.stderr, flush=True)
        sys.exit(status)


def has_driver() -> bool:
    """Return whether this machine has an NVIDIA driver."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def answers(index: str) -> bool:
    """Return whether an index of packages answers within seconds."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=ANSWER_SECONDS):
            return True
    except OSError:
        return False


def pip(*options: str) -> int:
    """Install torch by pip, and return its exit status."""
    torch = [f"torch=={version}.*" for version in sys.argv[1:]] or ["-c", str(CONSTRAINTS), "torch"]
    return subprocess.call([sys.executable, "-m", "pip", "install", "--quiet", *options, *torch])


if __name__ == "__main__":
    main()
