"""The CPU runtime: complete, and silent where there is a GPU."""

import types

import torch
from forks import only

# Functions run in processes of the `forks` fixture: what they patch is gone with them.


def names_in_place():
    from megatron_patch import cpu

    return {f"{patch.module}.{patch.name}": getattr(patch.holder(), patch.name, None) for patch in cpu.PATCHES}


def install_twice():
    from megatron_patch import cpu

    before = names_in_place()
    first = cpu.install()
    once = names_in_place()
    second = cpu.install()
    twice = names_in_place()
    return {
        "returned": (first, second),
        "unchanged by the first": [name for name in once if once[name] is before[name]],
        "changed by the second": [name for name in once if once[name] is not twice[name]],
    }


def test_installing_twice_is_installing_once(forks):
    assert only(forks.run(1, install_twice)) == {
        "returned": (True, True),
        # The one patch that only puts a missing name there.
        "unchanged by the first": ["megatron.core.transformer.moe.moe_utils.te_general_gemm"],
        "changed by the second": [],
    }


def behaviour():
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    from megatron_patch import cpu

    cpu.install()
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
    x = torch.zeros(2)
    assert x.cuda() is x
    assert x.to("cuda:0").device.type == "cpu"
    # Only megatron-core is told that the tensor lies on a GPU.
    type_of = types.FunctionType((lambda x: x.type()).__code__, {"__name__": "megatron.core.optimizer.clip_grads"})
    assert type_of(x) == "torch.cuda.FloatTensor"
    assert type_of(x.bfloat16()) == "torch.cuda.BFloat16Tensor"
    assert x.type() == "torch.FloatTensor"
    assert x.type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        torch.cuda.synchronize()
    assert moe_utils.te_general_gemm is None

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.manual_seed(3)
    expected = [torch.rand(1).item() for _ in range(2)]
    torch.manual_seed(3)
    seen = [torch.rand(1).item()]
    inside = []
    for name in ("a", "b", "a"):
        with tracker.fork(name):
            inside.append(torch.rand(1).item())
    seen.append(torch.rand(1).item())
    assert seen == expected, "a fork moved the generator outside"
    assert len(set(inside)) == 3, "a fork does not go on where it ended"
    saved = tracker.get_states()
    with tracker.fork("a"):
        next_of_a = torch.rand(1).item()
    tracker.set_states(saved)
    with tracker.fork("a"):
        assert torch.rand(1).item() == next_of_a
    for arguments in (("a", 9), ("c", 1)):
        try:
            tracker.add(*arguments)
        except Exception:
            continue
        raise AssertionError(f"add{arguments} was accepted")


def test_cuda_means_the_cpu(forks):
    only(forks.run(1, behaviour))


def install_beside_a_gpu():
    from megatron_patch import cpu, patches

    torch.cuda.is_available = lambda: True
    patches.install()  # of every machine
    before = names_in_place()
    installed = cpu.install()
    return installed, [key for key, value in names_in_place().items() if value is not before[key]]


def test_beside_a_gpu_nothing_is_changed(forks):
    assert forks.run(1, install_beside_a_gpu) == [(False, [])]


def compiled(steps):
    from megatron_patch import cpu

    cpu.install()
    import torch.distributed.optim  # compiles optimizers with TorchScript

    return torch.jit.script(steps)(3)


def ones(number: int) -> torch.Tensor:
    return torch.ones(number, device="cpu") + torch.tensor(1.0, device="cpu")


def test_torchscript_knows_the_replaced_functions(forks):
    assert only(forks.run(1, compiled, ones)).tolist() == [2.0] * 3
