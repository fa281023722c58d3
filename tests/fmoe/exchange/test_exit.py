"""Processes end with exit code 0 whatever threads of gloo still hold."""

import pytest
import torch
import torch.distributed as dist
from exiting_ranks import exit_codes
from forks import only, values

from fmoe.runtime import collectives

SCRIPTS = ["trained", "with_hooks", "evaluated", "averaged", "group_destroyed", "plain", "not_waited_for", "alone"]


def test_ranks_that_never_destroy_their_group_exit_with_0(forks):
    few = ["trained", "evaluated"]
    assert only(forks.run(1, exit_codes, len(few), few, "idle")) == {0: 2 * len(few)}


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("provocation", ["idle", "none"])
@pytest.mark.parametrize("part", range(6))  # each within the timeout of a call, on a busy machine too
def test_a_thousand_ranks_exit_with_0(forks, provocation, is_whole, part):
    assert only(forks.run(1, exit_codes, 20, SCRIPTS, provocation, is_whole)) == {0: 40}


def started_and_settled():
    x = torch.ones(3)
    parts = [torch.zeros(3), torch.zeros(3)]
    one = collectives.start(dist.all_reduce, x)
    is_known = one in collectives._started
    one.wait()
    collectives.run(dist.all_gather, parts, x)
    unfinished = collectives.start(dist.all_reduce, x) if dist.get_rank() == 0 else None
    collectives._settle()
    held = [one for one in collectives._started if one is not unfinished and not one.is_released()]
    if dist.get_rank() == 1:
        collectives.run(dist.all_reduce, x)
    else:
        unfinished.wait()
    return is_known, len(held), x.tolist(), [part.tolist() for part in parts]


def test_works_of_completed_collectives_are_released_before_exit(forks):
    for result in values(forks.run(2, started_and_settled)):
        assert result == (True, 0, [4.0] * 3, [[2.0] * 3] * 2)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_that_a_thread_holds_are_kept_at_exit(kind, monkeypatch):
    tensor = torch.zeros(3).to(kind)
    own = torch.zeros(3).to(kind)
    view_of = tensor.view(3)  # a reference of C++ code, as a work has
    kept = []
    monkeypatch.setattr(collectives, "_leak", kept.extend)
    before = tensor._use_count(), own._use_count()
    collectives._keep()
    assert (tensor._use_count(), own._use_count()) == (before[0] + 1, 1)
    assert view_of._base is tensor
