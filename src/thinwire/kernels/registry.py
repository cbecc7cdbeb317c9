"""The registry of kernels, one row each: twins, the size from which the compiled one runs, and sample calls.

To add a kernel, define its twins, by one name, and add a row here: dispatch, compilation in the background, warm-up,
the names in `thinwire.kernels` and the tests that twins give equal bits follow from it.

Sizes were measured with one thread (docs/internals/kernels.md): numbers of ids, elements of matrices, bytes of buffers.
Below 1024 nothing is worth the half second in which a process imports numba. Rows are in the order in which kernels are
compiled: first what an exact sum needs.
"""

# With underscores, since every other name is one of `thinwire.kernels`.
from typing import Any as _Any

from thinwire.kernels import dispatch as _inputs
from thinwire.kernels import samples as _samples
from thinwire.kernels.dispatch import register as _row
from thinwire.kernels.reference import codes as _codes
from thinwire.kernels.reference import floats as _floats
from thinwire.kernels.reference import quantize as _quantize
from thinwire.kernels.reference import rows as _rows
from thinwire.kernels.reference import select as _select
from thinwire.kernels.samples import Sample as _sample
from thinwire.kernels.samples import codes as _some_codes
from thinwire.kernels.samples import ids as _some_ids

# The modules of twins, by name: importing one imports numba or Triton, which only a call of a twin may do. And what
# all kernels of a module have in common.
_CPU, _GPU = "thinwire.kernels.cpu.", "thinwire.kernels.gpu."
_OF_CODES: dict[str, _Any] = {"cpu": f"{_CPU}codes"}
_OF_FLOATS: dict[str, _Any] = {
    "cpu": f"{_CPU}floats", "gpu": f"{_GPU}floats", "knows": _inputs.indexable,
    "over": _samples.floats,
}  # fmt: skip
_OF_IDS: dict[str, _Any] = {"cpu": f"{_CPU}ids", "from_size": 1 << 10}
_OF_ROWS: dict[str, _Any] = {"cpu": f"{_CPU}rows", "gpu": f"{_GPU}rows", "over": _samples.rows}
_ON_GPU: dict[str, _Any] = {"gpu": f"{_GPU}rows", "over": _samples.rows}
_SEARCH: dict[str, _Any] = {"gpu": f"{_GPU}find", "over": _samples.rows}
_OF_SELECT: dict[str, _Any] = {"cpu": f"{_CPU}select", "knows": _inputs.have_magnitudes, "over": _samples.values}
_OF_QUANTIZE: dict[str, _Any] = {"cpu": f"{_CPU}quantize", "from_size": 1 << 10, "over": _samples.values}
_CODING: dict[str, _Any] = {**_OF_QUANTIZE, "knows": _inputs.can_code}
_ADDING: dict[str, _Any] = {**_OF_QUANTIZE, "size": _inputs.elements_of(-1)}

nonzero_rows = _row(
    _rows.nonzero_rows, lambda rows, ids: _sample(rows), **_SEARCH,
    cpu=f"{_CPU}rows", from_size=1 << 12, knows=_inputs.is_matrix,
)  # fmt: skip
find_rows = _row(_rows.find_rows, lambda rows, ids: _sample(rows, 2, [rows]), **_SEARCH)
deal = _row(
    _rows.deal, lambda: _sample(_some_ids(), 2, 0), **_OF_IDS,
    knows=lambda ids, world_size, seed: _inputs.are_ids(ids) and world_size <= 1 << 16,
)  # fmt: skip
checksum = _row(
    _codes.checksum, lambda: _sample(_some_codes(8)), **_OF_CODES, from_size=1 << 12,
    knows=lambda buffer: _inputs.are_bytes(buffer) and buffer.numel() % 8 == 0 and buffer.data_ptr() % 8 == 0,
)  # fmt: skip
pack_bits = _row(
    _codes.pack_bits,
    lambda: _sample(_some_ids(), 5),
    **_OF_CODES,
    gpu=f"{_GPU}find",
    from_size=1 << 10,
    knows=_inputs.are_ids,
)
unpack_bits = _row(
    _codes.unpack_bits, lambda: _sample(_codes.pack_bits(_some_ids(), 5)), **_OF_CODES,
    from_size=1 << 12, knows=_inputs.are_bytes,
)  # fmt: skip
find_bits = _row(_rows.find_bits, lambda: _sample(_codes.pack_bits(_some_ids(), 5), 3), gpu=f"{_GPU}find")
elias_fano_encode = _row(
    _codes.elias_fano_encode, lambda: _sample(_some_ids(), 100), **_OF_CODES, from_size=1 << 10, knows=_inputs.are_ids
)
elias_fano_decode = _row(
    _codes.elias_fano_decode, lambda: _sample(_codes.elias_fano_encode(_some_ids(), 100), 3, 100), **_OF_CODES,
    from_size=1 << 10, knows=_inputs.are_bytes,
)  # fmt: skip
gather_rows = _row(_rows.gather_rows, lambda rows, ids: _sample(rows, ids), **_ON_GPU)
scatter_rows = _row(
    _rows.scatter_rows, lambda rows, ids: _sample(rows, ids, rows[:2].clone()), **_OF_ROWS,
    size=_inputs.elements_of(2), from_size=1 << 17, knows=_inputs.can_scatter,
)  # fmt: skip
take_rows = _row(
    _rows.take_rows,
    lambda rows, ids: _sample(rows, ids),
    lambda rows, ids: _sample(rows, ids, rows[:2].clone()),
    **_ON_GPU,
)
put_rows = _row(_rows.put_rows, lambda rows, ids: _sample(rows, ids, rows[:2].clone()), **_ON_GPU)
merge_rows = _row(
    _rows.merge_rows, lambda rows, ids: _sample(ids, rows[:2], 3, 4), **_ON_GPU, profiled_as="sum"
)  # fmt: skip
deal_rows = _row(_rows.deal_rows, lambda: _sample(_some_ids(), 5, 2, 0), gpu=f"{_GPU}ids")
union_positions = _row(
    _rows.union_positions,
    lambda: _sample([_some_ids(), _some_ids()], 5),  # by a bitmap
    lambda: _sample([_some_ids(), _some_ids()], 1 << 40),  # by a merge
    cpu=f"{_CPU}union",
    size=lambda pieces, size: sum([ids.numel() for ids in pieces]),
    from_size=1 << 11, knows=lambda pieces, size: all(map(_inputs.are_ids, pieces)),
)  # fmt: skip
sum_rows_at = _row(
    _rows.sum_rows_at, lambda rows, ids: _sample([(ids, rows[:2])], *rows.shape, rows.dtype),
    cpu=f"{_CPU}rows", over=_samples.rows,
    size=lambda pieces, num_rows, width, *_: num_rows * width, from_size=1 << 13,
    knows=_inputs.can_sum_at, profiled_as="sum",
)  # fmt: skip
sum_rows = _row(
    _rows.sum_rows, lambda rows, ids: _sample([(ids, rows[:2])] * 2), **_OF_ROWS,
    size=lambda pieces, scale=1.0: sum([ids.numel() for ids, _ in pieces]), from_size=1 << 11,
    knows=lambda pieces, scale=1.0: all(_inputs.are_ids(ids) and rows.device.type == "cpu" for ids, rows in pieces),
    profiled_as="sum",
)  # fmt: skip
dealt_ids = _row(
    _rows.dealt_ids, lambda: _sample(0, _some_ids(), 2, 0), **_OF_IDS, gpu=f"{_GPU}ids",
    size=_inputs.elements_of(1), knows=lambda owner, positions, *_: _inputs.are_ids(positions),
)  # fmt: skip
mix = _row(_rows.mix, lambda: _sample(_some_ids(), 0), **_OF_IDS, knows=_inputs.are_ids)
owner_by_hash = _row(_rows.owner_by_hash, lambda: _sample(_some_ids(), 2, 0), **_OF_IDS, knows=_inputs.are_ids)
group_by_owner = _row(_rows.group_by_owner, lambda: _sample(_some_ids(), 5), **_OF_IDS, knows=_inputs.are_ids)
encode_floats = _row(_floats.encode_floats, lambda values: _sample(values), **_OF_FLOATS)
decode_floats = _row(
    _floats.decode_floats, lambda values: _sample(_samples.code_of_equal(values), values.clone()), **_OF_FLOATS
)
estimate_floats = _row(_floats.estimate_floats, lambda values: _sample(values), **_OF_FLOATS)
top_magnitudes = _row(
    _select.top_magnitudes,
    lambda values, steps: _sample(values, 10),
    lambda values, steps: _sample(values, 1),  # in two passes
    lambda values, steps: _sample(steps, 10),  # of equal ones
    **_OF_SELECT,
    from_size=1 << 12,
)
leading_magnitudes = _row(
    _select.leading_magnitudes, lambda values, steps: _sample(values, 10), **_OF_SELECT, from_size=1 << 12
)
select_at_least = _row(
    _select.select_at_least, lambda values, steps: _sample(values, 2.0), **_OF_SELECT, from_size=1 << 12
)
count_at_least = _row(
    _select.count_at_least, lambda values, steps: _sample(values, 2.0), **_OF_SELECT, from_size=1 << 14
)
magnitude_moments = _row(
    _select.magnitude_moments, lambda values, steps: _sample(values), **_OF_SELECT, from_size=1 << 12, equal_bits=False
)
largest_of_blocks = _row(_quantize.largest_of_blocks, lambda values, steps: _sample(values, 8), **_CODING)
quantize = _row(
    _quantize.quantize,
    lambda values, steps: _sample(values, steps, 8, 7, 8, None),
    lambda values, steps: _sample(values, steps, 8, 7, 4, 0),
    **_OF_QUANTIZE,
    knows=lambda values, steps, *settings: _inputs.are_floats(values, steps),
)
add_quantized = _row(
    _quantize.add_quantized,
    lambda values, steps: _sample(_some_codes(8), steps, 8, 7, 8, values),
    lambda values, steps: _sample(_some_codes(4), steps, 8, 7, 4, values),
    **_ADDING,
    knows=_inputs.can_add,
)
pack_signs = _row(_quantize.pack_signs, lambda values, steps: _sample(values, 0), **_CODING)
add_signs = _row(
    _quantize.add_signs, lambda values, steps: _sample(_some_codes(1), steps, 8, values), **_ADDING,
    knows=_inputs.can_add,
)  # fmt: skip
mean_of_blocks = _row(_quantize.mean_of_blocks, lambda values, steps: _sample(values, 8), **_CODING, equal_bits=False)
round_to_floats = _row(
    _quantize.round_to_floats, lambda values, steps: _sample(values.float(), 3, 121, 126, None), **_OF_QUANTIZE,
    knows=lambda values, *settings: _inputs.can_code(values) and values.itemsize == 4,
)  # fmt: skip
add_from_table = _row(
    _quantize.add_from_table,
    lambda values, steps: _sample(_some_codes(), values[:256].clone(), steps, 8, values),
    **_ADDING,
    knows=lambda codes, table, steps, block, total: _inputs.are_floats(total, codes, table, steps),
)
