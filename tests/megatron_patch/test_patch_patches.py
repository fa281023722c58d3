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
