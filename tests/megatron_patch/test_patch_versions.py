"""Versions of megatron-core: the supported range, and the import without Triton."""

import builtins
import importlib
import sys
import warnings
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from forks import only, refusal


def import_at(installed):
    import torch.distributed as dist

    import megatron_patch
    from megatron_patch import versions

    def pretended(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    dist.destroy_process_group()
    versions.version = pretended
    try:
        importlib.reload(megatron_patch)
    finally:
        assert not dist.is_initialized()
    return versions.check()


@pytest.mark.by_default(0, 2, 4, 6)
@pytest.mark.parametrize("installed", ["0.15.3", "0.16.0", "0.16.0rc2", "0.20.0rc0", "0.20", "1.0.0", "core"])
def test_a_version_out_of_range_fails_at_import_with_one_line(forks, installed):
    message = refusal(forks.run(1, import_at, installed))
    assert f"megatron-core {installed} " in message
    assert "pip install 'megatron-core>=0.16.1,<0.20'" in message


@pytest.mark.parametrize("installed", ["0.16.1", "0.16.1.post1", "0.17.0rc0", "0.18.10+local.3", "0.19.2"])
def test_a_version_in_range_is_accepted(forks, installed):
    assert forks.run(1, import_at, installed) == [installed]


def test_without_megatron_core_the_extra_is_named(forks):
    results = forks.run(1, import_at, None)
    assert "pip install 'fmoe[pretrain]'" in refusal(results) and results[0].kind.__name__ == "MissingPackageError"


def command_at(installed):
    from megatron_patch import versions

    versions.version = lambda name: installed
    del sys.modules["megatron_patch"], sys.modules["pretrain.start.run"]


def test_a_command_ends_with_that_line(forks):
    (end,) = forks.command("pretrain", "gpt-96", "--parallel.expert", 1, before=partial(command_at, "0.20.0"))
    assert end.code == 2, end.err
    reason = "megatron-core 0.20.0 is not supported: pip install 'megatron-core>=0.16.1,<0.20'"
    assert end.err == f"pretrain: error: {reason}\n"


KERNELS = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr): ...
"""


def imports_without_triton():
    """Return whether KERNELS can be imported: by a module of kernels and by another one at once; then afterwards."""
    from megatron_patch import versions

    sys.modules["triton"] = None  # as if it were not installed
    import_ = builtins.__import__
    seen = []

    def works(name):
        try:
            exec(KERNELS, {"__name__": name})
        except ModuleNotFoundError:
            return False
        return True

    kernels = "megatron.core.transformer.moe.ops.paged_stash"
    with versions.without_triton():
        seen += [works(kernels), works("megatron.core.fusions.fused_pad_routing_map")]
    seen += [works(kernels), builtins.__import__ is import_, sys.modules["triton"] is None]
    return seen


def test_only_the_modules_of_kernels_get_a_stand_in_for_triton(forks):
    assert only(forks.run(1, imports_without_triton)) == [True, False, False, True, True]


def warnings_of_collectives():
    """Those of names that torch has replaced, in a process of one rank that has imported us."""
    import torch.distributed as dist

    import megatron_patch

    x = torch.ones(2)
    found = []
    for is_ours in (True, False):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if is_ours:
                importlib.reload(megatron_patch)
            dist.all_gather_into_tensor(torch.empty(2), x)
            dist.reduce_scatter_tensor(torch.empty(2), x)
        found.append([str(warning.message) for warning in seen])
    return found


def test_names_that_torch_has_replaced_do_not_warn(forks):
    """Megatron-core calls them; newer versions of torch warn."""
    ours, torchs = only(forks.run(1, warnings_of_collectives))
    assert not ours and (torchs or torch.__version__ < "2.13")
