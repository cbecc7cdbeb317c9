"""Sparsifiers that keep the largest elements.

- `threshold`: all elements from a fixed magnitude on.
- `top_k`: the elements of largest magnitude, exactly.
- `gaussian_k`: a threshold from a normal distribution fitted to the gradient.
- `redsync`: a threshold between the mean and the largest magnitude, by bisection.
- `ms_top_k`: top-k by a fixed number of bisections of a threshold.

Methods that estimate a threshold all promise that some elements are sent, and not too many.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Memory, Parameter, Payload, State
from thinwire.compress.methods.sparsify import DensitySparsifier, Selection, Sparsifier

FEWEST, MOST_ACCEPTED = 2 / 3, 4 / 3
"""Range of the ratio of counts to k that an estimated threshold may leave."""
CORRECTIONS = 8
RAISE, LOWER = 1.2, 0.8


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """The sparsifier that sends every element of at least a fixed magnitude (Strom, Interspeech'15).

    With error feedback a small gradient is sent once it has grown to the threshold. If no element reaches it the
    largest one is sent, unless all are zero; there is no upper bound, so too small a threshold sends everything.
    The magnitude of gradients changes in training, from which a density does not suffer: prefer the other methods.

    Args:
        value: positive magnitude, in the scale of the gradients.
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a threshold that is not positive and finite.
    """

    value: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.value > 0.0 and math.isfinite(self.value)):
            raise ValueError(f"elements are sent from a positive, finite magnitude on, not from {self.value}")

    def select(self, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        ids, chosen = kernels.select_at_least(flat, self.value)
        return (ids, chosen) if ids.numel() else largest_nonzero(flat, min(1, flat.numel()))


threshold = Threshold


def nothing(flat: Tensor) -> Selection:
    """Return the selection of an all-zero gradient."""
    return torch.empty(0, dtype=torch.int64), flat.new_empty(0)


def largest_nonzero(flat: Tensor, k: int) -> Selection:
    """Return the ``k`` largest elements, or fewer if fewer differ from zero."""
    ids, chosen = kernels.top_magnitudes(flat, k)
    present = chosen != 0
    return (ids, chosen) if bool(present.all()) else (ids[present], chosen[present])


def largest_of(selection: Selection, k: int) -> Selection:
    """Return the ``k`` largest of a selection, or all if there are no more."""
    ids, chosen = selection
    if ids.numel() <= k:
        return selection
    positions, chosen = kernels.top_magnitudes(chosen, k)
    return ids[positions], chosen


def select_near(flat: Tensor, threshold: float, k: int, count: int) -> Selection:
    """Select from a threshold on, corrected until 2/3 k to 4/3 k elements reach it; else the ``k`` largest.

    ``count`` elements reach the estimated threshold, which can be anything on data unlike its model: infinite, below
    zero, beyond the largest magnitude. A correction raises or lowers it by a fifth; once thresholds on both sides of k
    are known it goes to their geometric mean. Error feedback needs that: it leaves a sharp edge at the last thresholds,
    where a fifth is the difference between k / 5 and 10 k elements. On gradients of a small transformer Gaussian-K
    needed 2.8 corrections on average and 5 at most, SIDCo 0.8 to 1.7 and 8.
    """
    low, high = 0.0, math.inf
    for _ in range(CORRECTIONS):
        if FEWEST * k <= count <= MOST_ACCEPTED * k or not 0.0 < threshold < math.inf:
            break
        low, high = (threshold, high) if count > k else (low, threshold)
        threshold = _between(low, high)
        count = kernels.count_at_least(flat, threshold)
    if threshold > 0.0 and FEWEST * k <= count <= MOST_ACCEPTED * k:
        return kernels.select_at_least(flat, threshold, count)
    return largest_nonzero(flat, k)


def _between(low: float, high: float) -> float:
    """Return the geometric mean of two bounds, or a threshold beyond the only known one."""
    if high == math.inf:
        return low * RAISE
    return math.sqrt(low) * math.sqrt(high) if low > 0.0 else high * LOWER


class Tail:
    """The largest elements of a gradient, enough for a search of a threshold that about ``fewest`` elements reach.

    They are copied once, by their leading bits. All steps of a search then read them alone, and decide as if they
    counted the whole gradient.
    """

    def __init__(self, flat: Tensor, fewest: int) -> None:
        self._ids, self._chosen = kernels.leading_magnitudes(flat, fewest)

    def count(self, threshold: float) -> int:
        """Return the number of elements that reach a threshold, if below ``fewest``; else at least ``fewest``."""
        return kernels.count_at_least(self._chosen, threshold)

    def select(self, threshold: float) -> Selection:
        positions, chosen = kernels.select_at_least(self._chosen, threshold)
        return self._ids[positions], chosen


def mean_and_max(flat: Tensor) -> tuple[float, float]:
    """Return the mean and the maximum of the magnitudes."""
    low, high = torch.aminmax(flat)
    return kernels.magnitude_moments(flat).sum / flat.numel(), max(-float(low), float(high))


@dataclass(frozen=True)
class TopK(DensitySparsifier):
    """Top-K (Aji and Heafield, EMNLP'17; Stich et al., NeurIPS'18): the ``k`` largest magnitudes.

    Of equal magnitudes the first are sent. It is biased, so it needs error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1].
        values: code of the selected values, such as ``bf16()``; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1].

    Example:
        >>> import torch
        >>> from thinwire.compress.base import Parameter
        >>> parameter, compressor = Parameter("fc.bias", (4,)), top_k(0.5)
        >>> gradient = torch.tensor([1.0, -3.0, 0.0, 2.0])
        >>> payload = compressor.compress(gradient, parameter, compressor.init(parameter))
        >>> compressor.decompress(payload, parameter)
        tensor([ 0., -3.,  0.,  2.])
    """

    has_fixed_count: ClassVar[bool] = True

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        return kernels.top_magnitudes(flat, k)


top_k = TopK


@dataclass(frozen=True)
class GaussianK(DensitySparsifier):
    """Gaussian-K (Shi et al., arXiv 1911.08772): elements beyond a quantile of a fitted normal distribution.

    The quantile is that of ``1 - k / (2 n)``; the distribution has the deviation of the gradient, about zero. While the
    count is outside [2/3, 4/3] of k the threshold is corrected, by 1.2 or 0.8 until it is bracketed and by bisection
    then; if that needs more than eight corrections, the k largest are sent. So 2/3 k to 4/3 k elements are sent, or all
    that are not zero if there are fewer. It is biased and needs error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1].
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1].
    """

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        moments = kernels.magnitude_moments(flat)
        if not moments.count:
            return nothing(flat)
        sigma = math.sqrt(moments.sum_squares / flat.numel())
        threshold = -sigma * NormalDist().inv_cdf(0.5 * k / flat.numel())
        return select_near(flat, threshold, k, kernels.count_at_least(flat, threshold))


gaussian_k = GaussianK


STEPS = 30
"""Steps of the bisection, after which the ratio of the bracket's ends is that of two neighbouring float32."""


@dataclass(frozen=True)
class RedSync(DensitySparsifier):
    """RedSync (Fang et al., arXiv 1808.04357): magnitudes from ``mean + r (max - mean)`` on.

    A bisection of ``r`` stops at the first at which 2/3 k to 4/3 k elements are selected. The paper stops at k to 2 k,
    which sends 1.46 k on average (gradients of a small GPT under error feedback); this range is as wide, and its mean
    is near k. If there is no such ``r`` (many equal magnitudes, or a density so large that the threshold is below the
    mean) the k largest that are not zero are sent. It is biased and needs error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1]; 0.1 % in the paper.
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1].
    """

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        low, high = mean_and_max(flat)
        if high == 0.0:
            return nothing(flat)
        tail = Tail(flat, min(flat.numel(), math.floor(MOST_ACCEPTED * k) + 1))
        for _ in range(STEPS):
            threshold = low + 0.5 * (high - low)
            count = tail.count(threshold)
            if FEWEST * k <= count <= MOST_ACCEPTED * k:
                return tail.select(threshold)
            low, high = (threshold, high) if count > k else (low, threshold)
        return largest_nonzero(flat, k)


redsync = RedSync


@dataclass(frozen=True)
class MsTopK(DensitySparsifier):
    """MSTopK (Shi et al., MLSys'21, arXiv 2010.10458): exactly ``k`` elements, by a search without sorting.

    A threshold between the mean and the largest magnitude is bisected ``steps`` times. All elements from the tightest
    one on that fewer than k reach are sent; the rest, in the order of their ids, from those between it and the
    tightest one that at least k reach. It is biased and needs error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1].
        steps: number of steps of the search.
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1]; no steps.
    """

    steps: int = field(default=30, kw_only=True)

    has_fixed_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"MSTop-K bisects at least once, not {self.steps} times")

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        low, high = mean_and_max(flat)
        tail = Tail(flat, k)
        enough, too_few = 0.0, math.inf  # the tightest thresholds on both sides: at least k elements, fewer than k
        for _ in range(self.steps):
            threshold = low + 0.5 * (high - low)
            count = tail.count(threshold)
            if count >= k:
                low = enough = threshold
            else:
                high = too_few = threshold
        return _filled(tail.select(enough), too_few, k)


ms_top_k = MsTopK


def _filled(selection: Selection, too_few: float, k: int) -> Selection:
    """Return ``k`` of a selection: those that reach a threshold, and the first of the others."""
    ids, chosen = selection
    sure, _ = kernels.select_at_least(chosen, too_few)
    taken = torch.zeros(ids.numel(), dtype=torch.bool).index_fill_(0, sure, True)
    taken.index_fill_(0, (~taken).nonzero().flatten()[: k - sure.numel()], True)
    return ids[taken], chosen[taken]


HI_TOP_K = "hi_top_k"
"""Name of the method and of its reduction."""


@dataclass(frozen=True)
class HiTopK(Compressor):
    """The compressor of `hi_top_k`; its reduction is `thinwire.compress.papers.hi_top_k`.

    Its payload is the whole gradient, for the sum inside the host. State: ``error``, of the shape of the parameter: in
    this rank's shard the unsent rest of the host, elsewhere zero.

    Args:
        selector: selects, from the sum over a host, the elements that cross to other hosts.
    """

    selector: MsTopK

    memory = Memory.OWN

    @property
    def name(self) -> str:
        return f"{HI_TOP_K}({', '.join(self.selector.settings)})"

    def init(self, parameter: Parameter) -> State:
        return {"error": torch.zeros(parameter.shape, dtype=parameter.working_dtype)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return Payload((state["error"].add_(gradient).view(-1),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].clone().view(parameter.shape)


def hi_top_k(density: float = 0.01, *, steps: int = 30) -> HiTopK:
    """Return HiTopKComm (Shi et al., MLSys'21, arXiv 2010.10458): exact in a host, `ms_top_k` of its sum between.

    The ranks of a host add up shards of the gradient, each one of them; each rank sends the largest elements of its
    shard to the ranks of the same index on the other hosts, and the sum of these selections to its own host. So a host
    sends one selection, and not one for each rank to each rank. The unsent rest stays with the rank that has the shard:
    the method has its own memory, and `attach` adds none. It has a reduction of its own, which "auto" chooses.

    With one rank on each host it is an all-gather of `ms_top_k`; on one host nothing is left out, since nothing
    crosses a network. If hosts have different numbers of ranks, the smallest has one shard for each of its ranks, and
    further ranks of other hosts only contribute and receive. docs/guides/ok-topk-and-hitopk.md has the details.

    Args:
        density: fraction of its sum that a host sends, in (0, 1].
        steps: number of steps of the search for a threshold, see `ms_top_k`.

    Raises:
        ValueError: a density outside (0, 1]; no steps.

    Example:
        >>> sync = thinwire.attach(model, dense=thinwire.compress.hi_top_k(0.01))        # doctest: +SKIP
    """
    return HiTopK(ms_top_k(density, steps=steps))
