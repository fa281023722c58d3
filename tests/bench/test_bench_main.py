import sys
from types import ModuleType

import pytest

from bench import __main__ as bench_main
from fmoe.errors import UserError


@pytest.fixture
def probe(monkeypatch):
    """A benchmark ``probe`` whose main is whatever the test puts there."""
    module = ModuleType("probe_benchmark")
    monkeypatch.setitem(sys.modules, "probe_benchmark", module)
    monkeypatch.setitem(bench_main.BENCHMARKS, "probe", "probe_benchmark")
    return module


def test_passes_arguments_and_exit_code(probe):
    seen = []
    probe.main = lambda argv: seen.extend(argv) or 3
    assert bench_main.main(["probe", "--rounds", "2"]) == 3
    assert seen == ["--rounds", "2"]


def test_user_error_is_one_line(probe, capsys):
    def main(argv):
        raise UserError("rounds=1 must be at least 2")

    probe.main = main
    assert bench_main.main(["probe"]) == 2
    assert capsys.readouterr().err == "python -m bench: error: rounds=1 must be at least 2\n"


def test_unknown_name_lists_the_known(probe, capsys):
    assert bench_main.main(["prob"]) == 2
    error = capsys.readouterr().err
    assert "'prob'" in error
    assert ", probe" in error
    assert "did you mean 'probe'?" in error


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2)])
def test_help_lists_benchmarks_without_importing_them(argv, code, capsys, monkeypatch):
    monkeypatch.setitem(bench_main.BENCHMARKS, "heavy", "no_such_module")
    assert bench_main.main(argv) == code
    assert ", heavy" in capsys.readouterr().out
