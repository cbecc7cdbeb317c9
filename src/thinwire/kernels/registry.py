"""The registry of kernels, one row each: twins, the size from which the compiled one runs, and sample calls.

To add a kernel, define its twins, by one name, and add a row here: dispatch, compilation in the background, warm-up,
the names in `thinwire.kernels` and the tests that twins give equal bits follow from it.

Sizes were measured with one thread (docs/internals/kernels.md): numbers of ids, elements of matrices, bytes of buffers.
Below 1024 nothing is worth the half second in which a process imports numba. Rows are in the order in which kernels are
compiled: first what an exact sum needs.
"""

# With underscores, since every other name is one of `thinwire.kernels`.
from thinwire.kernels import dispatch as _inputs
from thinwire.kernels import samples as _samples
from thinwire.kernels.dispatch import register as _row
from thinwire.kernels.reference import codes as _reference_codes
from thinwire.kernels.reference import quantize as _reference_quantize
from thinwire.kernels.reference import rows as _reference
from thinwire.kernels.reference import select as _reference_select
from thinwire.kernels.samples import Sample as _sample

# The modules of twins, by name: importing one imports numba or Triton, which only a call of a twin may do.
_CPU_CODES, _GPU_CODES = "thinwire.kernels.cpu.codes", "thinwire.kernels.gpu.codes"
_CPU_IDS, _GPU_IDS = "thinwire.kernels.cpu.ids", "thinwire.kernels.gpu.ids"
_CPU_ROWS, _GPU_ROWS = "thinwire.kernels.cpu.rows", "thinwire.kernels.gpu.rows"
_CPU_UNION, _GPU_UNION = "thinwire.kernels.cpu.union", "thinwire.kernels.gpu.union"
_CPU_SELECT, _CPU_QUANTIZE = "thinwire.kernels.cpu.select", "thinwire.kernels.cpu.quantize"
_GPU_BITS, _GPU_FIND, _GPU_HASH = "thinwire.kernels.gpu.bits", "thinwire.kernels.gpu.find", "thinwire.kernels.gpu.hash"

nonzero_rows = _row(
    _reference.nonzero_rows,
    cpu=_CPU_ROWS,
    gpu=_GPU_FIND,
    from_size=1 << 12,
    knows=_inputs.is_matrix,
    samples=_samples.of_rows(lambda rows, ids: _sample(rows)),
)
nonzero_rows_into = _row(
    _reference.nonzero_rows_into,
    gpu=_GPU_FIND,
    samples=_samples.of_rows(lambda rows, ids: _sample(rows, ids, ids.clone())),
)
deal = _row(
    _reference.deal,
    cpu=_CPU_IDS,
    gpu=_GPU_IDS,
    from_size=1 << 10,
    knows=_inputs.can_deal,
    samples=_samples.each(lambda: _sample(_samples.ids(), 2, 0)),
)
checksum = _row(
    _reference_codes.checksum,
    cpu=_CPU_CODES,
    gpu=_GPU_CODES,
    from_size=1 << 12,
    knows=_inputs.are_words,
    samples=_samples.each(lambda: _sample(_samples.codes(8))),
)
pack_bits = _row(
    _reference_codes.pack_bits,
    cpu=_CPU_CODES,
    gpu=_GPU_BITS,
    from_size=1 << 10,
    knows=_inputs.are_ids,
    samples=_samples.each(lambda: _sample(_samples.ids(), 5)),
)
unpack_bits = _row(
    _reference_codes.unpack_bits,
    cpu=_CPU_CODES,
    gpu=_GPU_BITS,
    from_size=1 << 12,
    knows=_inputs.are_bytes,
    samples=_samples.each(lambda: _sample(_reference_codes.pack_bits(_samples.ids(), 5))),
)
elias_fano_encode = _row(
    _reference_codes.elias_fano_encode,
    cpu=_CPU_CODES,
    gpu=_GPU_CODES,
    from_size=1 << 10,
    knows=_inputs.are_ids,
    samples=_samples.each(lambda: _sample(_samples.ids(), 100)),
)
elias_fano_decode = _row(
    _reference_codes.elias_fano_decode,
    cpu=_CPU_CODES,
    gpu=_GPU_CODES,
    from_size=1 << 10,
    knows=_inputs.are_bytes,
    samples=_samples.each(lambda: _sample(_reference_codes.elias_fano_encode(_samples.ids(), 100), 3, 100)),
)
gather_rows = _row(
    _reference.gather_rows,
    cpu=_CPU_ROWS,
    gpu=_GPU_ROWS,
    size=_inputs.elements_of(1),
    from_size=1 << 20,
    knows=_inputs.can_gather,
    samples=_samples.of_rows(lambda rows, ids: _sample(rows, ids)),
)
scatter_rows = _row(
    _reference.scatter_rows,
    cpu=_CPU_ROWS,
    gpu=_GPU_ROWS,
    size=_inputs.elements_of(2),
    from_size=1 << 17,
    knows=_inputs.can_scatter,
    samples=_samples.of_rows(lambda rows, ids: _sample(rows, ids, rows[:2].clone())),
)
union_places = _row(
    _reference.union_places,
    cpu=_CPU_UNION,
    gpu=_GPU_UNION,
    size=_inputs.elements_of_pieces,
    from_size=1 << 11,
    knows=_inputs.can_unite,
    samples=_samples.each(
        lambda: _sample([_samples.ids(), _samples.ids()], 5),  # by a bitmap
        lambda: _sample([_samples.ids(), _samples.ids()], 1 << 40),  # by a merge
    ),
)
sum_rows_at = _row(
    _reference.sum_rows_at,
    cpu=_CPU_ROWS,
    gpu=_GPU_ROWS,
    size=_inputs.elements_of_sum,
    from_size=1 << 13,
    knows=_inputs.can_sum_at,
    profiled_as="sum",
    samples=_samples.of_rows(lambda rows, ids: _sample([(ids, rows[:2])], *rows.shape, rows.dtype)),
)
sum_rows = _row(
    _reference.sum_rows,
    cpu=_CPU_ROWS,
    gpu=_GPU_ROWS,
    size=_inputs.ids_of_pieces,
    from_size=1 << 11,
    knows=_inputs.can_sum,
    profiled_as="sum",
    samples=_samples.of_rows(lambda rows, ids: _sample([(ids, rows[:2])] * 2)),
)
dealt_ids = _row(
    _reference.dealt_ids,
    cpu=_CPU_IDS,
    gpu=_GPU_IDS,
    size=_inputs.elements_of(1),
    from_size=1 << 10,
    knows=_inputs.can_undeal,
    samples=_samples.each(lambda: _sample(0, _samples.ids(), 2, 0)),
)
mix = _row(
    _reference.mix,
    cpu=_CPU_IDS,
    gpu=_GPU_IDS,
    from_size=1 << 10,
    knows=_inputs.are_ids,
    samples=_samples.each(lambda: _sample(_samples.ids(), 0)),
)
owner_by_hash = _row(
    _reference.owner_by_hash,
    cpu=_CPU_IDS,
    gpu=_GPU_IDS,
    from_size=1 << 10,
    knows=_inputs.are_ids,
    samples=_samples.each(lambda: _sample(_samples.ids(), 2, 0)),
)
group_by_owner = _row(
    _reference.group_by_owner,
    cpu=_CPU_IDS,
    gpu=_GPU_IDS,
    from_size=1 << 10,
    knows=_inputs.are_ids,
    samples=_samples.each(lambda: _sample(_samples.ids(), 5)),
)
hierarchical_hash = _row(
    _reference.hierarchical_hash,
    cpu=_CPU_IDS,
    gpu=_GPU_HASH,
    from_size=1 << 10,
    knows=_inputs.are_ids,
    samples=_samples.each(lambda: _sample(_samples.ids(), 2, 0, parallel_slots=6, serial_slots=1)),
)
top_magnitudes = _row(
    _reference_select.top_magnitudes,
    cpu=_CPU_SELECT,
    from_size=1 << 12,
    knows=_inputs.have_magnitudes,
    samples=_samples.of_values(
        lambda values, steps: _sample(values, 10),
        lambda values, steps: _sample(values, 1),  # in two passes
        lambda values, steps: _sample(steps, 10),  # of equal ones
    ),
)
leading_magnitudes = _row(
    _reference_select.leading_magnitudes,
    cpu=_CPU_SELECT,
    from_size=1 << 12,
    knows=_inputs.have_magnitudes,
    samples=_samples.of_values(lambda values, steps: _sample(values, 10)),
)
select_at_least = _row(
    _reference_select.select_at_least,
    cpu=_CPU_SELECT,
    from_size=1 << 12,
    knows=_inputs.have_magnitudes,
    samples=_samples.of_values(lambda values, steps: _sample(values, 2.0)),
)
count_at_least = _row(
    _reference_select.count_at_least,
    cpu=_CPU_SELECT,
    from_size=1 << 14,
    knows=_inputs.have_magnitudes,
    samples=_samples.of_values(lambda values, steps: _sample(values, 2.0)),
)
magnitude_moments = _row(
    _reference_select.magnitude_moments,
    cpu=_CPU_SELECT,
    from_size=1 << 12,
    knows=_inputs.have_magnitudes,
    equal_bits=False,
    samples=_samples.of_values(lambda values, steps: _sample(values)),
)
sum_log_magnitudes = _row(
    _reference_select.sum_log_magnitudes,
    cpu=_CPU_SELECT,
    from_size=1 << 12,
    knows=_inputs.have_magnitudes,
    equal_bits=False,
    samples=_samples.of_values(lambda values, steps: _sample(values)),
)
largest_of_blocks = _row(
    _reference_quantize.largest_of_blocks,
    cpu=_CPU_QUANTIZE,
    from_size=1 << 10,
    knows=lambda values, block: _inputs.are_floats(values),
    samples=_samples.of_values(lambda values, steps: _sample(values, 8)),
)
quantize = _row(
    _reference_quantize.quantize,
    cpu=_CPU_QUANTIZE,
    from_size=1 << 10,
    knows=lambda values, steps, block, levels, bits, seed: _inputs.are_floats(values, steps),
    samples=_samples.of_values(
        lambda values, steps: _sample(values, steps, 8, 7, 8, None),
        lambda values, steps: _sample(values, steps, 8, 7, 4, 0),
    ),
)
add_quantized = _row(
    _reference_quantize.add_quantized,
    cpu=_CPU_QUANTIZE,
    size=lambda packed, steps, block, levels, bits, total: total.numel(),
    from_size=1 << 10,
    knows=lambda packed, steps, block, levels, bits, total: _inputs.are_floats(total, packed, steps),
    samples=_samples.of_values(
        lambda values, steps: _sample(_samples.codes(8), steps, 8, 7, 8, values),
        lambda values, steps: _sample(_samples.codes(4), steps, 8, 7, 4, values),
    ),
)
pack_signs = _row(
    _reference_quantize.pack_signs,
    cpu=_CPU_QUANTIZE,
    from_size=1 << 10,
    knows=lambda values, phase: _inputs.are_floats(values),
    samples=_samples.of_values(lambda values, steps: _sample(values, 0)),
)
add_signs = _row(
    _reference_quantize.add_signs,
    cpu=_CPU_QUANTIZE,
    size=lambda packed, scales, block, total: total.numel(),
    from_size=1 << 10,
    knows=lambda packed, scales, block, total: _inputs.are_floats(total, packed, scales),
    samples=_samples.of_values(lambda values, steps: _sample(_samples.codes(1), steps, 8, values)),
)
mean_of_blocks = _row(
    _reference_quantize.mean_of_blocks,
    cpu=_CPU_QUANTIZE,
    from_size=1 << 10,
    knows=lambda values, block: _inputs.are_floats(values),
    equal_bits=False,
    samples=_samples.of_values(lambda values, steps: _sample(values, 8)),
)
round_to_powers = _row(
    _reference_quantize.round_to_powers,
    cpu=_CPU_QUANTIZE,
    from_size=1 << 10,
    knows=lambda values, base, seed: _inputs.are_floats(values),
    samples=_samples.of_values(lambda values, steps: _sample(values, 1, 0)),
)
add_from_table = _row(
    _reference_quantize.add_from_table,
    cpu=_CPU_QUANTIZE,
    size=lambda codes, table, steps, block, total: total.numel(),
    from_size=1 << 10,
    knows=lambda codes, table, steps, block, total: _inputs.are_floats(total, codes, table, steps),
    samples=_samples.of_values(lambda values, steps: _sample(_samples.codes(), values[:256].clone(), steps, 8, values)),
)
