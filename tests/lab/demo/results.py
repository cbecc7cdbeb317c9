"""Results of the demo, made by hand."""

import numpy as np

from thinwire.lab.demo.compare import Comparison, VariantResult
from thinwire.lab.demo.train import VARIANTS, TrainConfig

STEPS = 5
SECONDS = {"ddp": 2.0, "thinwire": 0.5, "ddp_sparse": 0.2, "thinwire_sparse": 0.1}


def comparison(link_mbit: float | None = 955.0, loss: float = 4.0, **seconds: float) -> Comparison:
    """Measurements as if of two ranks; steps of warm-up take 9 s, and ``loss`` is that of thinwire."""
    results = {}
    for variant in VARIANTS:
        step = np.full(STEPS, (SECONDS | seconds)[variant.name])
        step[:2] = 9.0
        columns = {
            "loss": np.full(STEPS, loss if variant.name == "thinwire" else 4.0),
            "step_seconds": step,
            "comm_seconds": step / 2,
            "bytes_sent": np.full(STEPS, 500.0 if variant.attached else 1000.0),
        }
        table = [{"name": "words_in.weight", "scheme": "zen"}] if variant.attached else []
        results[variant.name] = VariantResult(variant, columns, True, table)
    return Comparison(TrainConfig(), 2, 7000, 300, link_mbit, results)
