"""Wrappers: compressors around another one, and functions that look inside."""

from dataclasses import dataclass

from torch import Tensor

from thinwire.compress.base import Compressor, Memory, Packed, Parameter, Payload, State, Summable


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor that changes what another one compresses, or when.

    Payloads are the inner compressor's; its state is stored under ``"inner"``. Packing and sums are left to it, too:
    `code_of` returns the compressor that does them. A wrapper with its own payloads, such as `deep_reduce`, is its own
    ``code``.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ValueError(f"{self.inner!r} is no compressor: pass one such as thinwire.compress.top_k(0.01)")

    @property
    def memory(self) -> Memory:
        return self.inner.memory

    @property
    def code(self) -> Compressor:
        """The compressor that decodes the payloads, see `code_of`."""
        return code_of(self.inner)

    def init(self, parameter: Parameter) -> State:
        return {"inner": self.inner.init(parameter)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return self.inner.compress(gradient, parameter, state["inner"])

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return self.code.decompress(payload, parameter)

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        self.inner.finish(mean, parameter, state["inner"])


def unwrapped(compressor: Compressor, state: State) -> tuple[Compressor, State]:
    """Return the compressor inside all wrappers, and its state."""
    return unwrapped(compressor.inner, state["inner"]) if isinstance(compressor, Wrapper) else (compressor, state)


def core_of(compressor: Compressor) -> Compressor:
    """Return the compressor inside all wrappers: the method."""
    return core_of(compressor.inner) if isinstance(compressor, Wrapper) else compressor


def code_of(compressor: Compressor) -> Compressor:
    """Return the code of a compressor's payloads: the method inside all wrappers, or that of a warm-up.

    Its type decides what can be done with them: ``isinstance(code_of(compressor), Summable)``.
    """
    return compressor.code if isinstance(compressor, Wrapper) else compressor


def packed_code(compressor: Compressor) -> Packed:
    """Return the code of a compressor whose payloads travel as bytes."""
    code = code_of(compressor)
    assert isinstance(code, Packed), f"payloads of {compressor.name} do not travel as bytes"
    return code


def summable_code(compressor: Compressor) -> Summable:
    """Return the code of a compressor whose payloads are added up inside an all-reduce."""
    code = code_of(compressor)
    assert isinstance(code, Summable), f"payloads of {compressor.name} cannot be added up"
    return code
