"""Every CUDA kernel, compiled by the real NVRTC, is loaded and launched by the real cuda.core on a stand-in driver."""

import pytest
import stand_in

from fmoe.errors import BuildError
from fmoe.kernels.cuda import nvrtc


@pytest.fixture(autouse=True)
def tools():
    stand_in.require_compiler()
    try:
        nvrtc.find()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.by_default("sm_90 few")
@pytest.mark.parametrize("case", ["sm_90 few", "sm_80", "sm_90", "sm_100"])
def test_every_kernel_loads_and_launches(case, kept, tmp_path, capsys):
    """By default of few dtypes: compilation takes half a minute for each."""
    arch, *words = case.split()
    result, log = stand_in.run("launch_all.py", *words, arch=arch, folder=tmp_path, FMOE_CACHE=str(kept / "kernels"))
    sent = result["sent"]
    launched = [entry for entry in log if "refused" not in entry]
    assert len(launched) == len(sent)
    for given, arrived in zip(sent, launched, strict=True):
        assert {name: arrived[name] for name in given} == given
        assert arrived["local"] == 0, f"{arrived['kernel']} spills"
    cold = {entry["thread"] for entry in sent} - {result["main_thread"]}
    assert len(cold) == 2
    for thread in (result["main_thread"], *cold):
        assert {entry["kernel"] for entry in sent if entry["thread"] == thread} == set(result["symbols"].values())
    assert {(entry["device"], entry["stream"] > 2) for entry in launched} == {(0, False), (1, True)}
    assert_planted_faults_are_found(result["faults"], [entry["refused"] for entry in log if "refused" in entry])
    most = max(launched, key=lambda entry: entry["registers"])
    with capsys.disabled():
        print(f"\n{arch}: {len(launched)} launches of {len(result['symbols'])} kernels", end="")
        print(f", at most {most['registers']} registers ({most['kernel'][:30]})", end="")


def assert_planted_faults_are_found(errors, refusals):
    """Faults of `launch_all.faults`: those of arguments before a launch, the others by the driver."""
    assert "takes piiip, not iiipp" in errors.pop("argument order")
    assert "takes piiip, not piii" in errors.pop("argument count")
    assert errors.pop("name").startswith("BuildError: the driver refuses the kernels: CUDA_ERROR_NOT_FOUND")
    assert errors.pop("image").startswith("BuildError: the driver refuses the kernels: CUDA_ERROR_INVALID_IMAGE")
    codes = {name: error.split()[1].rstrip(":") for name, error in errors.items()}
    assert codes == {
        "shared memory": "CUDA_ERROR_INVALID_VALUE",
        "grid": "CUDA_ERROR_INVALID_VALUE",
        "block": "CUDA_ERROR_INVALID_VALUE",
        "no context": "CUDA_ERROR_INVALID_CONTEXT",
        "stream": "CUDA_ERROR_INVALID_HANDLE",
    }
    assert refusals[:3] == ["shared memory", "grid", "block"]
