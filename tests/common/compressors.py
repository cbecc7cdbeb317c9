"""Every compressor that is public, for laws that hold for all of them."""

from __future__ import annotations

import inspect

from thinwire import compress
from thinwire.compress.base import Compressor, Memory
from thinwire.compress.memory import ErrorFeedback

NO_CODES = {"ef21", "error_feedback", "leave_small", "momentum_correction", "redistribute", "warm_up"}
NO_CODES |= {"hi_top_k", "ok_topk"}  # an exchange of their own, and laws of their own: see their tests
SETTINGS: dict[str, dict[str, object]] = {"threshold": {"value": 1.5}}


def all_compressors() -> dict[str, Compressor]:
    """Of every public constructor, with error feedback if it has no memory yet, unbiased or not."""
    found: dict[str, Compressor] = {}
    for name in sorted(set(compress.__all__) - NO_CODES):
        constructor = getattr(compress, name)
        if name.islower():
            wanted = dict(SETTINGS.get(name, {}))
            if "density" in inspect.signature(constructor).parameters:
                wanted["density"] = 0.1
            found[name] = constructor(**wanted)
    for distribution in ("gamma", "pareto"):
        found[f"sidco {distribution}"] = compress.sidco(0.1, distribution=distribution)
    found["int8 stochastic"] = compress.int8(stochastic=True)
    found["lossless bf16"] = compress.lossless(compress.bf16())
    found["top_k of lossless"] = compress.top_k(0.1, values=compress.lossless())
    found["top_k of int8"] = compress.top_k(0.1, values=compress.int8())
    return found


COMPRESSORS = all_compressors()
FEEDBACK = {
    name: code if isinstance(code, ErrorFeedback) else ErrorFeedback(code)
    for name, code in COMPRESSORS.items()
    if isinstance(code, ErrorFeedback) or code.memory is not Memory.OWN
}
