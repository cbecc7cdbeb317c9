"""Measure the structure of the library, and fail where a measure is worse than the one kept in ``house.json``.

    python tools/house.py            # prints the measures; the last line is JSON
    python tools/house.py --keep     # writes them to house.json: for a change that is better, or worse for a reason

Lines of code have bounds that ``--keep`` cannot write: those in CONTRIBUTING.md.

Measured are the files that one embedding gradient enters on its way to the wire and back (DDP, one table and one
linear layer, two ranks, under "zen" and under "auto"), lines of each part, Python files of each folder, modules that
have a test file of their name (tests/gradients/test_tables.py is that of gradients/tables.py), import circles, names of
public classes that are defined twice, the longest functions, and the public callables with most parameters.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import json
import os
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
TESTS = ROOT / "tests"
KEPT = Path(__file__).with_suffix(".json")
OUTSIDE = ("lab",)
"""Parts that no training imports."""
BOUNDED = {"code_lines_library", "code_lines_lab"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
MOST_PARAMETERS = 8
WARM_STEPS, TRACED_STEPS = 8, 6
AUTO = "files_of_a_gradient_auto"
"""Few where stock stands, and more where a scheme does, which the machine decides: `--keep` never lowers it."""
STRICT = ("files_of_a_gradient_zen", AUTO, "largest_folder_files", "import_circles",
          "duplicate_class_names", "longest_function_lines", "most_parameters", "modules_without_a_test")  # fmt: skip
"""Measures that must not grow."""
IN_NAMES = re.compile(r"(?<![a-z])(?:(?P<place>places?)|(?P<way>ways?))(?![a-z])|^_?(?P<found>found)$", re.I)
IN_TEXT = re.compile(
    r"(?P<place>(?<!in )(?<!in-)(?<!take )(?<!takes )(?<!took )\bplaces?\b)|(?P<told>\btold\b)|(?P<anew>\banew\b)"
    r"|(?P<of_one>\bof one(?=[.,;:)]))|(?P<those_of>\bthose of\b)",
    re.I,
)
"""House dialect: "place" for an index, a position or a slot, "told" for sent or given, "found" and "way" as names,
"anew" for again, and "of one" and "those of" without their noun. Names are identifiers; texts are comments, strings and
pages."""
BOUNDS = ROOT / "CONTRIBUTING.md"
BOUND = re.compile(r"`(code_lines_\w+)` at most ([\d,]+)")


def sources() -> dict[str, Path]:
    """The modules of thinwire by dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def static_measures() -> dict[str, Any]:
    """What can be read from the sources."""
    modules = sources()
    texts = {name: path.read_text() for name, path in modules.items()}
    gc.disable()  # half a million nodes, none of them garbage: 0.9 s with it off, and 3.3 s
    try:
        trees = {name: ast.parse(text) for name, text in texts.items()}
    finally:
        gc.enable()
    nodes = {name: list(ast.walk(tree)) for name, tree in trees.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    folders = Counter(str(path.parent.relative_to(SOURCE)) for path in modules.values())
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    functions = sorted(
        ((node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}")
        for name, inner in nodes.items()
        for node in inner
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    parts, code = Counter[str](), Counter[str]()
    for name, count in lines.items():
        part = name.split(".")[1] if name.count(".") else "thinwire"
        parts[part] += count
        code[part] += count_code(texts[name], nodes[name])
    parameters = sorted(
        (found for name, tree in trees.items() for found in _parameters(tree, f"{name}.", True)), reverse=True
    )
    of_tests = Counter(path.parent for path in TESTS.rglob("*.py"))
    paths = [path.relative_to(SOURCE) for path in modules.values() if path.name != "__init__.py"]
    tested = sum((TESTS / path.parent / f"test_{path.name}").exists() for path in paths)
    found = circles(nodes)
    twice = sorted(name for name, count in classes.items() if count > 1)
    return {
        "files": len(modules),
        "lines": sum(lines.values()),
        "library_lines": sum(count for part, count in parts.items() if part not in OUTSIDE),
        "code_lines_library": sum(count for part, count in code.items() if part not in OUTSIDE),
        "code_lines_lab": sum(code[part] for part in OUTSIDE),
        "lines_of_parts": dict(sorted(parts.items())),
        "files_of_folders": dict(sorted(folders.items())),
        "largest_folder_files": max(*folders.values(), *of_tests.values()),
        "modules_with_a_test": f"{tested} of {len(paths)}",
        "modules_without_a_test": len(paths) - tested,
        "import_circles": len(found),
        "circles": found,
        "duplicate_class_names": len(twice),
        "duplicate_classes": twice,
        "longest_function_lines": functions[-1][0],
        "longest_functions": [f"{name}: {count}" for count, name in functions[:-6:-1]],
        "most_parameters": next(count for count, name in parameters if name.split(".")[1] not in OUTSIDE),
        "callables_with_most_parameters": [f"{name}: {count}" for count, name in parameters if count > MOST_PARAMETERS],
        "median_function_lines": functions[len(functions) // 2][0],
    }


def dialect_words() -> dict[str, int]:
    """Return how often each word of the house dialect is in the sources and in the documents."""
    counts: Counter[str] = Counter({name: 0 for pattern in (IN_NAMES, IN_TEXT) for name in pattern.groupindex})
    prose = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for path in SOURCE.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            pattern = IN_NAMES if token.type == tokenize.NAME else IN_TEXT if token.type in prose else None
            if pattern is not None:
                counts.update(match.lastgroup or "" for match in pattern.finditer(token.string))
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        counts.update(match.lastgroup or "" for match in IN_TEXT.finditer(path.read_text()))
    return dict(counts)


def _parameters(node: ast.AST, prefix: str, is_public: bool) -> Iterator[tuple[int, str]]:
    """Yield the number of parameters and the name of each public function and method; a class counts as `__init__`."""
    for inner in getattr(node, "body", ()):
        if isinstance(inner, ast.ClassDef):
            yield from _parameters(inner, f"{prefix}{inner.name}.", is_public and not inner.name.startswith("_"))
        elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            takes = inner.args
            names = [each.arg for each in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"])) + bool(takes.vararg) + bool(takes.kwarg)
            if is_public and (not inner.name.startswith("_") or inner.name == "__init__"):
                yield count, f"{prefix}{inner.name}"


def count_code(text: str, nodes: Iterable[ast.AST]) -> int:
    """Return how many lines have code: no comment, docstring or string that stands alone, and no blank line.

    To read it as tokens takes ten times as long, and only a string that goes on in the next line, in code, needs that.
    """
    rows, alone, strings = text.split("\n"), [], []
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            alone.append(node)
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
            strings.append(node)
    prose = {number for node in alone for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    others = [rows[node.lineno - 1 : node.end_lineno] for node in strings if node.lineno not in prose]
    if any(row.endswith("\\") or '"""' in row or "'''" in row for lines in others for row in lines):
        return len(_lines_of_tokens(text) - prose)
    return len({number for number, row in enumerate(rows, 1) if row.lstrip()[:1] not in ("", "#")} - prose)


def _lines_of_tokens(text: str) -> set[int]:
    """Return the lines with tokens of code, those of strings included."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def bounds() -> dict[str, int]:
    """The bounds of lines of code in CONTRIBUTING.md, which no command rewrites."""
    found = {name: int(bound.replace(",", "")) for name, bound in BOUND.findall(BOUNDS.read_text())}
    if found.keys() != BOUNDED:
        raise SystemExit(f"{BOUNDS.name} must have a bound for {', '.join(sorted(BOUNDED))}, and has {found}")
    return found


def circles(modules: dict[str, list[ast.AST]]) -> list[list[str]]:
    """Modules, each with all its nodes, that import each other: strongly connected components of more than one."""
    arrows = {name: set(_imported(nodes, modules)) - {name} for name, nodes in modules.items()}
    order: list[str] = []
    seen: set[str] = set()
    for name in arrows:
        _visit(name, arrows, seen, order)
    back: dict[str, set[str]] = {name: set() for name in arrows}
    for name, targets in arrows.items():
        for target in targets:
            back[target].add(name)
    seen, found = set(), []
    for name in reversed(order):
        component: list[str] = []
        _visit(name, back, seen, component)
        if len(component) > 1:
            found.append(sorted(component))
    return found


def _visit(start: str, arrows: dict[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Depth first, without recursion; appends modules in the order in which they are left."""
    stack = [(start, False)]
    while stack:
        name, left = stack.pop()
        if left:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack += [(target, False) for target in sorted(arrows[name]) if target not in seen]


def _imported(nodes: Iterable[ast.AST], modules: Container[str]) -> Iterator[str]:
    """Modules that this one imports, also inside functions and for type checkers: those hide a circle, and cut none."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("thinwire"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def files_of_a_gradient(scheme: str) -> list[str]:
    """Files entered in an ordinary step on either of two ranks, relative to the package.

    Of the traced steps it is the one with fewest files: in some of the others "auto" tries another scheme, or a wait
    that takes long on a busy machine is looked at.
    """
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_rank, args=(scheme, directory), nprocs=2)
        ranks = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(2)]
    return min((sorted({*first, *second}) for first, second in zip(*ranks, strict=True)), key=len)


def _rank(rank: int, scheme: str, directory: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import thinwire

    entered: list[set[str]] = [set() for _ in range(TRACED_STEPS)]
    place = -1

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        if place >= 0 and event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            entered[place].add(frame.f_code.co_filename)

    threading.setprofile(on_call)  # before any thread of the library begins
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["THINWIRE_KERNELS"] = "reference"  # each compiled twin is a file more, beside the same algorithm
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(200_000, 32, sparse=True), nn.Linear(32, 4)))
    _decide_alike_everywhere()
    sync = thinwire.attach(model, scheme)
    generator = torch.Generator().manual_seed(rank)
    sys.setprofile(on_call)
    for step in range(WARM_STEPS + TRACED_STEPS):
        ids = torch.randint(0, 200_000, (20_000,), generator=generator)
        place = step - WARM_STEPS
        model.zero_grad()
        model(ids).square().mean().backward()
    sys.setprofile(None)
    place = -1
    steps = [[str(Path(name).relative_to(SOURCE)) for name in names] for names in entered]
    (Path(directory) / f"{rank}.json").write_text(json.dumps(steps))
    sync.detach()
    dist.destroy_process_group()


def _decide_alike_everywhere() -> None:
    """Have "auto" decide by a machine that is given, and by no trial: what it takes is not measured here."""
    from thinwire.comm.lane import Lane
    from thinwire.comm.machine import Machine
    from thinwire.tune import prices as choose

    machine = Machine(2e-3, 3e-4, 2e-9, 2e-9, 1e-5, 1e-8, 1e-10, 1e-8, 1e-10, 1e-8, 1e-10)
    Lane.machine = lambda lane: machine  # type: ignore[method-assign]
    choose.MIN_BYTES = float("inf")


def measures() -> dict[str, Any]:
    """All measures of the house."""
    found = static_measures() | {"dialect_words": dialect_words()}
    for scheme in ("zen", "auto"):
        files = files_of_a_gradient(scheme)
        found[f"files_of_a_gradient_{scheme}"] = len(files)
        found[f"gradient_{scheme}"] = files
    return found


def main() -> int:
    """Print the measures; 1 if one is worse than what is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write the measures to house.json")
    arguments = parser.parse_args()
    found = measures()
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if arguments.keep:
        by_machine = {AUTO: max(known.get(AUTO, 0), found[AUTO])}
        known = {name: found[name] for name in STRICT} | by_machine
        KEPT.write_text(json.dumps(known, indent=2) + "\n")
    kept = known | bounds()
    worse = [f"{name} is {found[name]}, and may be {kept[name]}" for name in kept if found[name] > kept[name]]
    for name, value in found.items():
        print(f"{name}: {value}")
    for text in worse:
        print(f"worse: {text}", file=sys.stderr)
    print(json.dumps(found))
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
