"""Codes of vectors of values: by curves through the sorted values (Xu et al., NeurIPS'21)."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.base import Packed, Parameter, Payload, State
from thinwire.compress.packing import PartSpec, packed_bytes, unpack
from thinwire.errors import CorruptMessageError
from thinwire.kernels.reference.codes import pack_integers, unpack_integers


@dataclass(frozen=True)
class SortedCurves(Packed):
    """A compressor that sorts values, largest first, and sends curves through them, and their order.

    ``parts``: the largest magnitude, and the coefficients of curves through values divided by it; the ends of pieces
    (int32), the first where signs change; the index of each sorted value, in ceil(log2 n) bits (uint8). Where that
    would be no fewer bytes than the values, ``parts`` are these.

    Curves are the best ones by least squares, so what is lost has no larger norm than the values, and error feedback
    around it converges. Receivers evaluate them by products and sums in a fixed order: the same bits on all machines.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Number of pieces, and of coefficients of each."""

    @abstractmethod
    def fit(self, values: np.ndarray) -> np.ndarray:
        """Return the coefficients of a piece [n], n at least 1."""

    @abstractmethod
    def evaluate(self, coefficients: np.ndarray, count: int) -> np.ndarray:
        """Return the values of a piece, for any finite coefficients."""

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        if len(self.part_specs(parameter)) == 1:
            return Payload((flat.clone(),))
        order, scale = flat.argsort(descending=True, stable=True), flat.abs().max()
        scaled = np.zeros(flat.numel())
        if 0.0 < float(scale) < math.inf:  # receivers refuse one that is not finite
            scaled = flat[order].double().numpy() / float(scale)
        ends = self._ends(scaled, int((flat > 0).sum()))
        zeros = np.zeros(self.shape[1])
        fitted = [self.fit(piece) if piece.size else zeros for piece in np.split(scaled, sorted(ends))]
        numbers = torch.cat([scale.view(1), torch.from_numpy(np.concatenate(fitted)).to(flat.dtype)])
        mapping = torch.from_numpy(pack_integers(order.numpy(), _bits(flat.numel())))
        return Payload((numbers, torch.tensor(ends, dtype=torch.int32), mapping))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        if len(payload.parts) == 1:
            return payload.parts[0].clone().view(parameter.shape)
        numbers, ends, mapping = payload.parts
        ordered = np.empty(parameter.numel)
        fitted = numbers[1:].double().view(self.shape).numpy()
        for piece, coefficients in zip(np.split(ordered, sorted(ends.tolist())), fitted, strict=True):
            piece[:] = self.evaluate(coefficients, piece.size).clip(-1.0, 1.0)
        order, _ = unpack_integers(mapping.numpy(), parameter.numel, _bits(parameter.numel))
        values = torch.empty(parameter.numel, dtype=parameter.working_dtype)
        values[torch.from_numpy(order)] = torch.from_numpy(ordered).mul_(numbers[0]).to(values.dtype)
        return values.view(parameter.shape)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        numbers = PartSpec(parameter.working_dtype, 1 + math.prod(self.shape))
        mapping = PartSpec(torch.uint8, (parameter.numel * _bits(parameter.numel) + 7) // 8)
        fitted = (numbers, PartSpec(torch.int32, self.shape[0] - 1), mapping)
        plain = (PartSpec(parameter.working_dtype, parameter.numel),)
        return fitted if parameter.numel < 1 << 31 and packed_bytes(fitted) < packed_bytes(plain) else plain

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        parts = unpack(data, self.part_specs(parameter))
        if len(parts) == 1:
            return Payload(parts)
        numbers, ends, mapping = parts
        order, spare = unpack_integers(mapping.numpy(), parameter.numel, _bits(parameter.numel))
        if not bool(torch.isfinite(numbers).all()) or int(ends.min()) < 0 or int(ends.max()) > parameter.numel:
            raise CorruptMessageError(f"curves with coefficients {numbers.tolist()} and pieces to {ends.tolist()}")
        if spare or order.max() >= parameter.numel or np.unique(order).size != parameter.numel:
            raise CorruptMessageError(f"an order of {parameter.numel} values that is no permutation")
        return Payload(parts)

    def _ends(self, values: np.ndarray, sign_change: int) -> list[int]:
        """Cut where signs change, then where a piece is farthest from its chord (Lemma 1), the farthest first."""
        ends = [sign_change]
        result = [self._farthest(values, *part) for part in ((0, sign_change), (sign_change, values.size))]
        while len(ends) < self.shape[0] - 1:
            distance, start, cut, stop = best = max(result)
            if distance <= 0.0:
                break
            result.remove(best)
            result += [self._farthest(values, start, cut), self._farthest(values, cut, stop)]
            ends.append(cut)
        return ends + [values.size] * (self.shape[0] - 1 - len(ends))

    def _farthest(self, values: np.ndarray, start: int, stop: int) -> tuple[float, int, int, int]:
        """Return the largest distance of a piece from its chord, start, cut and stop; 0 for one of too few points."""
        piece, fewest = values[start:stop], self.shape[1] + 1
        if piece.size < 2 * fewest:
            return 0.0, start, start, stop
        chord = piece[0] + (piece[-1] - piece[0]) * np.arange(piece.size) / (piece.size - 1)
        distances = np.abs(piece - chord)[fewest : piece.size - fewest + 1]
        index = int(distances.argmax())
        return float(distances[index]), start, start + fewest + index, stop


@dataclass(frozen=True)
class Polynomial(SortedCurves):
    """DeepReduce's Fit-Poly (arXiv 2102.03112): sorted values as Chebyshev polynomials by pieces, and their order.

    Sorted values make a smooth curve on either side of zero. Coefficients and ends of pieces are 224 bytes by default;
    the order costs ceil(log2 n) bits a value, so that `int8` is smaller from 256 values on.

    Args:
        degree: degree of the polynomials, 5 in the paper.
        pieces: number of pieces, positive and negative ones together, 8 in the paper's Figure 3.

    Raises:
        ValueError: a degree outside [0, 12]; less than 2 pieces or more than 256.

    Example:
        >>> from thinwire.compress.methods.select import top_k
        >>> compressor = top_k(0.01, values=polynomial())
        >>> compressor.packed_bytes(Parameter("weight", (100_000,)))  # 1000 values in 10 bits each, and ids in 8.6
        2624
    """

    degree: int = 5
    pieces: int = 8

    def __post_init__(self) -> None:
        degree, pieces = self.degree, self.pieces
        if not (isinstance(degree, int) and 0 <= degree <= 12 and isinstance(pieces, int) and 2 <= pieces <= 256):
            raise ValueError(
                f"polynomial has a degree from 0 to 12 and 2 to 256 pieces, not {degree!r} and {pieces!r}; the paper"
                " takes 5 and shows 8"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.pieces, self.degree + 1

    @property
    def name(self) -> str:
        return f"polynomial({self.degree}, {self.pieces})"

    def fit(self, values: np.ndarray) -> np.ndarray:
        basis = np.polynomial.chebyshev.chebvander(_grid(values.size), self.degree)
        return np.linalg.lstsq(basis.T @ basis, basis.T @ values, rcond=None)[0]

    def evaluate(self, coefficients: np.ndarray, count: int) -> np.ndarray:
        return np.polynomial.chebyshev.chebval(_grid(count), coefficients)


polynomial = Polynomial


@dataclass(frozen=True)
class DoubleExponential(SortedCurves):
    """DeepReduce's Fit-DExp (arXiv 2102.03112): sorted values as ``a e^(bx) + c e^(dx)``, and their order.

    Positive and negative values have a curve each, because a sparsifier leaves a gap between them that one curve would
    bridge: 8 coefficients in all. As of `polynomial` the order costs ceil(log2 n) bits a value. A term is ``c, c q,
    c q^2, ...`` from either end; its coefficients are c and ``1 - q``, which is negative if it is read from the other
    end.
    """

    name = "double_exponential"
    shape = 2, 4

    def fit(self, values: np.ndarray) -> np.ndarray:
        """Fit the rates by an integral equation, then the factors.

        ``y = a e^(bx) + c e^(dx)`` solves ``y = -bd IIy + (b + d) Iy + rx + s``, I the integral from 0: so b and d are
        the roots of ``t^2 - (b + d) t + bd``, whose coefficients are a linear regression.
        """
        last = max(1, values.size - 1)
        position, once = np.arange(values.size) / last, _integral(values) / last
        basis = np.stack([_integral(once) / last, once, position, np.ones_like(position)], axis=1)
        product, total = np.linalg.lstsq(basis, values, rcond=None)[0][:2]
        root = np.sqrt(max(total * total + 4.0 * product, 0.0))
        rates = np.array([total - root, total + root]) / 2.0
        shrinks = np.copysign(-np.expm1(-np.abs(rates) / last), -rates)
        terms = np.stack([_powers(shrink, values.size) for shrink in shrinks], axis=1)
        first, second = np.linalg.lstsq(terms, values, rcond=None)[0]
        return np.array([first, shrinks[0], second, shrinks[1]])

    def evaluate(self, coefficients: np.ndarray, count: int) -> np.ndarray:
        first, shrink, second, other = coefficients
        return first * _powers(shrink, count) + second * _powers(other, count)


double_exponential = DoubleExponential


def _bits(count: int) -> int:
    """Return the bits of an index among ``count``."""
    return max(0, count - 1).bit_length()


def _grid(count: int) -> np.ndarray:
    return (2.0 * np.arange(count) - (count - 1)) / max(1, count - 1)


def _integral(values: np.ndarray) -> np.ndarray:
    return np.cumsum(np.concatenate([[0.0], (values[1:] + values[:-1]) / 2.0]))


def _powers(shrink: float, count: int) -> np.ndarray:
    """Return 1, q, q^2, ... of ``q = 1 - |shrink|``, reversed if that is negative, by products in their order."""
    factors = np.full(count, min(max(1.0 - abs(shrink), 0.0), 1.0))
    factors[:1] = 1.0
    powers = np.multiply.accumulate(factors)
    return powers[::-1] if np.signbit(shrink) else powers
