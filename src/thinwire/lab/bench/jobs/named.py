"""Registry of the jobs by name."""

from __future__ import annotations

from thinwire.lab.bench.jobs.digits import DigitsJob
from thinwire.lab.bench.jobs.gpt import GptJob
from thinwire.lab.bench.jobs.job import Job
from thinwire.lab.bench.jobs.lstm import LstmJob
from thinwire.lab.bench.jobs.own import FORM, OwnJob

JOBS: dict[str, Job] = {job.name: job for job in (LstmJob(), DigitsJob(), GptJob())}


def get_job(name: str) -> Job:
    """Return the job of that name. Raises ValueError for an unknown name; the message lists the names."""
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}; legal are {', '.join(JOBS)}")
    return JOBS[name]


def parse_job(text: str) -> Job | OwnJob:
    """Return the job of that name, or the user's own of ``module:function`` or ``<file>:function``.

    Raises:
        ValueError: neither; the message says what is legal.
    """
    if text in JOBS:
        return JOBS[text]
    if ":" in text:
        return OwnJob.parse(text)
    raise ValueError(f"unknown job {text!r}; legal are {', '.join(JOBS)}, or {FORM}")
