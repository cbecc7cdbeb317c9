"""The jobs by name."""

from __future__ import annotations

from thinwire.bench.jobs.digits import DigitsJob
from thinwire.bench.jobs.gpt import GptJob
from thinwire.bench.jobs.job import Job
from thinwire.bench.jobs.lstm import LstmJob

JOBS: dict[str, Job] = {job.name: job for job in (LstmJob(), DigitsJob(), GptJob())}


def get_job(name: str) -> Job:
    """Raises ValueError for an unknown name; the message lists the names."""
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}; legal are {', '.join(JOBS)}")
    return JOBS[name]
