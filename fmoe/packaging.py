"""Entry points and extras: of installed packages or, in a checkout that is not installed, of its pyproject.toml."""

import functools
import re
import tomllib
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires
from pathlib import Path
from typing import Any


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group. An installed one replaces the checkout's of the same name."""
    declared = _project().get("entry-points", {}).get(group, {})
    found = {name: EntryPoint(name, value, group) for name, value in declared.items()}
    for entry in entry_points(group=group):
        found[entry.name] = entry
    return list(found.values())


def extras() -> dict[str, list[str]]:
    """Return a dict from each pip extra of fmoe to the packages that it lists.

    If an extra includes another one, as ``test`` includes ``pretrain``, the other's packages are left out.
    """
    declared: list[tuple[str, str]] = []  # (extra, requirement)
    try:
        for requirement in requires("fmoe") or []:
            extra = re.search(r"""extra == ["']([\w-]+)""", requirement)
            if extra:
                declared.append((extra[1], requirement))
    except PackageNotFoundError:
        for name, requirements in _project().get("optional-dependencies", {}).items():
            declared += [(name, requirement) for requirement in requirements]
    found: dict[str, list[str]] = {}
    for name, requirement in declared:
        package = re.match(r"[\w.-]+", requirement)
        if package and package[0] != "fmoe":
            found.setdefault(name, []).append(package[0])
    return found


@functools.cache
def _project() -> dict[str, Any]:
    """Return the table ``[project]`` of the checkout that this file is in; empty outside of one."""
    path = Path(__file__).parent.parent / "pyproject.toml"
    if not path.is_file():
        return {}
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == "fmoe" else {}
