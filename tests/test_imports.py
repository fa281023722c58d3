"""Imports point downwards: pretrain -> megatron_patch -> fmoe, and inside fmoe floor by floor, in no circle.

Imports in functions and under TYPE_CHECKING count.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("fmoe", "megatron_patch", "pretrain")  # from the lowest
# Rooms (files and packages) of fmoe from the lowest floor to the highest: imports go to the same floor or a lower one.
FLOORS = (
    {"bits", "errors", "files", "packaging", "random", "runtime"},
    {"shards", "routing", "kernels"},
    {"metrics", "losses", "recording", "auxiliary", "layout", "activations"},
    {"gates", "experts", "exchange", "optim"},
    {"kernels.gates", "build", "soft"},
    {"moe"},
    {"parallel", "convert", "fastmoe"},
    {"commands", "cli", "__init__", "__main__"},
)


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of ours that its imports name."""
    paths = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in paths.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno} imports relatively"
                names.update(
                    f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in paths else node.module
                    for alias in node.names
                )
        graph[name] = {n for n in names if n in paths and n != name}
    return graph


GRAPH = import_graph()
PAIRS = sorted((name, to) for name, found in GRAPH.items() for to in found)


def room(name: str) -> str:
    if name == "fmoe.kernels.gates":  # kernels for whole gates are above the gates, which never see them
        return "kernels.gates"
    return name.split(".")[1] if "." in name else "__init__"


def test_there_is_no_circle():
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> None:
        if name in path:
            pytest.fail(" -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            path.append(name)
            for to in sorted(GRAPH[name]):
                visit(to)
            done.add(path.pop())

    for name in GRAPH:
        visit(name)


def test_packages_import_lower_ones():
    order = {package: place for place, package in enumerate(PACKAGES)}
    wrong = [pair for pair in PAIRS if order[pair[0].split(".")[0]] < order[pair[1].split(".")[0]]]
    assert not wrong


def test_rooms_of_fmoe_import_the_same_floor_or_a_lower_one():
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    inside = [(a, b) for a, b in PAIRS if a.split(".")[0] == b.split(".")[0] == "fmoe"]
    unknown = {room(name) for pair in inside for name in pair} - floor.keys()
    assert not unknown, "name their floor"
    wrong = [(a, b) for a, b in inside if floor[room(a)] < floor[room(b)]]
    assert not wrong


def test_only_the_package_imports_its_porch():
    importers = {a for a, b in PAIRS if b.startswith("fmoe.fastmoe") and not a.startswith("fmoe.fastmoe")}
    assert importers == {"fmoe"}
