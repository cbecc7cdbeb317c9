"""Selected elements by an exact scheme: one vector for each dtype, sums of what all ranks selected, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopback import run_ranks
from tests.compress.reductions.averaged import COMPRESSORS, SCHEME, train
from thinwire import compress
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.memory import with_memory
from thinwire.compress.reductions.base import Task
from thinwire.compress.reductions.by_scheme import ByScheme, _chosen

PARAMETERS = (Parameter("a", (4, 3)), Parameter("b", (5,), torch.float64), Parameter("c", (2, 2)), Parameter("d", (0,)))


def whole_numbers(parameter: Parameter, rank: int, step: int) -> Tensor:
    """Whose sums are exact in any order."""
    seeded = torch.Generator().manual_seed(100 * step + 10 * rank + parameter.numel)
    return torch.randint(-8, 9, parameter.shape, generator=seeded).to(parameter.working_dtype)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_elements_are_the_exact_mean_of_each_parameter(world_size: int) -> None:
    compressor = with_memory(compress.top_k(1.0))
    outcomes = run_ranks(world_size, lambda network: train(network, compressor, SCHEME, PARAMETERS, 2, whole_numbers))
    for step in range(2):
        for index, parameter in enumerate(PARAMETERS):
            dense = torch.stack([whole_numbers(parameter, rank, step) for rank in range(world_size)])
            for outcome in outcomes:
                result = outcome.get().results[step][index]
                assert torch.equal(result.mean, dense.sum(0) * (1.0 / world_size))
                assert result.mean.dtype == parameter.working_dtype
                assert result.payload_bytes == parameter.numel * (8 + parameter.working_dtype.itemsize)


def test_each_task_has_the_density_that_this_rank_selected() -> None:
    def gradient(parameter: Parameter, rank: int, step: int) -> Tensor:
        dense = torch.zeros(parameter.shape)
        dense.view(-1)[rank : 2 * rank + 1] = 2.0
        return dense

    parameters = [Parameter("a", (10,)), Parameter("b", (20,))]
    outcomes = run_ranks(
        3, lambda network: train(network, with_memory(compress.threshold(1.0)), SCHEME, parameters, 1, gradient)
    )
    for rank, outcome in enumerate(outcomes):
        first, second = outcome.get().results[0]
        assert (first.density, second.density) == ((rank + 1) / 10, (rank + 1) / 20)
        assert torch.equal(first.mean.nonzero().view(-1), torch.arange(5))
        assert first.mean[2] == pytest.approx(4 / 3), "which ranks 1 and 2 have"


@pytest.mark.parametrize("values", [None, compress.bf16(), compress.lossless()])
def test_coded_values_are_decoded_before_they_are_added(values: Compressor | None) -> None:
    parameter = Parameter("a", (6,))
    gradient = torch.tensor([0.0, 3.0, -5.0, 1.0, 0.5, -9.0])
    compressor = compress.top_k(0.5) if values is None else compress.top_k(0.5, values=values)
    ids, plain = _chosen(Task(compressor, parameter, gradient, compressor.init(parameter)))
    assert ids.tolist() == [1, 2, 5]
    assert plain.dtype == torch.float32
    assert torch.equal(plain, gradient[ids])


def test_what_selects_no_elements_is_refused() -> None:
    ByScheme("zen").check(COMPRESSORS["top_k"], PARAMETERS[0])
    with pytest.raises(ValueError, match=r"a scheme such as zen adds up ids and values, .* \(parameter 'a'\): use a"):
        SCHEME.check(COMPRESSORS["qsgd"], PARAMETERS[0])
