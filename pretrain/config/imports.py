"""Import of the modules in which users register gates, experts, exchanges, callbacks, optimizers, kinds of models and
metrics: the entries of ``run.imports``, and the entry points of the group ``fmoe.plugins`` of installed packages."""

import hashlib
import importlib
import importlib.util
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from fmoe.errors import UserError
from pretrain.config.recipe import Recipe

GROUP = "fmoe.plugins"
"""Group of the entry points that are imported whenever a recipe is used."""

_FILES: dict[Path, ModuleType] = {}  # files imported by this process


def import_plugins(recipe: Recipe, folder: Path | None = None) -> Recipe:
    """Import the plugins of a recipe, once per process, and return the recipe with files as absolute paths.

    An entry of ``run.imports`` is a file ``path/to/name.py``, or the name of a module. A file's path is relative to the
    current folder or to ``folder``. A module that is not installed may be a file or package in these folders.

    Args:
        folder: folder of the recipe's file; None for none.

    Raises:
        UserError: an entry is not found, or its import raised.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            package = f" of the installed package {point.dist.name}" if point.dist else ""
            raise UserError(f"{point.value}, an entry point of {GROUP}{package}, raised {_reason(error)}") from error
    folders = [Path.cwd(), *([] if folder is None else [folder.absolute()])]
    found = tuple(_import(entry, folders) for entry in recipe.run.imports)
    return replace(recipe, run=replace(recipe.run, imports=found))


def check_stored(recipe: Recipe, folder: Path) -> None:
    """Raise UserError if a run's stored recipe would import a file in the run's folder, or a relative path: a folder
    from elsewhere must not bring code with it."""
    for entry in recipe.run.imports:
        path = Path(entry)
        if _is_file(entry) and (not path.is_absolute() or path.resolve().is_relative_to(folder.resolve())):
            raise UserError(
                f"run.imports of {folder} has {entry}, which is relative or inside that folder: if you trust this "
                "code, pass its path with --imports"
            )


def digests(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of each file of ``run.imports``, after `import_plugins`."""
    files = [entry for entry in recipe.run.imports if _is_file(entry)]
    return {entry: hashlib.sha256(Path(entry).read_bytes()).hexdigest() for entry in files}


def _is_file(entry: str) -> bool:
    return entry.endswith(".py") or "/" in entry


def _import(entry: str, folders: list[Path]) -> str:
    """Import an entry; return it, or the file's absolute path."""
    names = [entry] if _is_file(entry) else [f"{entry.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    files = [folder / name for folder in folders for name in names]
    found = next((path for path in files if path.is_file()), None)
    if not _is_file(entry):
        try:
            if importlib.util.find_spec(entry) is not None:
                found = None
                importlib.import_module(entry)
                return entry
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or error.name not in _parents(entry):
                raise _failed(entry, error) from error
    if found is None:
        kind = "a file" if _is_file(entry) else "an installed module, or a file or package of this name"
        raise UserError(f"run.imports={entry} is not {kind} in {' or '.join(map(str, dict.fromkeys(folders)))}")
    try:
        _import_file(found.resolve())
    except (Exception, SystemExit) as error:
        raise _failed(str(found), error) from error
    return str(found.resolve())


def _import_file(path: Path) -> None:
    """Execute a file as a module under a unique name, which hides no installed module. While it runs, it can import
    its neighbours."""
    if path in _FILES:
        return
    is_package = path.name == "__init__.py"
    stem = path.parent.name if is_package else path.stem
    name = f"{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if is_package else None
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    _FILES[path] = module


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _failed(entry: str, error: BaseException) -> UserError:
    if isinstance(error, UserError):
        return UserError(f"run.imports={entry}: {error}")
    return UserError(f"run.imports={entry} raised {_reason(error)}")


def _reason(error: BaseException) -> str:
    """Return an error as one line, with the place where it was raised."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f", at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{text}{where}"
