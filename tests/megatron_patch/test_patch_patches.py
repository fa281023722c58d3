"""The patches of megatron-core for any device: every entry is applied once, and has its reason."""

from importlib.metadata import version

import pytest
from forks import only

from fmoe.errors import UserError


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
    import importlib

    from megatron_patch import cpu, patches

    patch = patches.PATCHES[index]
    holder = patch.holder()
    if isinstance(holder, type):  # the class was renamed
        module, _, name = patch.module.partition(":")
        delattr(importlib.import_module(module), name)
    else:
        delattr(holder, patch.name)
    others = [p for p in patches.PATCHES if p.module != patch.module]
    before = [getattr(p.holder(), p.name) for p in others]
    try:
        cpu.install()
    except UserError as error:
        return str(error), before == [getattr(p.holder(), p.name) for p in others]
    return None, None


@pytest.mark.parametrize("index", range(5))
def test_a_name_that_has_moved_is_told_before_anything_changes(forks, index):
    message, is_untouched = only(forks.run(1, moved, index))
    assert message is not None and is_untouched
    assert f"megatron-core {version('megatron-core')} " in message and "which megatron_patch replaces" in message


def gathers():
    """The chunks of each optimizer during a step of both, which fails, and after it."""
    from types import SimpleNamespace

    from megatron_patch import patches

    config = SimpleNamespace(overlap_param_gather_with_optimizer_step=False)
    parts = [SimpleNamespace(model_chunks=[1, 2], ddp_config=SimpleNamespace(use_megatron_fsdp=False)) for _ in "ab"]
    chained = SimpleNamespace(chained_optimizers=[*parts, SimpleNamespace()], config=config)
    seen = []

    def step(self):
        seen.append([part.model_chunks for part in self.chained_optimizers[:2]])
        raise KeyError

    try:
        patches._gather_once(step)(chained)
    except KeyError:
        seen.append([part.model_chunks for part in parts])
    return seen


def test_the_last_optimizer_alone_gathers_parameters(forks):
    assert only(forks.run(1, gathers)) == [[[], [1, 2]], [[1, 2], [1, 2]]]
