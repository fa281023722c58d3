"""The optimizer that a recipe gets, and equality of torch's fused AdamW with AdamW."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compare import assert_close

from pretrain.config import OptimizerConfig, Recipe
from pretrain.engine.optimizer import core, make_optimizer
from pretrain.engine.optimizer_state import restored_state

RECIPE = Recipe(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has other fused optimizers")
def test_adamw_is_torchs_fused_one_on_a_cpu(monkeypatch):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(3))], "weight_decay": 0.0}]
    made = make_optimizer(RECIPE)(groups)
    assert isinstance(made, torch.optim.AdamW) and made.defaults["fused"]
    own = RECIPE.optimizer
    assert (made.defaults["betas"], made.defaults["eps"]) == ((own.beta1, own.beta2), own.eps)
    assert made.param_groups[0]["weight_decay"] == 0.0
    offloaded = replace(RECIPE, optimizer=replace(own, cpu_offload=0.5))
    assert make_optimizer(offloaded) is None


def test_adamw_on_a_gpu_is_apexs_or_transformer_engines_where_installed(monkeypatch):
    """Megatron-core chooses these by itself; otherwise torch's fused AdamW is used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(core, "Adam", type("FusedAdam", (torch.optim.Optimizer,), {}))
    assert make_optimizer(RECIPE) is None
    lamb = replace(RECIPE, optimizer=replace(RECIPE.optimizer, name="lamb"))
    assert make_optimizer(lamb) is not None
    monkeypatch.setattr(core, "Adam", torch.optim.AdamW)
    made = make_optimizer(RECIPE)([torch.nn.Parameter(torch.zeros(3))])
    assert isinstance(made, torch.optim.AdamW) and made.defaults["fused"]


def test_the_step_of_a_fused_optimizer_is_restored_on_the_device():
    """Step counts are on the device on which torch's fused kernels read them."""
    main = torch.zeros(4, 3, device="meta")
    for fused, device in ((True, "meta"), (False, "cpu")):
        optimizer = SimpleNamespace(param_groups=[{}], defaults={"fused": fused})
        shard = SimpleNamespace(optimizer=optimizer, main=main, parameter=main)
        state = restored_state(shard, 7, lambda entry: torch.zeros(12))
        assert state["step"].device.type == device and state["exp_avg"].device.type == "meta"
        assert device == "meta" or float(state["step"]) == 7


def test_the_fused_steps_are_those_of_the_loop():
    torch.manual_seed(0)
    begin = [torch.randn(shape) for shape in ((5, 33, 7), (301,), (1,), (0, 4))]
    runs = []
    for fused in (False, True):
        parameters = [torch.nn.Parameter(value.clone()) for value in begin]
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        generator = torch.Generator().manual_seed(1)
        for step in range(7):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (-2 * step)
            optimizer.step()
        runs.append([*parameters, *(optimizer.state[p][n] for p in parameters for n in ("exp_avg", "exp_avg_sq"))])
    for loop, fused in zip(*runs, strict=True):
        assert_close(fused, loop, 1e-6, "AdamW")
