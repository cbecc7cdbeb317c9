"""Published measurements on 64 V100: throughputs of Espresso and the systems that it is compared with.

Source: Espresso (EuroSys'23): table 1, and the text of sections 5.2.1 and 5.2.3 about figures 12 and 13. Where the text
gives a system against dense and another against Espresso, one is divided by the other; "up to" figures are over several
numbers of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

DENSE, HI_TOP_K_COMM, HI_PRESS = "dense", "hi_top_k_comm", "hi_press"
BYTEPS_COMPRESS, ESPRESSO = "byteps_compress", "espresso"


@dataclass(frozen=True)
class PublishedResult:
    """Result of one published experiment.

    Attributes:
        model, algorithm, testbed: keys of `MODELS`, of `published.ALGORITHMS` and of `published.TESTBEDS`.
        throughput: throughput of each method, relative to the first.
        source: source of the figures.
    """

    model: str
    algorithm: str
    testbed: str
    throughput: tuple[tuple[str, float], ...]
    source: str


RESULTS: tuple[PublishedResult, ...] = (
    PublishedResult(
        "bert",
        "random_k",
        "nvlink_100g",
        (
            (ESPRESSO, 1.0),
            (BYTEPS_COMPRESS, 1 / 1.31),
            (HI_PRESS, 1 / 1.40),
            (HI_TOP_K_COMM, 1 / 1.54),
            (DENSE, 1 / 1.40 / 1.13),
        ),
        "Espresso +31, +40 and +54 %; HiPress up to 13 % above dense",
    ),
    PublishedResult(
        "gpt2",
        "ef_sign_sgd",
        "nvlink_100g",
        ((ESPRESSO, 1.0), (HI_PRESS, 1 / 1.33), (BYTEPS_COMPRESS, 1 / 1.42)),
        "Espresso +33 and +42 %",
    ),
    PublishedResult(
        "ugatit",
        "dgc",
        "nvlink_100g",
        (
            (ESPRESSO, 1.0),
            (HI_PRESS, 1 / 1.35),
            (HI_TOP_K_COMM, 1 / 1.50),
            (DENSE, 1 / 2.49),
            (BYTEPS_COMPRESS, 1 / 3.05),
        ),
        "Espresso +35, +50, +149 and +205 %",
    ),
    PublishedResult(
        "vgg16",
        "random_k",
        "pcie_25g",
        ((ESPRESSO, 1.0), (HI_PRESS, 1 / 1.55), (DENSE, 1 / 3.69), (BYTEPS_COMPRESS, 1 / 4.57)),
        "Espresso +55, +269 and +357 %",
    ),
    PublishedResult(
        "lstm",
        "ef_sign_sgd",
        "pcie_25g",
        (
            (ESPRESSO, 1.0),
            (HI_TOP_K_COMM, 1 / 1.73),
            (HI_PRESS, 1 / 1.77),
            (DENSE, 1 / 1.77 / 1.02),
            (BYTEPS_COMPRESS, 1 / 2.01),
        ),
        "Espresso +73, +77 and +101 %; HiPress up to 2 % above dense",
    ),
    PublishedResult(
        "resnet101",
        "dgc",
        "pcie_25g",
        (
            (ESPRESSO, 1.0),
            (BYTEPS_COMPRESS, 1 / 1.18),
            (DENSE, 1 / 1.20),
            (HI_PRESS, 1 / 1.24),
            (HI_TOP_K_COMM, 0.46 / 1.20),
        ),
        "Espresso up to +18, +20 and +24 %; HiTopKComm 54 % below dense",
    ),
)

SCALING_FACTORS: tuple[PublishedResult, ...] = (
    PublishedResult(
        "gpt2",
        "dgc",
        "nvlink_100g",
        ((DENSE, 0.58), (HI_TOP_K_COMM, 0.67), (BYTEPS_COMPRESS, 0.64)),
        "table 1",
    ),
    PublishedResult(
        "bert",
        "ef_sign_sgd",
        "nvlink_100g",
        ((DENSE, 0.51), (HI_TOP_K_COMM, 0.55), (BYTEPS_COMPRESS, 0.61)),
        "table 1",
    ),
    PublishedResult(
        "lstm",
        "dgc",
        "pcie_25g",
        ((DENSE, 0.46), (HI_TOP_K_COMM, 0.43), (BYTEPS_COMPRESS, 0.42)),
        "table 1",
    ),
)
"""Published throughput over that of one GPU times their number: every tensor compressed on GPUs, or on processors."""
