"""A kernel is its definitions and one row: what each row must hold, and that nothing else knows of a kernel."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import dispatch, warm
from thinwire.kernels.dispatch import KERNELS, Kernel
from thinwire.kernels.reference import codes as reference_codes
from thinwire.kernels.reference import floats as reference_floats
from thinwire.kernels.reference import quantize as reference_quantize
from thinwire.kernels.reference import rows as reference
from thinwire.kernels.reference import select as reference_select
from thinwire.kernels.samples import Sample

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)

REFERENCES = (reference, reference_codes, reference_floats, reference_quantize, reference_select)


def definitions(module: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module that need not be importable here: numba or Triton may be missing."""
    found = find_spec(module)
    assert found is not None, module
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def parameters(definition: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)]


@every_kernel
def test_twins_have_the_name_and_the_parameters_of_the_reference(kernel: Kernel) -> None:
    expected = list(inspect.signature(kernel.reference).parameters)
    for module in filter(None, (kernel.cpu, kernel.gpu)):
        assert set(parameters(definitions(module)[kernel.name])) >= set(expected), module


@every_kernel
def test_a_kernel_is_a_name_of_the_package(kernel: Kernel) -> None:
    assert kernel.name in kernels.__all__
    assert inspect.signature(getattr(kernels, kernel.name)) == inspect.signature(kernel.reference)


def test_every_twin_has_a_row() -> None:
    """A public function with the name and the parameters of a kernel, but without a row, would never run."""
    names = {name for module in REFERENCES for name in definitions(module.__name__) if not name.startswith("_")}
    references = {module.__name__ for module in REFERENCES}
    modules = {module.name for module in walk_packages(kernels.__path__, f"{kernels.__name__}.")}
    twins = {name for module in modules - references for name in definitions(module)}
    assert names & twins == set(KERNELS)


def test_a_row_is_all_that_a_new_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to its twins, and warming up compiles it."""

    def double(ids: Tensor) -> Tensor:
        return ids * 2

    calls = []
    twin = SimpleNamespace(double=lambda ids: calls.append(ids.numel()) or ids + ids)
    monkeypatch.setattr(dispatch, "KERNELS", {})
    monkeypatch.setattr(dispatch, "_module", {"cpu": twin}.__getitem__)
    monkeypatch.setattr(dispatch, "has_numba", lambda: True)
    monkeypatch.setattr(dispatch, "compilation", lambda: None)
    call = dispatch.register(double, lambda: Sample(torch.arange(7)), cpu="cpu", from_size=4, knows=dispatch.are_ids)
    for size in (3, 4):
        assert torch.equal(call(torch.arange(size)), 2 * torch.arange(size))
    assert call(torch.ones(9)).sum() == 18, "not of a type that the twin knows"
    assert calls == [4]
    warm.warm_up()
    assert calls == [4, 7]


def test_the_table_of_the_documentation_is_that_of_the_registry() -> None:
    page = Path(__file__).parents[2] / "docs" / "internals" / "kernels.md"
    table = "\n".join(["| Kernel | numba from | Triton |", "|---|---:|---|", *map(line, KERNELS.values())])
    assert table in page.read_text(), f"docs/internals/kernels.md must have:\n{table}"


def line(kernel: Kernel) -> str:
    return f"| `{kernel.name}` | {kernel.from_size if kernel.cpu else '-'} | {'yes' if kernel.gpu else '-'} |"
