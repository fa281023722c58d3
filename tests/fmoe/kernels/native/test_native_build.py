"""Building, caching and locking, with sources that compile in milliseconds."""

import ctypes
import errno
import logging
import os
import shutil
import stat
import threading
from contextlib import suppress

import pytest
import torch
from forks import DIED, values
from small_sources import ANSWER, build_in, compiler, num_compiles, sources

from fmoe.errors import BuildError, UserError
from fmoe.files import sha256
from fmoe.kernels import cache
from fmoe.kernels.native import build
from fmoe.kernels.native import compiler as compilers

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache of one test."""
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def cxx(tmp_path, monkeypatch):
    """A compiler that counts."""
    program = compiler(tmp_path / "counting")
    monkeypatch.setenv("CXX", str(program))
    return program


@pytest.fixture
def waits():
    """Set when somebody begins to wait for a lock."""
    event = threading.Event()
    logger = logging.getLogger("fmoe")

    class Watch(logging.Handler):
        def emit(self, record):
            if "waiting for it" in record.getMessage():
                event.set()

    watch = Watch()
    level = logger.level
    logger.addHandler(watch)
    logger.setLevel(logging.INFO)
    yield event
    logger.removeHandler(watch)
    logger.setLevel(level)


def key_of(path) -> str:
    return path.name.rpartition("-")[0]


def answer(path) -> int:
    return ctypes.CDLL(str(path)).answer()


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_built_once_then_from_the_cache(tmp_path, folder, cxx, caplog):
    caplog.set_level(logging.INFO, "fmoe")
    ours = sources(tmp_path / "src")
    assert build.cached(ours) is None and not folder.exists()
    path = build.library(ours)
    assert answer(path) == 42 and entries(folder) == [path.name]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "compiling the native CPU backend with counting" in caplog.text and str(path) in caplog.text
    assert build.library(ours) == build.cached(ours) == path
    assert num_compiles(cxx) == 1
    assert build.library(ours, force=True) == path and num_compiles(cxx) == 2


def test_eight_processes_compile_once(tmp_path, folder, forks):
    slow = compiler(tmp_path / "slow", before="sleep 0.3")
    sources(tmp_path / "src")
    paths = values(forks.run(8, build_in, str(folder), str(slow), str(tmp_path / "src")))
    assert len(set(paths)) == 1 and answer(paths[0]) == 42
    assert num_compiles(slow) == 1
    assert entries(folder) == [os.path.basename(paths[0])]


def test_a_killed_builder_leaves_the_others_working(tmp_path, folder, forks):
    """SIGKILL in the middle, with its compiler still running, and three others that wait."""
    deadly = compiler(
        tmp_path / "deadly", before=f"mkdir {tmp_path}/first 2>/dev/null && kill -9 $PPID && exec sleep 5"
    )
    sources(tmp_path / "src")
    results = forks.run(4, build_in, str(folder), str(deadly), str(tmp_path / "src"))
    assert results.count(DIED) == 1
    paths = {path for path in results if path != DIED}
    assert len(paths) == 1 and answer(*paths) == 42
    assert num_compiles(deadly) == 2
    assert len(entries(folder)) == 1  # what the dead one left is gone


def test_who_waited_takes_the_failure_too(tmp_path, folder, cxx, waits):
    """So that eight ranks do not fail for half a minute each, one after the other."""
    ours = sources(tmp_path / "src")
    key = key_of(build.library(ours))
    shutil.rmtree(folder)
    caught = []

    def ask():
        try:
            build.library(ours)
        except BuildError as error:
            caught.append(str(error))

    with cache.locked(cache.writable(), key):
        thread = threading.Thread(target=ask)
        thread.start()
        assert waits.wait(60)
        cache.publish_failure(folder, key, "the compiler is out of breath\nand more")
    thread.join(60)
    assert caught == ["the compiler is out of breath"] and num_compiles(cxx) == 1
    assert answer(build.library(ours)) == 42  # who comes later tries again
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_entries_are_built_again(tmp_path, folder, cxx, damage):
    ours = sources(tmp_path / "src")
    path = build.library(ours)
    good = path.read_bytes()
    path.write_bytes(good[:-100] if damage == "truncated" else good[:2000] + bytes([good[2000] ^ 1]) + good[2001:])
    assert build.cached(ours) is None
    again = build.library(ours)
    assert sha256(again) in again.name and answer(again) == 42
    assert num_compiles(cxx) == 2 and len(entries(folder)) == 1


def test_clean_leaves_nothing(tmp_path, folder):
    key = key_of(build.library(sources(tmp_path / "src")))
    (folder / f"building-{key}-dead").mkdir()
    assert cache.clean() == 1 and not list(folder.iterdir())


def test_who_waits_while_the_lock_is_removed_takes_the_new_one(folder, waits):
    seen = []
    folder.mkdir()

    def wait():
        with cache.locked(folder, "key"):
            seen.append((folder / "key.lock").exists())

    with cache.locked(folder, "key"):
        thread = threading.Thread(target=wait)
        thread.start()
        assert waits.wait(60)
        (folder / "key.lock").unlink()  # as `clean` does, with the lock
    thread.join(60)
    assert seen == [True]


def test_old_entries_go(tmp_path, folder):
    paths = []
    for number in range(cache.KEEP + 2):
        paths.append(build.library(sources(tmp_path / "src", ANSWER.replace("42", str(number)))))
        os.utime(paths[-1], (1000 + number, 1000 + number))
        if number == cache.KEEP - 1:
            os.utime(paths[0], (10_000, 1000))  # the oldest, in use
    left = {path for path in paths if path.exists()}
    assert len(left) == cache.KEEP and paths[0] in left and paths[1] not in left


def test_key(tmp_path, monkeypatch):
    """The key covers the inputs of a library, and nothing else."""
    ours = sources(tmp_path / "src")

    def key(**options):
        return build._recipe(ours, options.get("sanitize", ())).key

    first = key()
    assert key() == first
    keys = {first, key(sanitize=("address",))}
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "new", version="g++ 99.1.0")))
    keys.add(key())
    compiler(tmp_path / "new", version="g++ 99.2.0")
    keys.add(key())
    monkeypatch.delenv("CXX")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        keys.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
        keys.add(key())
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "riscv64")
        keys.add(key())
    (tmp_path / "src" / "answer.h").write_text("// a header")
    keys.add(key())
    (tmp_path / "src" / "answer.cpp").write_text(ANSWER + "\n")
    keys.add(key())
    assert len(keys) == 9


def test_without_a_compiler(tmp_path, monkeypatch):
    """A library that was built in advance is found, whichever compiler built it; otherwise the error is one line."""
    ours = sources(tmp_path / "src")
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "empty"))
        with pytest.raises(BuildError, match=r"^no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+ is on PATH"):
            build.library(ours)
    path = build.library(ours)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert build.library(ours) == build.cached(ours) == path
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler"):
        build.library(ours, force=True)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no-such-program -m64", r"no program 'no-such-program' \(CXX='no-such-program -m64'\)"),
        ("false", r"--version prints no version \(exit code 1\)"),
    ],
)
def test_wrong_cxx(tmp_path, monkeypatch, value, says):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(BuildError, match=says):
        build.library(sources(tmp_path / "src"))


def test_clang_where_torch_runs_on_gnu_openmp(tmp_path, monkeypatch):
    """Its calls would find nobody. As c++ it is passed over for a g++, as CXX it is refused."""
    monkeypatch.setattr(compilers, "_openmp", lambda: frozenset({"GOMP_parallel"}))
    clang = tmp_path / "c++"
    clang.write_text("#!/bin/sh\necho 'Debian clang version 14.0.6'\n")
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert compilers.find().command == (shutil.which("g++"),)
    monkeypatch.setenv("CXX", str(clang))
    with pytest.raises(BuildError, match=r"^c\+\+ 14.0.6 does not fit the OpenMP library"):
        compilers.find()
    monkeypatch.setattr(compilers, "_openmp", lambda: frozenset({"GOMP_parallel", "__kmpc_fork_call"}))
    assert not compilers.find().is_gnu


def test_compile_errors_are_one_line(tmp_path, folder):
    ours = sources(tmp_path / "src", "int good;\nint f() { return nowhere; }\nint g() { return here; }\n")
    with pytest.raises(BuildError) as caught:
        build.library(ours)
    text = str(caught.value)
    assert "failed: " in text and "answer.cpp:2:" in text and "nowhere" in text and "\n" not in text
    log = next(folder.glob("*.failed"))
    assert str(log) in text and "here" in log.read_text()
    assert build.last_failure(ours).startswith(text.partition(" (full output")[0])
    assert entries(folder) == [log.name]
    fixed = sources(tmp_path / "src")
    assert build.last_failure(fixed) is None and answer(build.library(fixed)) == 42


def test_the_first_failure_ends_the_other_compilers(tmp_path, monkeypatch):
    """Not waited for, and not left behind."""
    pid = tmp_path / "pid"
    wait = f"while ! [ -s {pid} ]; do sleep 0.02; done"
    hangs = f'case "$*" in *slow.cpp*) echo $$ > {pid}; exec sleep 600;; *) {wait};; esac'
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "hangs", before=hangs)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    ours = sources(tmp_path / "src", "wrong", once=("answer.cpp", "slow.cpp"))
    (tmp_path / "src" / "slow.cpp").write_text("")
    with pytest.raises(BuildError, match=r"answer\.cpp:1:1: error"):
        build.library(ours)
    with suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
        pytest.fail("the other compiler still runs")


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    """Then the folder for temporary files, for this user alone."""
    (tmp_path / "home").write_text("not a folder")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("FMOE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    ours = sources(tmp_path / "src")
    place = tmp_path / "tmp" / f"fmoe-{os.getuid()}"
    path = build.library(ours)
    assert path.parent == place and stat.S_IMODE(place.stat().st_mode) == 0o700
    assert build.cached(ours) == path
    place.chmod(0o750)
    assert build.cached(ours) is None
    with pytest.raises(BuildError, match=rf"^no cache folder: {tmp_path}/home/.*; {place}: other users have access"):
        build.library(ours)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    with pytest.raises(BuildError, match=f"{place}: not a folder"):
        build.library(ours)
    (tmp_path / "elsewhere" / path.name).unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.library(ours).parent == tmp_path / "xdg" / "fmoe"


def test_folders_of_everybody_are_not_trusted(tmp_path, folder):
    ours = sources(tmp_path / "src")
    build.library(ours)
    folder.chmod(0o1777)
    assert build.cached(ours) is None
    with pytest.raises(BuildError, match="all users have write access"):
        build.library(ours)


def test_folders_of_others(tmp_path, folder, monkeypatch):
    """One that is named may be another's, not below a folder where everybody could have made it."""
    ours = sources(tmp_path / "src")
    build.library(ours)
    if os.getuid() == 0:
        os.chown(folder, 4711, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert build.cached(ours) is not None
    folder.parent.chmod(0o1777)
    assert build.cached(ours) is None
    with pytest.raises(BuildError, match="belongs to user"):
        build.library(ours)


def test_a_named_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match=f"^no cache folder: {tmp_path}/file/cache: Not a directory; set FMOE_CACHE"):
        build.library(sources(tmp_path / "src"))


def test_a_disk_that_fills_up_during_a_build(tmp_path, monkeypatch):
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path))

    def fill_up(place):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(BuildError, match=f"^building a library in {tmp_path} failed: No space left.*; set FMOE_CACHE "):
        cache.get("key", fill_up, what="a library", compiler="a compiler")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_are_those_of_torch(tmp_path, num_threads):
    """One OpenMP library in the process: what torch sets holds in ours."""
    if not torch.backends.openmp.is_available():
        pytest.skip("a torch without OpenMP")
    code = """
extern "C" __attribute__((visibility("default"))) int threads() {
  int n = 0;
#pragma omp parallel reduction(+ : n)
  n += 1;
  return n;
}
"""
    loaded = ctypes.CDLL(str(build.library(sources(tmp_path / "src", code))))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert loaded.threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_instruction_sets(tmp_path):
    """Compiled for each; of an inline function that all have, the copy that every processor runs is taken."""
    code = """
#define QUOTE_(a) #a
#define QUOTE(a) QUOTE_(a)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
template <int> __attribute__((noinline)) const char* shared() { return QUOTE(FMOE_ISA); }
extern "C" __attribute__((visibility("default"))) const char* JOIN(own_, FMOE_ISA)() { return QUOTE(FMOE_ISA); }
extern "C" __attribute__((visibility("default"))) const char* JOIN(shared_, FMOE_ISA)() { return shared<0>(); }
"""
    ours = sources(tmp_path / "src", code, once=(), by_isa=("answer.cpp",))
    loaded = ctypes.CDLL(str(build.library(ours)))
    for isa in compilers.isas():
        for kind, expected in (("own", isa), ("shared", "default")):
            function = getattr(loaded, f"{kind}_{isa}")
            function.restype = ctypes.c_char_p
            assert function().decode() == expected
    assert compilers.current_isa() in compilers.isas()


def test_sanitized_builds_are_entries_of_their_own(tmp_path, folder):
    ours = sources(tmp_path / "src")
    both = {build.library(ours, sanitize=("undefined",)), build.library(ours)}
    assert len(both) == 2 and len(entries(folder)) == 2
    assert compilers.sanitizers("undefined, address") == ("address", "undefined")
    with pytest.raises(UserError, match=r"'thread' is unknown: .* address, undefined"):
        compilers.sanitizers("thread")
