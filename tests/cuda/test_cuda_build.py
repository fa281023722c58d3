"""Compiling, caching and locking, on a machine without a GPU, with a kernel that compiles at once."""

import contextlib
import ctypes
import logging
import sys
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from small_kernels import FILL, sources

from fmoe.cli import run
from fmoe.commands import build as cli
from fmoe.commands import info
from fmoe.errors import BuildError, UserError
from fmoe.experts import FFNExperts
from fmoe.kernels import backends, compilation
from fmoe.kernels.cuda import build, launch, nvrtc, tuning
from fmoe.kernels.cuda import loader as cuda
from fmoe.kernels.cuda.launch import DeviceLauncher, Geometry
from fmoe.kernels.native import loader as native

pytest.importorskip("cuda.core", reason="cuda.core is not installed", exc_type=ImportError)

ARCHS = ("sm_80", "sm_90", "sm_100")


def fresh(monkeypatch):
    """As a process that has loaded nothing."""
    monkeypatch.setattr(cuda, "_reasons", {})
    monkeypatch.setattr(launch, "launchers", {})
    monkeypatch.setattr(launch, "_arch_of_device", {})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, caplog):
    """The cache of one test, and kernels that are quickly made."""
    caplog.set_level(logging.INFO, "fmoe")
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path / "cache"))
    for name in ("FMOE_CUDA", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "SHIPPED", sources(tmp_path / "src"))
    fresh(monkeypatch)
    monkeypatch.setattr(cuda, "_warned", False)
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch):
    """Files that were compiled, and for what."""
    seen = []
    compile_file = nvrtc.compile_file

    def counting(path, kernels, arch, **options):
        seen.append((path.name, arch))
        return compile_file(path, kernels, arch, **options)

    monkeypatch.setattr(nvrtc, "compile_file", counting)
    return seen


def missing_nvrtc():
    raise BuildError("NVRTC is not found: pip install nvidia-cuda-nvrtc")


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("arch", ARCHS)
def test_built_once_then_from_the_cache(folder, compiled, caplog, arch):
    assert build.cached(arch) is None and not folder.exists()
    path = build.library(arch)
    assert entries(folder) == [path.name] and path.name.startswith(f"cuda-{arch}-")
    ((cubin, symbols),) = build.read(path)
    assert cubin.startswith(b"\x7fELF") and set(symbols) == {"small::fill<float>", "small::fill<double>"}
    assert all(symbol.encode() in cubin for symbol in symbols.values())
    assert build.library(arch) == build.cached(arch) == path and compiled == [("fill.cu", arch)]
    assert build.library(arch, force=True) == path and len(compiled) == 2
    assert f"compiling the CUDA kernels for {arch} with NVRTC" in caplog.text
    assert all(build.cached(other) is None for other in ARCHS if other != arch)


def test_whole_by_its_sum_and_no_archive(folder, tmp_path):
    path = tmp_path / "library.zip"
    path.write_bytes(b"no archive")
    with pytest.raises(BuildError, match="does not load: File is not a zip file"):
        build.read(path)


def test_key(tmp_path, monkeypatch):
    """Sources, headers, instances, architecture and NVRTC, and nothing else."""
    ours = sources(tmp_path / "src")
    found = nvrtc.find()

    def key(arch="sm_90", version=found.version):
        return build._key(ours, arch, nvrtc.Nvrtc(version, found.architectures))

    keys = {key(), key("sm_100"), key(version="99.1")}
    assert key() in keys and len(keys) == 3
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert key() in keys
    (tmp_path / "src" / "value.cuh").write_text("#define VALUE 43\n")
    keys.add(key())
    (tmp_path / "src" / "fill.cu").write_text(FILL + "\n")
    keys.add(key())
    ours.kernels["fill.cu"] = ("small::fill<float>",)
    keys.add(key())
    ours.kernels["fill.cu"] = ("small::fill<float>", "small::fill<double>")
    assert len(keys) == 6


def test_without_nvrtc(monkeypatch, caplog):
    """Kernels that were built in advance are found, whichever NVRTC built them; otherwise the error is one line."""
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "find", missing_nvrtc)
        assert build.cached("sm_90") is None
        with pytest.raises(BuildError, match=r"^NVRTC is not found: pip install nvidia-cuda-nvrtc$"):
            build.library("sm_90")
    path = build.library("sm_90")
    monkeypatch.setattr(nvrtc, "find", missing_nvrtc)
    assert build.library("sm_90") == build.cached("sm_90") == path


@pytest.mark.parametrize(
    ("torch_cuda", "package"),
    [(None, "nvidia-cuda-nvrtc"), ("13.0", "nvidia-cuda-nvrtc"), ("12.8", "nvidia-cuda-nvrtc-cu12")],
)
def test_missing_packages_are_named(monkeypatch, torch_cuda, package):
    from cuda.bindings import nvrtc as bindings

    def not_found():
        raise RuntimeError("libnvrtc.so.13: no such file\nand a page more")

    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(bindings, "nvrtcVersion", not_found)
    with pytest.raises(
        BuildError, match=rf"^NVRTC is not found \(libnvrtc.so.13: no such file\): pip install {package}$"
    ):
        nvrtc.find()
    extra = r"fmoe\[cuda12\]" if torch_cuda == "12.8" else r"fmoe\[cuda\]"
    for damage in (ModuleNotFoundError("no cuda.core"), OSError("libcuda.so.1: cannot open")):
        monkeypatch.setattr(nvrtc.importlib, "import_module", MagicMock(side_effect=damage))
        with pytest.raises(BuildError, match=rf"^cuda.core is not usable \({damage}\): pip install '{extra}'$"):
            nvrtc.find()


def test_compile_errors_are_one_line(tmp_path, folder, monkeypatch):
    ours = sources(tmp_path / "src", FILL.replace("T(VALUE)", "nowhere"))
    with pytest.raises(BuildError) as caught:
        build.library("sm_90", ours)
    text = str(caught.value)
    assert "fill.cu(5): error" in text and "nowhere" in text and "\n" not in text
    (log,) = folder.glob("*.failed")
    assert str(log) in text and "compilation log" in log.read_text()
    assert build.last_failure("sm_90", ours) in text and entries(folder) == [log.name]
    assert build.library("sm_90", sources(tmp_path / "src")).exists()


def command(*argv):
    return run("fmoe build", lambda: cli.main(argv))


def cuda_line():
    (line,) = [line for line in info.lines() if line.startswith("cuda: ")]
    return line


def test_command(capsys, compiled):
    assert cuda_line().startswith("cuda: nothing built, NVRTC ") and cuda_line().endswith(", no GPU here")
    assert command("--arch", *ARCHS) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in out] == list(ARCHS) and all("built in" in line for line in out)
    assert cuda_line().startswith("cuda: built for sm_80, sm_90, sm_100, NVRTC ")
    assert command("--arch", "sm_90") == 0 and "sm_90: already built: " in capsys.readouterr().out
    assert command("--arch", "sm_90", "--force", "--verbose") == 0 and "registers" in capsys.readouterr().out
    assert len(compiled) == 4
    assert command("--clean") == 0 and capsys.readouterr().out.startswith("3 entries removed")


def test_command_tells_what_is_wrong(capsys, folder, monkeypatch, tmp_path):
    assert command("--arch", "sm_90", "sm_42") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fmoe build: error: arch='sm_42' is not supported by NVRTC ") and "names: sm_75" in line
    assert not folder.exists()
    assert command("--arch", "sm_90", "--sanitize", "address") == 2
    monkeypatch.setattr(build, "SHIPPED", sources(tmp_path / "src", "wrong"))
    assert command("--arch", "sm_90") == 1
    assert "fill.cu(1): error" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(nvrtc, "find", missing_nvrtc)
    assert command("--arch", "sm_90") == 1
    assert "pip install nvidia-cuda-nvrtc" in capsys.readouterr().err


def on_a_gpu(monkeypatch, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def test_load_compiles_for_the_gpu_at_hand_once(monkeypatch, compiled):
    loaded = []
    monkeypatch.setattr("fmoe.kernels.cuda.launch.DeviceLauncher", lambda codes: loaded.append(codes) or len(loaded))
    monkeypatch.setattr(tuning, "self_check", lambda device: None)
    on_a_gpu(monkeypatch)
    device = torch.device("cuda", 0)
    assert not backends.cuda_is_loaded(device) and cuda.why() is None
    assert cuda.load(device) and cuda.load() and backends.cuda_is_loaded(device) and launch.launcher(device) == 1
    assert compiled == [("fill.cu", "sm_90")] and len(loaded) == 1 and cuda.why() is None
    assert not backends.cuda_is_loaded(torch.device("cpu"))


def test_what_the_driver_does_not_take_is_built_again_once(monkeypatch, compiled, caplog):
    def refuse(codes):
        raise BuildError("the driver refuses the kernels: CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr("fmoe.kernels.cuda.launch.DeviceLauncher", refuse)
    on_a_gpu(monkeypatch)
    assert not cuda.load() and len(compiled) == 2 and "CUDA_ERROR_INVALID_IMAGE" in cuda.why()


def test_kernels_that_fail_their_self_check_are_not_used(monkeypatch, compiled, caplog):
    def crash(device):
        raise RuntimeError("CUDA error:\nan illegal memory access")

    monkeypatch.setattr("fmoe.kernels.cuda.launch.DeviceLauncher", lambda codes: "a launcher")
    for outcome, told in ((lambda device: "the output is off", "the output is off"), (crash, "illegal memory access")):
        fresh(monkeypatch)
        monkeypatch.setattr(tuning, "self_check", outcome)
        on_a_gpu(monkeypatch)
        assert not cuda.load() and not backends.cuda_is_loaded(torch.device("cuda", 0))
        assert told in cuda.why() and "\n" not in cuda.why()
    loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in loud if "no CUDA kernels" in line]) == 1


def test_one_warning_and_the_torch_path(monkeypatch, caplog):
    on_a_gpu(monkeypatch, (4, 2))
    assert not cuda.load() and not cuda.load()
    monkeypatch.setattr(cuda, "architectures", lambda: ["sm_42", "sm_90"])
    assert ", no compiler for sm_42: torch path, sm_90 is built when the first layer is made" in cuda.describe()
    monkeypatch.setattr(nvrtc, "find", missing_nvrtc)
    on_a_gpu(monkeypatch, (9, 0))
    assert cuda.describe().endswith("nvrtc, no compiler for sm_42: torch path, no compiler for sm_90: torch path")
    assert not cuda.load() and cuda.why() == "NVRTC is not found: pip install nvidia-cuda-nvrtc"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "'sm_42' is not supported" in line and line.endswith("layers run on the torch path") and "\n" not in line


def test_off(monkeypatch, caplog):
    on_a_gpu(monkeypatch)
    monkeypatch.setenv("FMOE_CUDA", "0")
    assert not cuda.load() and cuda.why() == "FMOE_CUDA=0 turns it off" and not caplog.records
    assert cuda.describe() == "off (FMOE_CUDA=0): torch path"
    monkeypatch.setenv("FMOE_CUDA", "off")
    with pytest.raises(UserError, match="FMOE_CUDA='off' must be 0"):
        cuda.is_off()


class FakeCore:
    """cuda.core without a driver: notes what it is given."""

    LEGACY_DEFAULT_STREAM = "the default stream"

    def __init__(self, refuses=False):
        self.launched = []
        self.loaded = []
        self._refuses = refuses
        self.ObjectCode = self.Stream = self
        self.contexts = []  # (thread, device), where a context was made current

    def from_cubin(self, cubin, symbol_mapping):
        self.loaded.append(cubin)
        return SimpleNamespace(get_kernel=lambda name: self._kernel(symbol_mapping[name]))

    def _kernel(self, symbol):
        if self._refuses:
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU\nand more")
        return symbol

    def from_handle(self, handle):
        return f"stream {handle}"

    def Device(self, number):
        return SimpleNamespace(set_current=lambda: self.contexts.append((threading.get_ident(), number)))

    def LaunchConfig(self, **options):
        return options

    def launch(self, *arguments):
        self.launched.append(arguments)


def test_launches(monkeypatch):
    """On torch's current stream, by the kernel's symbol, all arguments of 8 bytes."""
    core = FakeCore()
    streams = iter([0, 7, 7])
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=next(streams)))
    launcher = DeviceLauncher(
        [(b"rows", {"fmoe::gather<float, float>": "_Zgather"}), (b"plan", {"fmoe::place": "_Zp"})]
    )
    given = torch.zeros(4)
    geometry = Geometry((3, 1, 1), (32, 8, 1), 64)
    for kernel in ("fmoe::place", "fmoe::gather<float, float>", "fmoe::place"):
        launcher(kernel, geometry, (given, None, 5, True, 0.5), torch.device("cuda", 0))
    assert [stream for stream, *_ in core.launched] == ["the default stream", "stream 7", "stream 7"]
    _, config, kernel, *values, real = core.launched[0]
    assert config == {"grid": (3, 1, 1), "block": (32, 8, 1), "shmem_size": 64} and kernel == b"_Zp"
    assert values == [given.data_ptr(), 0, 5, 1] and isinstance(real, ctypes.c_double) and real.value == 0.5
    assert core.loaded == [b"rows", b"plan"]


def test_every_thread_has_a_context_before_it_launches(monkeypatch):
    """torch's autograd threads too, and threads that have called nothing of CUDA before."""
    core = FakeCore()
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    launcher = DeviceLauncher([(b"plan", {"fmoe::place": "_Zp"})])

    def launch(*devices):
        for number in devices:
            before = len(core.launched)
            device = torch.device("cuda" if number is None else f"cuda:{number}")
            launcher("fmoe::place", Geometry((1, 1, 1), (32, 1, 1)), (1,), device)
            assert len(core.launched) == before + 1
            assert (threading.get_ident(), number or 0) in core.contexts

    launch(None, 0, 0)
    thread = threading.Thread(target=launch, args=(0, 1, 0, 1))
    thread.start()
    thread.join()
    launch(1, 0)
    here = threading.get_ident()
    there = thread.ident
    assert core.contexts == [(here, 0), (there, 0), (there, 1), (here, 1)]


def test_what_the_driver_says_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", FakeCore(refuses=True))
    says = r"^the driver refuses the kernels: CUDA_ERROR_NO_BINARY_FOR_GPU and more$"
    with pytest.raises(BuildError, match=says):
        DeviceLauncher([(b"plan", {"fmoe::place": "_Zp"})])


class OtherCore(FakeCore):
    """A version of cuda.core with another interface."""

    def __init__(self, lacks=(), raises=None):
        super().__init__()
        self._lacks = lacks
        self._raises = raises

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "__dict__").get("_lacks", ()):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def from_cubin(self, cubin, symbol_mapping):
        raise self._raises


@pytest.mark.parametrize(
    ("core", "reason"),
    [
        (OtherCore(lacks=["Stream"]), "cuda.core is not usable (cannot import name 'Stream'"),
        (OtherCore(raises=TypeError("got an unexpected keyword argument")), "cuda.core is not usable (got an unexp"),
        (OtherCore(raises=AttributeError("no 'from_cubin'")), "cuda.core is not usable (no 'from_cubin')"),
    ],
    ids=["a name is missing", "another argument", "another class"],
)
def test_another_cuda_core_is_a_reason(core, reason, monkeypatch, caplog):
    """A layer is made all the same, and runs on the torch path; so it is with errors that nobody has thought of."""
    build.library("sm_90")
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(nvrtc, "find", missing_nvrtc)
    monkeypatch.setattr(native, "load", lambda: False)  # it would be compiled
    on_a_gpu(monkeypatch)
    FFNExperts(2, 4, 6)
    assert cuda.why().startswith(reason) and "\n" not in cuda.why()
    with pytest.raises(UserError, match=r"^backend='cuda' is unavailable: cuda.core is not"):
        FFNExperts(2, 4, 6, backend="cuda")


def test_any_failure_of_loading_is_a_reason(monkeypatch):
    def fail(arch):
        raise KeyError("nowhere")

    monkeypatch.setattr(cuda, "_launcher", fail)
    on_a_gpu(monkeypatch)
    assert not cuda.load() and cuda.why() == "KeyError: 'nowhere'"


def test_a_gpu_that_torch_cannot_start_is_a_reason(monkeypatch, caplog):
    """As in a forked process, or where another process has the GPU for itself; it is said once."""

    def fail(device=None):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess\nand more")

    on_a_gpu(monkeypatch)
    monkeypatch.setattr(native, "load", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    for _ in range(2):
        FFNExperts(2, 4, 6)
        assert cuda.why() == "RuntimeError: Cannot re-initialize CUDA in forked subprocess and more"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    with pytest.raises(UserError, match="backend='cuda' is unavailable: RuntimeError: Cannot re-initialize"):
        FFNExperts(2, 4, 6, backend="cuda")


def test_another_compiler_interface_is_one_line(monkeypatch):
    from cuda import core

    def options(**given):
        raise TypeError("ProgramOptions() got an unexpected keyword argument 'std'")

    monkeypatch.setattr(core, "ProgramOptions", options)
    with pytest.raises(BuildError, match="unexpected keyword argument 'std'"):
        build.library("sm_90")


def test_a_gpu_that_nvrtc_does_not_support_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compilation.loader, "architectures", lambda: ["sm_10"])
    monkeypatch.setattr(nvrtc, "find", lambda: SimpleNamespace(name="NVRTC 13.0", architectures=["sm_80"]))
    (line,) = compilation.compile_cuda_here(force=False, echo=None)
    assert line.startswith("the CUDA kernels were not built: arch='sm_10'")
