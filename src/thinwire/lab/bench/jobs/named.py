"""Registry of the jobs by name."""

from dataclasses import fields, replace

from thinwire.compress.named import split
from thinwire.lab.bench.jobs.images import DigitsJob, ResNetJob, VggJob
from thinwire.lab.bench.jobs.job import Job
from thinwire.lab.bench.jobs.language import LstmJob, NmtJob, Word2VecJob
from thinwire.lab.bench.jobs.own import FORM, OwnJob
from thinwire.lab.bench.jobs.recommend import DeepFmJob, DlrmJob
from thinwire.lab.bench.jobs.transformers import BertJob, GptJob, XlmrJob

JOBS: dict[str, Job] = {
    job.name: job
    for job in (
        LstmJob(), DigitsJob(), GptJob(), XlmrJob(), DlrmJob(), DeepFmJob(), NmtJob(), BertJob(), VggJob(), ResNetJob(),
        Word2VecJob(),
    )
}  # fmt: skip


def get_job(text: str, scale: float | None = None) -> Job:
    """Return the job of that name at a scale, with the settings behind it: ``gpt:autocast=bfloat16:batch_size=4``.

    Raises:
        ValueError: an unknown name, setting or value; the message lists what is legal.
    """
    name, settings = split(text)
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}; legal are {', '.join(JOBS)}")
    job = JOBS[name]
    if not settings and scale is None:
        return job
    legal = [field.name for field in fields(job) if field.name != "name"]
    for key, value in settings.items():
        if key not in legal:
            raise ValueError(f"the job {name} has no setting {key!r}; legal are {', '.join(legal)}")
        kind = type(getattr(job, key))
        if value is not None and kind not in (type(value), type(None)) and (kind, type(value)) != (float, int):
            raise ValueError(f"{key} of the job {name} is {kind.__name__} such as {getattr(job, key)}, not {value!r}")
    if scale is not None:
        job, text = job.scaled(scale), f"{text} at scale {scale:g}"
    return replace(job, **settings, name=text)


def parse_job(text: str, scale: float | None = None) -> Job | OwnJob:
    """Return the job of that name, as `get_job`, or the user's own of ``module:function`` or ``<file>:function``.

    Raises:
        ValueError: neither; the message says what is legal.
    """
    name, colon, rest = text.partition(":")
    if name in JOBS and (not colon or "=" in rest):
        return get_job(text, scale)
    if scale is not None:
        raise ValueError(f"{text} has no scale; the jobs that have one are {', '.join(JOBS)}")
    if colon:
        return OwnJob.parse(text)
    raise ValueError(f"unknown job {text!r}; legal are {', '.join(JOBS)}, or {FORM}")
