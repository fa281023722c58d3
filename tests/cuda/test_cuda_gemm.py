"""Choice of GEMMs and of their tile configurations by measurement, with stand-ins for the GPU's clock."""

import contextlib
import json

import pytest
import torch

from fmoe.errors import UserError
from fmoe.kernels.cuda import gemm, triton_gemm, tuning
from fmoe.kernels.cuda.triton_gemm import Config
from fmoe.kernels.cuda.tuning import TuningCache

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = Config(16, 16, 16, 4, 2)


def test_gemm_of_the_environment(monkeypatch):
    assert gemm.requested("auto") == "auto" and gemm.requested("loop") == "loop"
    monkeypatch.setenv("FMOE_GEMM", "grouped")
    assert gemm.requested("auto") == "grouped" and gemm.requested("loop") == "loop"
    monkeypatch.setenv("FMOE_GEMM", "fast")
    with pytest.raises(UserError, match=r"FMOE_GEMM='fast' is not one of auto, grouped, loop, triton"):
        gemm.requested("auto")
    monkeypatch.setattr(gemm.triton_gemm, "why", lambda: "triton is not installed: pip install triton")
    monkeypatch.setenv("FMOE_GEMM", "triton")
    with pytest.raises(UserError, match=r"^FMOE_GEMM='triton' is unavailable: triton is not installed"):
        gemm.requested("auto")
    monkeypatch.delenv("FMOE_GEMM")
    with pytest.raises(UserError, match=r"^gemm='triton' is unavailable: triton is not installed: pip install triton$"):
        gemm.requested("triton")


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda", 0)


def fresh():
    """State of a new process."""
    return TuningCache("gemms.json", lambda variant: variant in gemm.VARIANTS[1:])


@pytest.fixture
def choosing(monkeypatch, tmp_path):
    """`gemm.choose` for tokens on a GPU; what is measured there takes as many ms as its name has letters."""
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(gemm, "_tuned", fresh())
    monkeypatch.setattr(gemm, "_checked", {})
    monkeypatch.setattr(gemm.tuning, "cache_key", lambda x, num_rows, *_: f"a GPU, {num_rows}")
    monkeypatch.setattr(gemm.triton_gemm, "version", lambda: "a version")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gemm.triton_gemm, "why", lambda: "triton is not installed: pip install triton")
    measured = []

    def fastest(variants, run, key):
        for variant in variants:
            run(variant)
        return min(variants, key=len), True

    monkeypatch.setattr(tuning, "fastest", fastest)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def choose(asked="auto", num_rows=8, step="forward", width=16, dtype=torch.float32, begin=0):
        x = torch.zeros(begin + num_rows * width, dtype=dtype)[begin:].view(num_rows, width).as_subclass(OnCuda)
        stacks = torch.zeros(2, 32, width), torch.zeros(2, width, 16)
        return gemm.choose(asked, step, x, num_rows, *stacks, measured.append)

    choose.measured = measured
    choose.file = tmp_path / "gemms.json"
    return choose


def test_gemm_is_measured_once(choosing, monkeypatch):
    """In this process, and in those to come; forward and backward each."""
    assert choosing() == choosing() == "loop" and choosing.measured == ["grouped", "loop"]
    assert choosing("grouped") == "grouped" and len(choosing.measured) == 2
    assert json.loads(choosing.file.read_text()) == {"a GPU, 8, forward": "loop"}
    monkeypatch.setattr(gemm, "_tuned", fresh())
    assert choosing() == "loop" and len(choosing.measured) == 2
    assert choosing(step="backward") == "loop" and len(choosing.measured) == 4
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choosing(num_rows=4) == "grouped" and len(choosing.measured) == 4
    assert choosing("grouped", width=33) == "loop"  # rows of 132 bytes


def test_gemm_of_rows_that_grouped_mm_takes_is_not_used_for_others(choosing, monkeypatch):
    monkeypatch.setattr(tuning, "fastest", lambda variants, run, key: ("grouped", True))
    assert choosing(begin=1) == "loop" and choosing() == "grouped"  # the first rows begin at 4 bytes
    assert choosing(begin=1) == "loop" and choosing() == "grouped"


def test_gemm_under_capture_does_not_wait_if_triton_is_right(choosing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for checked, architecture, dtype, width, expected in (
        ({}, 9, torch.bfloat16, 16, "grouped"),
        ({}, 8, torch.bfloat16, 16, "grouped"),
        ({OnCuda.device: "wrong"}, 8, torch.bfloat16, 16, "grouped"),
        ({OnCuda.device: None}, 8, torch.bfloat16, 16, "triton"),
        ({OnCuda.device: None}, 9, torch.bfloat16, 16, "grouped"),
        ({OnCuda.device: None}, 9, torch.float16, 16, "triton"),
        ({OnCuda.device: None}, 9, torch.bfloat16, 33, "triton"),
    ):
        monkeypatch.setattr(gemm, "_checked", checked)
        monkeypatch.setattr(gemm, "_architecture", lambda device, major=architecture: major)
        assert choosing(width=width, dtype=dtype) == expected, (checked, architecture, dtype, width)
    assert not choosing.measured


def test_tuning_caches_of_several_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path))
    (tmp_path / "gemms.json").write_text('{"a": "loop", "b": "no variant", "c": 3}')
    one = fresh()
    other = fresh()
    assert (one.get("a"), one.get("b"), one.get("c")) == ("loop", None, None) and other.get("d") is None
    one.put("d", "grouped")
    other.put("e", "triton")
    assert json.loads((tmp_path / "gemms.json").read_text()) == {
        **{"a": "loop", "b": "no variant", "c": 3},
        **{"d": "grouped", "e": "triton"},
    }
    (tmp_path / "gemms.json").write_text("[damaged")
    assert fresh().get("a") is None
    monkeypatch.setenv("FMOE_CACHE", "/dev/null/nowhere")
    alone = fresh()
    alone.put("a", "loop")
    assert alone.get("a") == "loop" and fresh().get("a") is None


def test_what_is_not_a_multiple_of_16_bytes_is_not_grouped(monkeypatch):
    """Also where gate and value together fill a multiple, and each alone does not."""
    x, w_in, w_out = (torch.zeros(s, dtype=torch.bfloat16) for s in ((4, 16), (2, 24, 16), (2, 16, 12)))
    assert gemm.choose("grouped", "forward", x, 4, w_in, w_out, None) == "loop"
    assert gemm.choose("grouped", "forward", x, 4, w_in, torch.zeros(2, 16, 24), None) == "grouped"


def test_triton_is_measured_where_it_passes_a_self_check(choosing, monkeypatch, caplog):
    monkeypatch.setattr(gemm.triton_gemm, "why", lambda: None)
    tried = []
    monkeypatch.setattr("fmoe.kernels.cuda.tuning.self_check", lambda device, gemm: tried.append(gemm))
    monkeypatch.setattr(tuning, "fastest", lambda variants, run, key: (variants[-1], True))
    assert choosing() == "triton" and choosing("triton") == "triton" and tried == ["triton"]
    assert json.loads(choosing.file.read_text()) == {"a GPU, 8, forward": "triton"}
    # A process in which it fails does not take what another has measured.
    monkeypatch.setattr(gemm, "_checked", {})
    monkeypatch.setattr("fmoe.kernels.cuda.tuning.self_check", lambda device, gemm: "the output is 3e-01 off")
    assert choosing() == "loop"
    assert caplog.messages == ["Triton's GEMMs are off on cuda:0: they fail a self-check (the output is 3e-01 off)"]
    with pytest.raises(UserError, match=r"gemm='triton' .*cuda:0: .*self-check"):
        choosing("triton")
    monkeypatch.setattr(gemm, "_checked", {})
    monkeypatch.setattr("fmoe.kernels.cuda.tuning.self_check", lambda device, gemm: 1 / 0)
    with pytest.raises(UserError, match=r"a self-check \(ZeroDivisionError: division by zero\)"):
        choosing("triton")


class Event:
    """A CUDA event on a clock that the measured step moves."""

    clock = 0.0

    def __init__(self, enable_timing):
        pass

    def record(self):
        self.at = Event.clock

    def synchronize(self):
        pass

    def elapsed_time(self, done):
        return done.at - self.at


def test_a_candidate_that_raises_is_not_chosen(monkeypatch, tmp_path, caplog):
    """Lack of memory is not stored for the next run, which may have more."""
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    caplog.set_level("INFO", "fmoe")

    def run(candidate):
        Event.clock += len(candidate)
        if candidate == "grouped":
            raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 9.00 GiB")
        if candidate == "bad":
            raise RuntimeError("no kernel image")

    assert tuning.fastest(["grouped", "triton", "loop"], run, "key") == ("loop", False)
    assert "key: grouped does not run (OutOfMemoryError: CUDA out of memory" in caplog.messages[0]
    assert tuning.fastest(["bad", "triton"], run, "key") == ("triton", True)
    assert tuning.fastest(["bad", "grouped"], run, "key") == ("bad", False)
    cache = fresh()
    cache.put("short", "loop", lasts=False)
    cache.put("long", "triton")
    assert (cache.get("short"), fresh().get("short"), fresh().get("long")) == ("loop", None, "triton")


def test_configurations_are_measured_where_that_is_asked_for(monkeypatch, tmp_path, caplog):
    """Once for a size, the fastest kept; those that fail are left out; never while a graph is captured."""
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path))
    valid = triton_gemm._tuned._is_valid
    monkeypatch.setattr(triton_gemm, "_tuned", TuningCache("triton.json", valid))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    best = Config(32, 64, 32, 4, 3)
    monkeypatch.setattr(triton_gemm, "default_config", lambda *_: SMALL)
    monkeypatch.setattr(triton_gemm, "configs", lambda *_: [SMALL, Config(128, 128, 64, 8, 9), best])
    monkeypatch.setattr(tuning, "milliseconds", lambda step: 1.0 if step() == best else 2.0)
    launched = []

    def launch(config):
        if config.stages == 9:
            raise RuntimeError("out of resource: shared memory")
        launched.append(config)
        return config

    like = torch.zeros(2).as_subclass(OnCuda)
    gemms = triton_gemm.TritonGemms(torch.zeros(4, dtype=torch.int32), 64)

    def choose(depth=64, **options):
        return gemms._with_config(launch, like, "multiply", 16, 128, depth, False, **options)

    assert choose() == SMALL and launched == [SMALL]  # not asked for
    monkeypatch.setenv("FMOE_TUNE", "1")
    assert choose(may_tune=False) == SMALL
    assert choose() == best and len(launched) == 2 + 2 + 1
    assert choose() == best and len(launched) == 6
    monkeypatch.setattr(triton_gemm, "_tuned", TuningCache("triton.json", valid))
    monkeypatch.setenv("FMOE_TUNE", "0")
    assert choose() == best  # another process, which does not measure
    monkeypatch.setenv("FMOE_TUNE", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(depth=32) == SMALL
    monkeypatch.setenv("FMOE_TUNE", "yes")
    with pytest.raises(UserError, match=r"^FMOE_TUNE='yes' must be 0 or 1"):
        choose(depth=32)


@pytest.mark.parametrize("kind", triton_gemm.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (300, 5000, 99), (4096, 4096, 1024)], ids=str)
def test_the_space_of_configurations(sizes, dtype, kind):
    """Powers of two from 16 on, no larger than there is use for, the default first, each once, all of a size to fit."""
    gated = kind == "up"
    space = triton_gemm.configs(kind, dtype, *sizes, gated)
    assert space[0] == triton_gemm.default_config(kind, dtype, *sizes, gated) and len(set(space)) == len(space)
    for config in space:
        for tile, extent in zip((config.rows, config.columns, config.depth), sizes, strict=True):
            assert tile >= 16 and tile & (tile - 1) == 0 and (tile == 16 or tile < 2 * extent)
        held = dtype.itemsize * config.stages * config.depth * (config.rows + config.columns * (1 + gated))
        assert held <= 160 * 1024
    if sizes[0] == 4096:
        assert len(space) > 8
