"""Loading, once a process, and what is told when that cannot be. The library is a small one."""

import logging
import os
import shutil
import threading

import pytest
from small_sources import compiler, num_compiles, sources

from fmoe.cli import run
from fmoe.commands import build as cli
from fmoe.commands import info
from fmoe.errors import UserError
from fmoe.files import sha256
from fmoe.kernels import cache
from fmoe.kernels.native import build
from fmoe.kernels.native import loader as native

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch, caplog):
    """As a process that has loaded nothing, with a cache of its own and a library that is quickly made."""
    caplog.set_level(logging.INFO, "fmoe")
    monkeypatch.setattr(native, "_outcome", None)
    # The small library has no operators.
    monkeypatch.setattr(native, "register", lambda huge_pages: None, raising=False)
    monkeypatch.setattr(build, "SHIPPED", sources(tmp_path / "src"))
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path / "cache"))
    for name in ("FMOE_NATIVE", "FMOE_HUGE_PAGES", "FMOE_SANITIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cxx(tmp_path, monkeypatch):
    program = compiler(tmp_path / "counting")
    monkeypatch.setenv("CXX", str(program))
    return program


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def native_line():
    (line,) = [line for line in info.lines() if line.startswith("native: ")]
    return line


def test_load(cxx, caplog):
    """Many threads at once; then nothing is looked up again."""
    assert not native.available() and native.why() is None
    assert native_line().startswith("native: not built yet, counting ")
    assert native_line().endswith(" found: built when the first layer is made, or by fmoe build")
    assert num_compiles(cxx) == 0
    results = []
    threads = [threading.Thread(target=lambda: results.append(native.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4 and num_compiles(cxx) == 1
    assert native.is_loaded() and native.available() and native.why() is None
    assert native_line().startswith("native: built (") and str(build.cached()) in native_line()
    cache.clean()
    assert native.load() and native.available() and num_compiles(cxx) == 1


def test_available_from_the_cache(cxx, monkeypatch):
    build.library()
    assert native.available() and native._outcome is None
    monkeypatch.setenv("FMOE_NATIVE", "0")
    assert not native.available()


def test_off(cxx, monkeypatch, caplog):
    monkeypatch.setenv("FMOE_NATIVE", "0")
    assert not native.load() and not native.load()
    assert not warnings(caplog) and native.why() == "FMOE_NATIVE=0 turns it off"
    assert num_compiles(cxx) == 0 and not os.path.exists(os.environ["FMOE_CACHE"])
    assert native_line() == "native: off (FMOE_NATIVE=0): torch path"


def test_wrong_values(monkeypatch):
    monkeypatch.setenv("FMOE_NATIVE", "off")
    with pytest.raises(UserError, match="FMOE_NATIVE='off' must be 0"):
        native.load()
    monkeypatch.setenv("FMOE_NATIVE", "1")
    monkeypatch.setenv("FMOE_HUGE_PAGES", "2")
    with pytest.raises(UserError, match="FMOE_HUGE_PAGES='2' must be 0"):
        native.load()
    monkeypatch.delenv("FMOE_HUGE_PAGES")
    monkeypatch.setenv("FMOE_SANITIZE", "memory")
    with pytest.raises(UserError, match=r"'memory' is unknown: .*FMOE_SANITIZE"):
        native.load()


def test_no_compiler(tmp_path, monkeypatch, caplog):
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert native_line().startswith("native: no C++ compiler: ") and native_line().endswith(": torch path")
    assert not native.load() and not native.load()
    (line,) = warnings(caplog)
    assert "no C++ compiler" in line and "torch path" in line and "\n" not in line
    assert native.why().startswith("no C++ compiler")


def test_compile_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build, "SHIPPED", sources(tmp_path / "src", "int f() { return nowhere; }"))
    assert not native.load() and not native.load()
    begin, line = warnings(caplog)
    assert begin.startswith("compiling") and "answer.cpp:1:" in line and "torch path" in line and "\n" not in line
    assert native_line().startswith("native: not built, ") and "answer.cpp:1:" in native_line()


def test_one_process_of_a_machine_says_it(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-program")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not native.load() and not warnings(caplog) and "no-such-program" in caplog.text


def test_what_does_not_load_is_built_again_once(cxx):
    """Whole by its SHA-256, and no library."""
    good = build.library()
    key = good.name.rpartition("-")[0]
    good.write_bytes(b"no library")
    bad = good.with_name(f"{key}-{sha256(good)}.so")
    good.rename(bad)
    assert build.cached() == bad
    assert native.load() and num_compiles(cxx) == 2
    assert not bad.exists() and build.cached() == good


def test_what_never_loads(tmp_path, cxx, monkeypatch, caplog):
    code = 'int nowhere(); extern "C" __attribute__((visibility("default"))) int f() { return nowhere(); }'
    monkeypatch.setattr(build, "SHIPPED", sources(tmp_path / "src", code))
    assert not native.load() and num_compiles(cxx) == 2
    assert "does not load" in native.why() and "undefined symbol" in native.why()
    assert len([line for line in warnings(caplog) if "torch path" in line]) == 1


def test_a_bad_library_and_no_compiler(tmp_path, monkeypatch):
    path = build.library()
    path.write_bytes(b"no library")
    path.rename(path.with_name(f"{path.name.rpartition('-')[0]}-{sha256(path)}.so"))
    monkeypatch.setenv("CXX", "no-such-program")
    assert not native.load()
    assert "does not load" in native.why() and "no-such-program" in native.why()


def test_a_sanitizer_that_is_not_in_the_process(monkeypatch):
    """Loading would end the process."""
    monkeypatch.setenv("FMOE_SANITIZE", "address")
    assert not native.load() and "LD_PRELOAD" in native.why()


def command(*argv):
    return run("fmoe build", lambda: cli.main(argv))


def test_command(cxx, capsys, caplog):
    assert command("--verbose") == 0
    out = capsys.readouterr().out
    assert str(cxx) in out and "built in " in out and str(build.cached()) in out and "loaded in " in out
    assert command() == 0 and "already built" in capsys.readouterr().out and num_compiles(cxx) == 1
    assert command("--force") == 0 and "built in " in capsys.readouterr().out and num_compiles(cxx) == 2
    assert command("--sanitize", "undefined") == 0
    assert "FMOE_SANITIZE=undefined python" in capsys.readouterr().out
    assert command("--clean") == 0 and capsys.readouterr().out.startswith("2 entries removed")
    assert build.cached() is None


def test_command_tells_what_failed(tmp_path, monkeypatch, capsys):
    assert command("--sanitize", "memory") == 2
    monkeypatch.setattr(build, "SHIPPED", sources(tmp_path / "src", "wrong"))
    assert command() == 1
    lines = capsys.readouterr().err.splitlines()
    assert "'memory' is unknown: --sanitize" in lines[0]
    assert lines[-1].startswith("fmoe build: error: ") and "answer.cpp:1:1: error" in lines[-1]
