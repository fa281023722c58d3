"""The patches of megatron-core for any device: every entry is applied once, and has its reason."""

from importlib.metadata import version

import pytest
from forks import only, refusal


def table():
    from megatron_patch import patches

    before = {patch: getattr(patch.holder(), patch.name) for patch in patches.PATCHES}
    patches.install()
    after = {patch: getattr(patch.holder(), patch.name) for patch in patches.PATCHES}
    patches.install()
    again = {patch: getattr(patch.holder(), patch.name) for patch in patches.PATCHES}
    return [(p.reason, before[p] is not after[p], after[p] is again[p]) for p in patches.PATCHES]


def test_every_entry_is_put_in_once(forks):
    for reason, is_new, is_kept in only(forks.run(1, table)):
        is_of_older_versions = reason.startswith("0.16.1:") and version("megatron-core") != "0.16.1"
        assert ".py:" in reason and (is_new or is_of_older_versions) and is_kept


def moved(index):
    """Install without one name; nothing may be patched."""
    import importlib

    from megatron_patch import cpu, patches

    patch = patches.PATCHES[index]
    holder = patch.holder()
    if isinstance(holder, type):  # the class was renamed
        module, _, name = patch.module.partition(":")
        delattr(importlib.import_module(module), name)
    else:
        delattr(holder, patch.name)
    others = [p for p in (*patches.PATCHES, *cpu.PATCHES) if p.module != patch.module]
    before = [getattr(p.holder(), p.name, None) for p in others]
    try:
        cpu.install()
    finally:
        assert before == [getattr(p.holder(), p.name, None) for p in others]


@pytest.mark.by_default(0, 1)
@pytest.mark.parametrize("index", range(5))
def test_a_name_that_has_moved_is_told_before_anything_changes(forks, index):
    message = refusal(forks.run(1, moved, index))
    assert f"megatron-core {version('megatron-core')} " in message and "which megatron_patch replaces" in message


def gathers(chunks, overlaps=False, fails=False):
    """The chunks that each optimizer has during a step of all, and after it. The first optimizer, of another kind, has
    chunks too."""
    from types import SimpleNamespace

    from megatron.core.optimizer import DistributedOptimizer

    from megatron_patch import patches

    parts = [SimpleNamespace(model_chunks=[1]), *(object.__new__(DistributedOptimizer) for _ in chunks)]
    for part, own in zip(parts[1:], chunks, strict=True):
        part.model_chunks = own
        part.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    chained = SimpleNamespace(chained_optimizers=parts)
    if chunks:  # a chain without optimizers has no config
        chained.config = SimpleNamespace(overlap_param_gather_with_optimizer_step=overlaps)
    seen = []

    def step(self):
        seen.append([part.model_chunks for part in self.chained_optimizers])
        if fails:
            raise KeyError
        return True

    try:
        assert patches._gather_once(step)(chained)
    except KeyError:
        assert fails
    return seen[0], [part.model_chunks for part in parts]


def gathers_of_all(cases):
    return [gathers(*case) for case in cases]


def test_the_last_optimizer_of_a_chunk_alone_gathers_it(forks):
    cases = {
        "shared": (([[1, 2], [1, 2]],), [[], [1, 2]]),
        "a step that fails": (([[1, 2], [1, 2]], False, True), [[], [1, 2]]),
        "others": (([[1, 2], [2, 3], [3]],), [[1], [2], [3]]),
        "apart": (([[1], [2]],), [[1], [2]]),
        "overlap": (([[1], [2], [1, 2]], True), [[1], [2], [1, 2]]),
        "one": (([[1, 2]],), [[1, 2]]),
        "none": (([],), []),
    }
    found = only(forks.run(1, gathers_of_all, [case for case, _ in cases.values()]))
    for (name, (case, expected)), (during, after) in zip(cases.items(), found, strict=True):
        assert during == [[1], *expected], name
        assert after == [[1], *case[0]], name


def norms(count):
    """Whether ours has the bits of megatron-core's norm, which of the two reads values, and what happens to others'."""
    import torch
    from megatron.core.utils import local_multi_tensor_l2_norm

    from megatron_patch import cpu, patches

    cpu.install()
    tensors = [torch.randn(1000 * i + 1) * 10.0 ** (i % 5) for i in range(count)]
    found = []
    reading = []
    for norm in (local_multi_tensor_l2_norm, patches._norm_without_waits(local_multi_tensor_l2_norm)):
        found.append(norm(1, None, [tensors], False)[0])
        try:
            norm(1, None, [[tensor.to("meta") for tensor in tensors]], False)
            reading.append(False)
        except (RuntimeError, NotImplementedError):  # a tensor on the meta device has no values to read
            reading.append(True)
    return torch.equal(*found), reading, patches._norm_without_waits(len) is len


def test_a_norm_waits_for_no_parameter(forks):
    """Where TransformerEngine or apex has a norm, theirs stays."""
    is_same, reading, is_kept = only(forks.run(1, norms, 30))
    assert is_same and reading == [True, False] and is_kept
