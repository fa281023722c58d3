"""No file that the packages read can run code: the tree has no eval, no loader that could unpickle, and one pickle."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("fmoe", "megatron_patch", "pretrain", "bench", "examples", "data")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
BUILTINS = {"eval", "exec", "__import__", "compile"}
# Of collectives, those that pickle what they send.
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
OBJECTS |= {"send_object_list", "recv_object_list"}
# Its unpickler imports and calls nothing: tests/pretrain/interchange/test_interchange_pickled.py.
RESTRICTED = "pretrain/interchange/pickled.py"


def unsafe(tree):
    """(line, what) of everything in a module that could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in MODULES | OBJECTS:
                yield node.lineno, f"import of {name}"
        if isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            yield node.lineno, node.attr
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {word.arg: word.value for word in node.keywords}
        if called in BUILTINS:
            yield node.lineno, called
        if called == "torch.load" and not is_true(options.get("weights_only")):
            yield node.lineno, "torch.load without weights_only=True"
        for option in ("allow_pickle", "trust_remote_code"):
            if option in options and not is_false(options[option]):
                yield node.lineno, option
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "pandas.read_pickle"):
            yield node.lineno, called


def is_true(node):
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node):
    return isinstance(node, ast.Constant) and node.value is False


def sources():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_unsafe_load_in_the_packages():
    files = [path for path in sources() if path != ROOT / RESTRICTED]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in unsafe(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_one_file_has_pickle_and_imports_nothing_else_unsafe():
    found = [what for _, what in unsafe(ast.parse((ROOT / RESTRICTED).read_text(encoding="utf-8")))]
    assert found == ["import of pickle"]
