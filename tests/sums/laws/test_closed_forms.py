"""The closed forms of the papers, held against the bytes of large uniform tensors and the numbers they publish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references import closed_forms as forms
from thinwire import schemes
from thinwire.lab import ledger
from thinwire.rows.formats import Header
from thinwire.schemes import Scheme

pytestmark = pytest.mark.slow

NUM_ELEMENTS = 1 << 20  # a part of 1/8 has more than 2^16 elements, so that an index has 4 bytes
NUM_BYTES = 4 * NUM_ELEMENTS
DENSITY = 0.05


@pytest.fixture(autouse=True)
def no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Header, "NUM_BYTES", 0)


def uniform_ids(world_size: int, density: float = DENSITY) -> list[Tensor]:
    """As many on every rank: the closed forms are for equal densities."""
    generator = torch.Generator().manual_seed(world_size)
    count = round(density * NUM_ELEMENTS)
    return [torch.randperm(NUM_ELEMENTS, generator=generator)[:count].sort().values for _ in range(world_size)]


def densification(ids: list[Tensor]) -> Callable[[int], float]:
    """Exact, of the first ranks."""
    return lambda ranks: torch.cat(ids[:ranks]).unique().numel() / (DENSITY * NUM_ELEMENTS)


def busiest(scheme: Scheme, ids: list[Tensor]) -> int:
    return max(ledger.sent_bytes(scheme, ids, NUM_ELEMENTS, 1, torch.float32))


def close(expected: float) -> object:
    return pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_schemes_send_what_their_papers_say(world_size: int) -> None:
    n, ids = world_size, uniform_ids(world_size)
    gamma = densification(ids)
    coo = {"push_format": "coo", "pull_format": "coo"}
    balanced = forms.balanced_parallelism(n, NUM_BYTES, DENSITY, gamma(n))
    assert busiest(replace(schemes.BALANCED_PARALLELISM, **coo), ids) == close(balanced)
    assert busiest(schemes.SPARSE_PS, ids) == close(forms.sparse_ps(n, NUM_BYTES, DENSITY, gamma(n), skewness=1))
    assert busiest(schemes.SPARSE_PS, ids) == close(balanced), "uniform ids are not skewed"
    assert busiest(schemes.SPARCML_SPLIT, ids) == close(balanced), "recursive doubling sends each part once too"
    central = forms.hierarchical_centralization(n, NUM_BYTES, DENSITY, gamma)
    assert busiest(schemes.HIERARCHICAL_CENTRALIZATION, ids) == close(central)
    for scheme in (schemes.AGSPARSE, schemes.AGSPARSE_RING, schemes.AGSPARSE_HIERARCHY):
        assert busiest(scheme, ids) == close(forms.agsparse(n, NUM_BYTES, DENSITY))
    for scheme in (schemes.DENSE, schemes.DENSE_RING, schemes.DENSE_HALVING_DOUBLING, schemes.DENSE_PS):
        assert busiest(scheme, ids) == close(forms.dense_ring(n, NUM_BYTES))
    ring = replace(schemes.BALANCED_PARALLELISM, communication="ring")
    pull = balanced - forms.balanced_parallelism(n, NUM_BYTES, DENSITY, 0)
    push = forms.ring_incremental_parallelism_push(n, NUM_BYTES, DENSITY, gamma)
    assert busiest(ring, ids) == close(push + pull)


@pytest.mark.parametrize("world_size", [2, 8])
def test_published_zen(world_size: int) -> None:
    """In 16 bits M is half as many bytes, and an index twice as much of them."""
    ids = uniform_ids(world_size)
    for dtype, value_bits in ((torch.float32, 32), (torch.bfloat16, 16)):
        sent = max(ledger.sent_bytes(schemes.ZEN_ELEMENTS, ids, NUM_ELEMENTS, 1, dtype))
        num_bytes = NUM_ELEMENTS * value_bits // 8
        gamma = densification(ids)(world_size)
        assert sent == close(forms.zen_published(world_size, num_bytes, DENSITY, gamma, value_bits))
    gamma, share = 4.0, 7 / 8
    assert forms.zen_published(8, 1, 0.1, gamma) == pytest.approx(share * (2 * 0.1 + 0.4 + 1 / 32))
    assert forms.zen_published(8, 1, 0.1, gamma, value_bits=16) == pytest.approx(share * (3 * 0.1 + 0.4 + 1 / 16))


def test_sparse_ps_where_all_elements_are_in_one_range() -> None:
    """s = n: the owner of that range receives all pushes and sends all pulls."""
    n, generator = 4, torch.Generator().manual_seed(0)
    first = NUM_ELEMENTS // n
    ids = [(torch.rand(first, generator=generator) < n * DENSITY).nonzero().flatten() for _ in range(n)]
    sent = ledger.sent_bytes(schemes.SPARSE_PS, ids, NUM_ELEMENTS, 1, torch.float32)
    published = forms.sparse_ps(n, NUM_BYTES, DENSITY, densification(ids)(n), skewness=n)
    assert sum(sent[1:]) + sent[0] == close(published)  # all that the others send goes to rank 0


def test_one_server_that_broadcasts() -> None:
    """By a binomial tree, as the pull of a hierarchy with one owner: the server sends its sum ceil(log2 n) times."""
    n = 8
    ids = uniform_ids(n)
    gamma = densification(ids)(n)
    scheme = replace(schemes.SPARSE_PS, servers=1, pull_communication="hierarchy")
    sent = ledger.sent_bytes(scheme, ids, NUM_ELEMENTS, 1, torch.float32)
    pull = forms.sparse_ps_broadcast(n, NUM_BYTES, DENSITY, gamma, skewness=1) - forms.sparse_ps(
        n, NUM_BYTES, DENSITY, 0, skewness=1
    )
    assert sent[0] == close(pull)
    assert sent[1] > sent[7] == close(2 * DENSITY * NUM_BYTES), "the last one only pushes"
    two = forms.sparse_ps_broadcast(n, 1.0, 0.1, 2.0, skewness=3, scatter_allgather=True)
    assert two == pytest.approx(2 * 7 / 8 * 3 * 0.1 + 2 * (2 * 7 / 8) * 0.2)


def test_omnireduce() -> None:
    """Of blocks of 1024 bytes with an index of 4; here one has 1 or 2 bytes, which is less than 1 %."""
    n, generator = 8, torch.Generator().manual_seed(0)
    ids = [(torch.rand(4096, generator=generator) < 0.2).nonzero().flatten() for _ in range(n)]  # rows of a block each
    sent = ledger.sent_bytes(schemes.OMNIREDUCE, ids, 4096, 256, torch.float32)
    density = sum(map(len, ids)) / n / 4096
    gamma = torch.cat(ids).unique().numel() / 4096 / density
    published = forms.omnireduce(n, 4096 * 1024, density, gamma)
    assert sum(sent) / n == close(published)
    skewed = forms.omnireduce(n, 1.0, 0.1, 2.0, skewness=3, summed_skewness=2, block_bytes=4)
    assert skewed == pytest.approx(7 / 8 * (0.3 + 0.4) * 2)


def test_agsparse_is_dense_at_40_gpus_for_nmt() -> None:
    """ZEN, section 2.4: "more than 40 GPUs" at a density of 2.47 %."""
    n = 1 / 0.0247
    assert n == pytest.approx(40.5, abs=0.05)
    assert forms.agsparse(40, 1, 0.0247) < forms.dense_ring(40, 1)
    assert forms.agsparse(41, 1, 0.0247) > forms.dense_ring(41, 1)


@pytest.mark.parametrize(("world_size", "overlap"), [(4, 0.27), (8, 0.058), (16, 0.013), (32, 0.0031)])
def test_balanced_parallelism_beats_the_hierarchy_from_some_overlap_on(world_size: int, overlap: float) -> None:
    def hierarchy_over_parallelism(at: float) -> float:
        gamma = forms.independent_densification(at)
        central = forms.hierarchical_centralization(world_size, 1, 0.01, gamma)
        return central / forms.balanced_parallelism(world_size, 1, 0.01, gamma(world_size))

    assert hierarchy_over_parallelism(overlap * 0.96) < 1 < hierarchy_over_parallelism(overlap * 1.04)


def test_extremes_of_overlap() -> None:
    """Full overlap: log2 n against less than 2. None: n - 1 against (n - 1)(1 + 1 / n), in units of 2 M d."""
    n, unit = 8, 2 * 0.01

    def none(ranks: int) -> float:
        return float(ranks)

    assert forms.hierarchical_centralization(n, 1, 0.01, lambda ranks: 1.0) / unit == pytest.approx(3)
    assert forms.balanced_parallelism(n, 1, 0.01, 1.0) / unit == pytest.approx(2 * 7 / 8)
    assert forms.hierarchical_centralization(n, 1, 0.01, none) / unit == pytest.approx(7)
    assert forms.balanced_parallelism(n, 1, 0.01, n) / unit == pytest.approx(7 * (1 + 1 / 8))


def test_lemma_1_no_push_under_parallelism_is_less_than_the_direct_one() -> None:
    for overlap in (0.01, 0.3, 1.0):
        gamma = forms.independent_densification(overlap)
        direct = forms.balanced_parallelism(16, 1, 0.01, 0)
        assert forms.ring_incremental_parallelism_push(16, 1, 0.01, gamma) >= direct * (1 - 1e-12)


def test_a_parameter_server_on_machines_of_its_own() -> None:
    """Fewer servers than workers are the bottleneck; more do not help, since a worker has to send it all."""
    assert forms.byteps(8, 100, 1) == 800
    assert forms.byteps(8, 100, 4) == 200
    assert forms.byteps(8, 100, 8) == forms.byteps(8, 100, 32) == 100
    assert forms.byteps(8, 100, 8) < forms.dense_ring(8, 100)
    with pytest.raises(ValueError, match="0 servers cannot sum"):
        forms.byteps(8, 100, 0)


def test_the_hierarchy_has_a_closed_form_for_powers_of_two_only() -> None:
    assert forms.hierarchical_centralization(1, 100, 0.1, lambda ranks: 1.0) == 0
    for world_size in (0, 3, 12):
        with pytest.raises(ValueError, match="for powers of two"):
            forms.hierarchical_centralization(world_size, 100, 0.1, lambda ranks: 1.0)
