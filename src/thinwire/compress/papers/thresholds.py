"""Selection by a threshold that is estimated: from a sample (DGC), or from a distribution fitted in stages (SIDCo)."""

import math
from dataclasses import dataclass, field
from numbers import Real

from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.memory import MomentumCorrection
from thinwire.compress.methods.select import largest_nonzero, largest_of, nothing, select_near
from thinwire.compress.methods.sparsify import DensitySparsifier, Selection
from thinwire.compress.warm_up import WarmUp
from thinwire.kernels import Moments

FEWEST = 0.8  # of k, without another threshold
MOST = 2  # of k, of which the largest are sorted out
LOWER = 0.8
ADAPTATIONS = 10


@dataclass(frozen=True)
class SampledTopK(DensitySparsifier):
    """The selection of DGC (Lin et al., ICLR'18, section 3): a threshold from a sample, then at most the ``k`` largest.

    The threshold is the one that a strided sample needs. While fewer than 0.8 k elements reach it, it is lowered by
    0.8, up to ten times; of more than k the k largest are kept. So 0.8 k to k elements are sent, or all that are not
    zero if there are fewer.

    Args:
        sample: fraction of the elements that is sampled, in (0, 1].
        min_sample: least number of elements in the sample, if there are that many.

    Raises:
        ValueError: a density or sample outside (0, 1], a sample of no elements.
    """

    sample: float = 0.01
    min_sample: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.sample <= 1.0 or self.min_sample < 1:
            raise ValueError(
                f"a sample is a part of the elements in (0, 1] and at least one of them, not {self.sample} and"
                f" {self.min_sample}"
            )

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        threshold = self._sampled_threshold(flat, k)
        if not threshold > 0.0:  # nearly all elements are zero
            return largest_nonzero(flat, k)
        for _ in range(ADAPTATIONS + 1):
            count = kernels.count_at_least(flat, threshold)
            if count > MOST * k:
                break
            if count >= FEWEST * k:
                return largest_of(kernels.select_at_least(flat, threshold, count), k)
            threshold *= LOWER
        return largest_nonzero(flat, k)

    def _sampled_threshold(self, flat: Tensor, k: int) -> float:
        size = flat.numel()
        sample = flat[:: _stride(size, max(self.sample, self.min_sample / size))].contiguous()
        _, largest = kernels.top_magnitudes(sample, max(1, round(k * sample.numel() / size)))
        return float(largest.abs().min())


def dgc(
    density: float = 0.001,
    momentum: float = 0.9,
    *,
    nesterov: bool = False,
    clip_norm: float | None = None,
    masking: bool = True,
    warm_up_epochs: int = 4,
    steps_per_epoch: int | None = None,
    values: Compressor | None = None,
) -> MomentumCorrection:
    """Return DGC (Lin et al., ICLR'18, arXiv 1712.01887): sampled top-k with momentum correction and warm-up.

    The density of epoch ``e`` is ``max(c^(e + 1), density)`` with ``c = density^(1 / (warm_up_epochs + 1))``: for 0.1 %
    and four epochs 25 %, 6.3 %, 1.6 %, 0.4 %, then 0.1 %. The optimizer must have no momentum for these parameters, and
    keeps its own for those that are not compressed: see "Momentum" in docs/guides/compression.md.

    Args:
        density: density after the warm-up, in (0, 1].
        momentum, nesterov, clip_norm, masking: see `thinwire.compress.memory.MomentumCorrection`.
        warm_up_epochs: number of epochs of the warm-up; 0 for none.
        steps_per_epoch: number of steps, such as ``len(data_loader)``; None leaves the warm-up out.
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1], momentum outside [0, 1), epochs below 0 or steps below 1.

    Example:
        >>> dgc(0.001, steps_per_epoch=500).name
        'momentum_correction(warm_up(sampled_top_k(0.001), 2000 steps in 4 from 0.251189), 0.9)'
    """
    steps = 1 if steps_per_epoch is None else steps_per_epoch
    if not (isinstance(warm_up_epochs, Real) and isinstance(steps, Real) and warm_up_epochs >= 0 and steps >= 1):
        raise ValueError(
            f"DGC cannot warm up over {warm_up_epochs} epochs of {steps_per_epoch} steps: pass warm_up_epochs=0 for no"
            " warm-up, and steps_per_epoch=len(data_loader)"
        )
    chosen: Compressor = SampledTopK(density=density, values=values)
    if warm_up_epochs and steps_per_epoch:
        start = density ** (1.0 / (warm_up_epochs + 1))
        chosen = WarmUp(chosen, warm_up_epochs * steps_per_epoch, start, stairs=warm_up_epochs)
    return MomentumCorrection(chosen, momentum, nesterov=nesterov, clip_norm=clip_norm, masking=masking)


def _stride(size: int, share: float) -> int:
    """Return about 1 / share, coprime to the size: else a sample may be a single column of a matrix."""
    stride = max(1, int(1.0 / share))
    while math.gcd(stride, size) > 1:
        stride -= 1
    return stride


FIRST_RATIO = 0.25
"""Fraction of the elements that a stage leaves to the next one."""
ADAPT_EVERY = 5
TOLERANCE = 0.2

DISTRIBUTIONS = ("exponential", "gamma", "pareto")


@dataclass(frozen=True)
class Sidco(DensitySparsifier):
    """SIDCo (Abdelmoniem et al., MLSys'21, arXiv 2101.10761): a quantile of a distribution fitted to magnitudes.

    The first stage fits the magnitudes that are not zero, each further one those that exceed the last threshold, of
    which a quarter is left to the next stage, until the last one aims at k. After every fifth step the number of stages
    changes by one if the mean count of these steps was not within 20 % of k. A threshold that does not leave 2/3 k to
    4/3 k is corrected like that of `gaussian_k`: that many elements are sent, or all that are not zero if there are
    fewer. It is biased and needs error feedback, which `attach` adds.

    State: ``stages``; ``direction``, in which their number moves; ``steps`` since it was adapted, ``ratio_sum`` of
    their counts over k, and the ``last_error`` of the mean.

    Args:
        density: k / numel, in (0, 1].
        distribution: "exponential" (of the magnitudes: a Laplace distribution of the gradient); "gamma", and a
            generalized Pareto distribution from the second stage on; "pareto", in all stages.
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1]; an unknown distribution.
    """

    distribution: str = field(default="exponential", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"SIDCo fits one of {', '.join(DISTRIBUTIONS)}, not {self.distribution!r}")

    @property
    def settings(self) -> tuple[str, ...]:
        return f"{self.density:g}", self.distribution

    def init(self, parameter: Parameter) -> State:
        adaptation = {"stages": 1, "direction": 1, "steps": 0, "ratio_sum": 0.0, "last_error": math.inf}
        return {**super().init(parameter), **adaptation}

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        moments = kernels.magnitude_moments(flat)
        if not moments.count:
            return nothing(flat)
        threshold = self._threshold(flat, moments, k, state["stages"])
        achieved = kernels.count_at_least(flat, threshold) if math.isfinite(threshold) else 0
        # At so many stages the last one need not select less than a quarter.
        most_stages = math.ceil(math.log(k / flat.numel()) / math.log(FIRST_RATIO))
        _adapt(state, achieved / k, max(1, most_stages))
        return select_near(flat, threshold, k, achieved)

    def _threshold(self, flat: Tensor, moments: Moments, k: int, stages: int) -> float:
        threshold = 0.0
        for stage in range(stages):
            ratio = min(1.0, k / moments.count)
            last = stage == stages - 1 or ratio >= FIRST_RATIO
            threshold += self._excess(flat, moments, threshold, ratio if last else FIRST_RATIO)
            if last or not math.isfinite(threshold):
                break
            moments = kernels.magnitude_moments(flat, threshold)
            if moments.count <= k:
                break
        return threshold

    def _excess(self, flat: Tensor, moments: Moments, threshold: float, ratio: float) -> float:
        """Return the excess over a threshold that the fraction ``ratio`` of the magnitudes above it reaches."""
        mean = moments.sum / moments.count - threshold
        if self.distribution == "exponential":
            return exponential_excess(mean, ratio)
        if self.distribution == "gamma" and threshold == 0.0:
            return gamma_excess(mean, float(flat[flat != 0].double().abs().log().sum()) / moments.count, ratio)
        variance = moments.sum_squares / moments.count - (moments.sum / moments.count) ** 2
        return pareto_excess(mean, variance, ratio)


sidco = Sidco


def exponential_excess(mean: float, ratio: float) -> float:
    """Return ``-mean ln(ratio)``."""
    return -mean * math.log(ratio)


def gamma_excess(mean: float, mean_log: float, ratio: float) -> float:
    """Return ``-b (ln(ratio) + ln G(a))``, at least 0, by the approximate maximum-likelihood shape a and scale b."""
    s = math.log(mean) - mean_log
    if not s > 1e-12:  # all magnitudes are equal
        return mean
    shape = (3.0 - s + math.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    return max(0.0, -mean / shape * (math.log(ratio) + math.lgamma(shape)))


def pareto_excess(mean: float, variance: float, ratio: float) -> float:
    """Return ``b (ratio^-a - 1) / a``; ``q = mean^2 / variance``, ``a = (1 - q) / 2``, ``b = mean (q + 1) / 2``."""
    if not variance > 1e-12 * mean * mean:
        return mean
    quotient = mean * mean / variance
    shape, scale = 0.5 * (1.0 - quotient), 0.5 * mean * (quotient + 1.0)
    if abs(shape) < 1e-9:
        return exponential_excess(scale, ratio)
    return scale * math.expm1(min(700.0, -shape * math.log(ratio))) / shape


def _adapt(state: State, achieved: float, most: int) -> None:
    """Change the number of stages by one. If that made it worse, or is impossible, reverse the direction."""
    state["steps"] += 1
    state["ratio_sum"] += achieved
    if state["steps"] < ADAPT_EVERY:
        return
    mean = state["ratio_sum"] / ADAPT_EVERY
    error = abs(mean - 1.0)
    if error > TOLERANCE:
        if error > state["last_error"]:
            state["direction"] = -state["direction"]
        wanted = state["stages"] + (state["direction"] if mean < 1.0 else -state["direction"])
        if not 1 <= wanted <= most:
            state["direction"] = -state["direction"]
        state["stages"] = min(max(1, wanted), most)
    state.update(steps=0, ratio_sum=0.0, last_error=error)
