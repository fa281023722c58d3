"""fp16: a loss scale that all ranks, and dense parameters and experts, have between them."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from compare import relative_error
from engines import (
    ONE,
    OPTIMIZERS,
    RECIPE,
    SHARDED,
    Samples,
    Split,
    digests,
    engine_of,
    load,
    save,
    trainer_of,
    values_of,
    with_optimizer,
)
from forks import only, values

from pretrain.callbacks import StepGuard
from pretrain.config import GuardConfig
from pretrain.start.process import Diverged

FP16 = replace(RECIPE, optimizer=replace(RECIPE.optimizer, initial_loss_scale=1024.0))
DENSE = "decoder.layers.0.self_attention.linear_proj.weight"
EXPERT = "decoder.layers.1.mlp.experts.weight_in"


def fp16(split, base=FP16, **optimizer):
    recipe = replace(split, precision="fp16").recipe(base)
    return replace(recipe, optimizer=replace(recipe.optimizer, **optimizer))


# One overflow


def overflow(engine, name):
    """Makes rank 1 alone meet an overflow in the gradient of a parameter; returns what takes it away again."""
    parameters = dict(engine.gpt.named_parameters())
    if dist.get_rank() != 1:
        return lambda: None
    if name in parameters:
        return parameters[name].register_hook(lambda gradient: gradient * float("inf")).remove
    # After the reduction, in what this rank steps alone.
    prepare = engine.optimizer.prepare_grads
    kind = name.removeprefix("after the reduction, ")

    def broken():
        from megatron_patch.optimizer import shards

        found = [s for s in shards(engine.optimizer) if (".experts." in names[s.parameter]) == (kind == "expert")]
        shard = found[0]
        gradient = getattr(shard.main, "main_grad", None)  # of the shard alone, from ZeRO-2 on
        if gradient is None:
            gradient = shard.parameter.main_grad.view(-1)[shard.start :]
        gradient.view(-1)[0] = float("inf")
        return prepare()

    names = {parameter: name for name, parameter in parameters.items()}
    engine.optimizer.prepare_grads = broken
    return lambda: engine.optimizer.__dict__.pop("prepare_grads")


def overflow_once(recipe, name):
    """(scales, reasons, learning rates, losses) of six steps, the third of which overflows on rank 1; what the third
    changed, and what the others left unchanged; each parameter's steps."""
    engine = engine_of(recipe)
    results = []
    changed = []
    unchanged = []
    for step in range(6):
        undo = overflow(engine, name) if step == 2 else lambda: None
        engine.sync_parameters()
        before = values_of(engine)
        results.append(engine.train_step(step, Samples()))
        engine.sync_parameters()
        after = values_of(engine)
        undo()
        same = {key for key in before if torch.equal(before[key], after[key])}
        if step == 2:
            changed = sorted(before.keys() - same)
        elif step > 0:
            unchanged += [key for key in same if key.endswith(("exp_avg", "exp_avg_sq", "main"))]
    scalers = {id(part.grad_scaler) for part in engine.optimizer.chained_optimizers}
    counts = {float(value) for key, value in after.items() if key.endswith(" step")}
    seen = [(r.loss_scale, r.skipped, r.has_overflowed, r.lr, r.loss) for r in results]
    return seen, changed, unchanged, len(scalers), counts, engine.grad_scaler.state_dict(), sorted(before)


OVERFLOWS = [
    ("EP2", EXPERT),
    ("EP2", "after the reduction, expert"),
    ("DP2", "after the reduction, dense"),
    ("DP2 ZeRO1 overlap", DENSE),
    ("EP2 ZeRO1", "after the reduction, expert"),
    ("DP2 ZeRO2", "after the reduction, dense"),
    ("EP2 ZeRO3", "after the reduction, expert"),
    ("TP2", EXPERT),
    ("TP2", "after the reduction, dense"),
    ("PP2", EXPERT),
]


@pytest.mark.by_default(1, 7)
@pytest.mark.parametrize(("split", "name"), OVERFLOWS)
def test_an_overflow_on_one_rank_skips_one_step_on_both(forks, split, name):
    split = Split.of(split)
    recipe = fp16(split)
    if split.pipeline > 1:  # the other stage has no expert
        recipe = replace(recipe, model=recipe.model.with_values({"moe.layers": (2,)}))
        name = name.replace("layers.1", "layers.0")  # numbered from the stage's first
    ranks = values(forks.run(2, overflow_once, recipe, name))
    seen = ranks[0][0]
    assert [scale for scale, *_ in seen] == [1024.0] * 3 + [512.0] * 3, "halved once"
    assert {step: reason for step, (_, reason, *_) in enumerate(seen) if reason is not None} == {
        2: "an overflow at loss scale 1024, now 512"
    }
    assert [has_overflowed for _, _, has_overflowed, *_ in seen] == [step == 2 for step in range(6)]
    rates = [lr for *_, lr, _ in seen]
    assert len(set(rates)) == 6 or rates[1] == max(rates), "the schedule's place is the step's"
    assert all(math.isfinite(loss) for *_, loss in seen) and seen[-1][-1] < seen[0][-1]
    for found, changed, unchanged, num_scalers, counts, state, kept in ranks:
        assert found == seen
        assert changed == [], "the step changed something"
        assert unchanged == [], "another step changed nothing"
        assert num_scalers == 1 and counts == {5.0}
        assert state == {"scale": 512.0, "growth_tracker": 3, "hysteresis_tracker": 0, "skipped": 1}
        assert any(key.endswith("exp_avg") for key in kept) and any("main" in key for key in kept)


def scales_of(recipe, bad):
    engine = engine_of(recipe)
    scales = []
    for step in range(10):
        undo = overflow_here(engine) if step in bad else lambda: None
        scales.append(engine.train_step(step, Samples()).loss_scale)
        undo()
    return scales


def overflow_here(engine):
    return dict(engine.gpt.named_parameters())[DENSE].register_hook(lambda gradient: gradient * float("inf")).remove


def test_window_and_hysteresis(forks):
    recipe = fp16(ONE, loss_scale_window=3, hysteresis=2)
    assert only(forks.run(1, scales_of, recipe, (1, 3))) == [1024.0] * 4 + [512.0] * 3 + [1024.0] * 3, (
        "the second overflow halves, three steps without one double"
    )


# Optimizers, checkpoints


def skipped_and_resumed(folder, recipe):
    """Six steps that begin with overflows of too high a scale, and a checkpoint in their midst, from which the rest is
    made again."""
    from pretrain.checkpoint import codec
    from pretrain.engine import state

    engine = engine_of(recipe)

    def go(first, last):
        results = [engine.train_step(step, Samples()) for step in range(first, last)]
        return [(r.loss, r.grad_norm, r.loss_scale, r.skipped) for r in results], digests(engine)

    before, _ = go(0, 5)
    common = state.optimizer_state(engine)
    assert codec.loads(codec.dumps(common, "state")) == common
    save(engine, folder, 5)
    first = go(5, 9)
    load(engine, folder)
    return before, first, go(5, 9), common["loss_scale"]


SHARDED_CASES = [
    pytest.param(name, "optimizer", marks=[] if name == "lamb" else pytest.mark.slow, id=f"{name} ZeRO1")
    for name in ("adamw", *SHARDED)
]
SHARDED_CASES.append(pytest.param("adamw", "parameters", marks=pytest.mark.slow, id="adamw ZeRO3"))


@pytest.mark.by_default("adamw8bit", "lamb ZeRO1")
@pytest.mark.parametrize(
    ("name", "shard"), [*(pytest.param(n, "none", id=n) for n in ("adamw", *OPTIMIZERS)), *SHARDED_CASES]
)
def test_every_optimizer_goes_on_bit_for_bit(forks, tmp_path, name, shard):
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    base = RECIPE if name == "adamw" else with_optimizer(name)
    if name == "adamw8bit":
        base = replace(base, model=replace(base.model, ffn_hidden_size=64))
    recipe = fp16(Split(shard=shard), base, initial_loss_scale=2.0**19, loss_scale_window=2)
    before, first, second, state = only(forks.run(1, skipped_and_resumed, tmp_path, recipe))
    assert before[0][3] is not None and state["skipped"] > 0, "the scale is too high for a first step"
    assert first == second
    assert any(skipped is None for *_, skipped in before + first[0])
    scales = [scale for _, _, scale, _ in first[0]]
    assert len(set(scales)) > 1, "the scale moves after the resume too"
    made = [loss for loss, *_, skipped in before + first[0] if skipped is None]
    assert len(made) > 3 and min(made) < made[0]


def goes_on(folder, recipe, step):
    """The scaler's state before and after two steps from a checkpoint (or none), which are saved."""
    engine = engine_of(recipe)
    if step:
        load(engine, folder / f"step-{step:08d}")
    begin = engine.grad_scaler.state_dict()
    losses = [engine.train_step(step + i, Samples()).loss for i in range(3)]
    save(engine, folder, step + 3)
    end = engine.grad_scaler.state_dict()
    return begin, end, losses, engine.train_step(step + 3, Samples()).loss


@pytest.mark.slow
def test_the_scale_goes_on_at_another_split(forks, tmp_path):
    chain = map(Split.of, ["DP2 ZeRO1", "EP2", "DP2 ZeRO2", "TP2", "EP2 ZeRO3", "PP2", "one ZeRO1"])
    end = None
    after = None
    scales = set()
    for number, split in enumerate(chain):
        recipe = fp16(split, initial_loss_scale=2.0**20, loss_scale_window=2)
        ranks = values(forks.run(split.parallel.world_size, goes_on, tmp_path, recipe, 3 * number))
        begin = ranks[0][0]
        losses = ranks[0][2]
        assert all(rank[:3] == ranks[0][:3] for rank in ranks)
        assert end is None or (begin == end and losses[0] == pytest.approx(after, rel=2e-3)), str(split)
        end = ranks[0][1]
        after = ranks[0][3]
        scales.add(end["scale"])
    assert end["skipped"] > 0 and scales != {2.0**20}


# Gradients


def gradients(recipe, weights=None):
    """Return the gradients of one step by name, without the loss scale, and the weights in fp16."""
    engine = engine_of(recipe)
    with torch.no_grad():
        for name, parameter in engine.gpt.named_parameters():
            if weights is not None:
                parameter.copy_(weights[name])
    engine.backward(0, Samples())
    assert not engine.optimizer.prepare_grads()
    named = {parameter: name for name, parameter in engine.gpt.named_parameters()}
    from megatron_patch.optimizer import shards

    found = {named[shard.parameter]: shard.main.grad.clone() for shard in shards(engine.optimizer)}
    return found, {name: p.detach().half() for name, p in engine.gpt.named_parameters()}


@pytest.mark.parametrize("weight", [0.0, 100.0], ids=["loss", "balance loss"])
def test_gradients_are_those_of_fp32(forks, weight):
    """With a balance loss that outweighs the rest too: it has the loss scale in it once, as the loss has."""
    model = RECIPE.model.with_values(
        {"moe.balance_loss": weight, "moe.z_loss": weight / 10, "moe.capacity_factor": None, "moe.jitter": 0.0}
    )
    base = replace(FP16, model=model)
    scaled, weights = only(forks.run(1, gradients, fp16(ONE, base, initial_loss_scale=2.0**12)))
    exact, _ = only(forks.run(1, gradients, ONE.recipe(replace(RECIPE, model=model)), weights))
    routers = [name for name in exact if "gate" in name]
    assert len(routers) == 2 and scaled.keys() == exact.keys()
    errors = {name: relative_error(scaled[name], value) for name, value in exact.items()}
    assert max(errors.values()) < 2e-2, sorted(errors.items(), key=lambda item: item[1])[-3:]
    if weight:
        plain, _ = only(forks.run(1, gradients, ONE.recipe(RECIPE), weights))
        assert all(relative_error(exact[name], plain[name]) > 10 for name in routers), "the losses outweigh the rest"


# When no lower scale helps


def overflow_always(recipe, mode):
    engine = engine_of(recipe)
    overflow_here(engine)
    guard = StepGuard(GuardConfig(nonfinite=mode, max_skips=2))
    said = []
    before = values_of(engine)
    for step in range(9):
        trainer = trainer_of(engine, step)
        try:
            result = engine.train_step(step, Samples(), lambda *seen, t=trainer: guard.check_step(t, *seen))
        except Diverged as error:
            said.append(f"stopped: {error}")
            break
        metrics = {}
        guard.on_step(trainer, metrics)
        said.append((result.loss_scale, result.skipped, metrics["guard/skipped"]))
    after = values_of(engine)
    return said, all(torch.equal(before[key], after[key]) for key in before if not key.endswith("step"))


def test_overflows_at_the_lowest_scale_end_the_run(forks):
    recipe = fp16(ONE, initial_loss_scale=4.0, min_loss_scale=2.0)
    (*skipped, end), is_same = only(forks.run(1, overflow_always, recipe, "stop"))
    assert skipped == [(4.0, "an overflow at loss scale 4, now 2", 0)]
    lowest = "loss scale 2, the lowest (optimizer.min_loss_scale=2)"
    assert end.startswith(f"stopped: step 2: the gradient is not finite at {lowest}, first in: gradient of "), end
    assert is_same
    (*skipped, end), is_same = only(forks.run(1, overflow_always, recipe, "skip"))
    assert [flag for _, _, flag in skipped] == [0, 1, 1] and "guard.max_skips=2" in end
    assert is_same


def test_an_overflow_at_a_fixed_scale_is_not_finite(forks):
    recipe = fp16(ONE, initial_loss_scale=None, loss_scale=8.0)
    (end,), is_same = only(forks.run(1, overflow_always, recipe, "stop"))
    assert end.startswith(
        "stopped: step 1: the gradient is not finite at optimizer.loss_scale=8, which is fixed, first in: gradient of "
    )
    assert is_same
