"""The benchmark of the recommender: its AUC and verdict, and training that does not depend on the ranks."""

from types import SimpleNamespace

import pytest
import torch
from forks import values

from bench.studies import recommender


def arguments(**changed):
    options = {"rows": 5_000, "dim": 4, "ranks": 2, "steps": 6, "batch": 32, "drift": 20, "seeds": [0], "experts": 4}
    options |= {"contenders": ["mmoe", "dense"], "width": 8, "hidden": 4, "lr": [1e-2], "row_lr": 0.1}
    return SimpleNamespace(**options | changed)


def test_auc_counts_pairs():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(5, (40,), generator=generator).float()
    labels = torch.rand(40, generator=generator) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels] for b in scores[~labels]]
    assert recommender.auc(scores, labels) == pytest.approx(float(sum(pairs)) / len(pairs))


def test_the_log_is_a_function_of_the_step_and_drifts():
    log = recommender.ClickLog(arguments(batch=512), seed=0)
    ids, labels = log[3]
    again, _ = recommender.ClickLog(arguments(batch=512), seed=0)[3]
    assert torch.equal(ids, again)
    later, _ = log[103]
    first = recommender.USERS + recommender.CATEGORIES
    assert (ids[:, 2].median() - first).item() < 400 and (later[:, 2].median() - first).item() > 2000
    assert (ids[:, 0] < recommender.USERS).all() and (ids.max() < 5_000).all()
    click, conversion = labels.mean(0).tolist()
    assert 0.1 < conversion < click < 0.5
    assert (labels[:, 1] <= labels[:, 0]).all(), "no conversion without a click"


def test_losses_do_not_depend_on_ranks(forks):
    two, other = values(forks.run(2, recommender.train_all, arguments()))
    (one,) = values(forks.run(1, recommender.train_all, arguments(ranks=1)))
    assert [row["contender"] for row in two] == ["mmoe", "dense"]
    for a, b, c in zip(one, two, other, strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-5) and b["auc"] == pytest.approx(a["auc"], abs=1e-3)
        assert b["losses"] == c["losses"]
    text, is_met = recommender.table(two, arguments())
    assert is_met and "| mmoe " in text
    two[0]["held"] += 1
    assert not recommender.table(two, arguments())[1]
