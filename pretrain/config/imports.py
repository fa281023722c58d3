"""Import of plugins: modules in which users register gates, experts, exchanges, callbacks, optimizers and the like.

Plugins are the entries of ``run.imports``, and the entry points of the group ``fmoe.plugins`` of installed packages.
"""

import hashlib
import importlib
import importlib.util
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from fmoe.errors import UserError, one_line
from pretrain.config.keys import check_path
from pretrain.config.recipe import Recipe

GROUP = "fmoe.plugins"
"""Group of the entry points that are imported whenever a recipe is used."""

_FILES: dict[Path, ModuleType] = {}  # files imported by this process


def import_plugins(recipe: Recipe, folder: Path | None = None) -> Recipe:
    """Import the plugins of a recipe, once per process. Return the recipe with absolute paths of plugin files.

    An entry of ``run.imports`` is a file ``path/to/name.py``, or the name of a module. A relative path is looked up in
    the current folder, then in ``folder``. A module that is not installed may be a file or package in these folders.

    Args:
        folder: folder of the recipe's file; None if there is no file.

    Raises:
        UserError: an entry is not found, or an import raised.
    """
    _import_entry_points()
    folders = [Path.cwd(), *([] if folder is None else [folder.absolute()])]
    found = tuple(_import(entry, folders) for entry in recipe.run.imports)
    return replace(recipe, run=replace(recipe.run, imports=found))


def import_stored(recipe: Recipe, folder: Path) -> None:
    """Import the plugins of a run's stored recipe: files by absolute path, and installed modules.

    Code inside the run's folder is refused: a folder received from elsewhere must not run code that it contains.

    Args:
        folder: folder of the run.

    Raises:
        UserError: an entry is a relative path, is inside the folder, or is not found; or an import raised.
    """
    _import_entry_points()
    folder = folder.resolve()
    for entry in recipe.run.imports:
        path = Path(entry) if _is_file(entry) else _origin(entry)
        if path is not None and (not path.is_absolute() or path.resolve().is_relative_to(folder)):
            raise UserError(
                f"{folder}: run.imports={entry} must be an installed module, or an absolute path outside this folder: "
                "code in the folder is not trusted"
            )
        _import(entry, [])


def digests(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of each file or package in ``run.imports``, keyed by path. Installed modules are left out.

    Args:
        recipe: a recipe from `import_plugins`, whose paths are absolute.
    """
    found = {}
    for entry in recipe.run.imports:
        if _is_file(entry):
            path = Path(entry)
            files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
            content = b"".join(file.read_bytes() for file in files)
            found[entry] = hashlib.sha256(content).hexdigest()
    return found


def _import_entry_points() -> None:
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            package = f" in the installed package {point.dist.name}" if point.dist else ""
            raise UserError(f"{point.value}, an entry point of {GROUP}{package}, raised {_reason(error)}") from error


def _is_file(entry: str) -> bool:
    return entry.endswith(".py") or "/" in entry


def _origin(module: str) -> Path | None:
    """Return the file from which Python would import a module; None if there is none.

    Raises:
        UserError: importing a parent package fails.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise _failed(module, error) from error
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _import(entry: str, folders: list[Path]) -> str:
    """Import an entry of ``run.imports``; return the name of an installed module, or the file's absolute path."""
    check_path("run.imports", entry)
    names = [entry] if _is_file(entry) else [f"{entry.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    files = [folder / name for folder in folders or [Path.cwd()] for name in names]
    found = next((path.resolve() for path in files if path.is_file() and (folders or _is_file(entry))), None)
    origin = None if _is_file(entry) else _origin(entry)
    try:
        # A module in one of the folders is imported as a file, even if Python finds it there too.
        if origin is not None and origin != found:
            importlib.import_module(entry)
            return entry
        if found is not None:
            _import_file(found)
            return str(found)
    except (Exception, SystemExit) as error:
        raise _failed(entry if found is None else str(found), error) from error
    kind = "not a file" if _is_file(entry) else "not an installed module"
    if folders and not Path(entry).is_absolute():
        kind = kind if _is_file(entry) else "neither an installed module nor a file or package"
        kind += f" in {' or '.join(map(str, dict.fromkeys(folders)))}"
    raise UserError(f"run.imports={entry} is {kind}")


def _import_file(path: Path) -> None:
    """Execute a file as a module."""
    if path in _FILES:
        return
    is_package = path.name == "__init__.py"
    stem = path.parent.name if is_package else path.stem
    # A unique name, which hides no installed module.
    name = f"{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if is_package else None
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))  # the file may import others of its folder
    # Files of this folder that were imported as plugins are not executed again.
    plugins = {file.stem: plugin for file, plugin in _FILES.items() if file.parent == path.parent}
    plugins = {stem: plugin for stem, plugin in plugins.items() if stem not in sys.modules}
    sys.modules.update(plugins)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
        for stem in plugins:
            del sys.modules[stem]
    _FILES[path] = module


def _failed(entry: str, error: BaseException) -> UserError:
    if isinstance(error, UserError):
        return UserError(f"run.imports={entry}: {error}")
    return UserError(f"run.imports={entry} raised {_reason(error)}")


def _reason(error: BaseException) -> str:
    """Return an error as one line, with the file and line that raised it."""
    text = one_line(error, with_type=True)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f", at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{text}{where}"
