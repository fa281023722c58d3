"""Engines whose models differ in the layer with the experts."""

import functools
from collections.abc import Callable

from torch import nn

from bench.samples import Tokens
from fmoe.errors import UserError
from fmoe.kernels.cuda import loader as cuda
from fmoe.kernels.native import loader as native
from pretrain.config import Recipe
from pretrain.engine import Engine
from pretrain.engine.model import build_model
from pretrain.start.process import Processes

NATIVE = "fmoe native"
CUDA = "fmoe cuda"
TORCH = "fmoe torch"
MEGATRON = "megatron-core MoELayer"
BACKENDS = {NATIVE: "native", CUDA: "cuda", TORCH: "torch"}


def names_on(device: str) -> list[str]:
    """Return the names of the contenders on a device, the reference last."""
    return [CUDA if device == "cuda" else NATIVE, TORCH, MEGATRON]


class Contenders:
    """Engines of a recipe, made on first use. Our two backends are two ways to run the same engine.

    Attributes:
        device: the device that runs them.
        names: names of the contenders; native only if the extension can be built.
    """

    def __init__(self, recipe: Recipe, processes: Processes):
        self.recipe = recipe
        self.device = processes.device
        self._processes = processes
        self.samples = Tokens(recipe)
        self.names = names_on(self.device.type)
        if NATIVE in self.names and not native.load():
            self.names.remove(NATIVE)
        self._step = -1

    @functools.cached_property
    def _ours(self) -> Engine:
        return Engine(self.recipe, self._processes)

    @functools.cached_property
    def _megatron(self) -> Engine:
        return Engine(self.recipe, self._processes, build=_megatron_moe)

    def engine(self, name: str) -> Engine:
        """Return the engine, ready to run with that contender's layer."""
        if name == MEGATRON:
            return self._megatron
        if name == CUDA and not cuda.load(self.device):
            raise UserError(f"{name} is unavailable: {cuda.why(self.device)}")
        for layer in self._ours.moe_layers:
            layer.experts.backend = BACKENDS[name]
        return self._ours

    def step(self, name: str) -> Callable[[], object]:
        """Return a function that runs one training step over random tokens per call."""
        self.engine(name)

        def run() -> float:
            engine = self.engine(name)
            self._step += 1
            result = engine.train_step(self._step, self.samples)
            engine.routing()
            return result.loss

        return run


def _megatron_moe(recipe: Recipe) -> nn.Module:
    """Return the recipe's GPT with megatron-core's MoELayer."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from pretrain.models.config import transformer_config
    from pretrain.models.gpt import build_gpt

    model = recipe.model
    if not model.moe.num_experts:
        return build_model(recipe)
    config = transformer_config(
        recipe,
        num_moe_experts=model.moe.num_experts,
        moe_router_topk=model.moe.top_k,
        moe_ffn_hidden_size=model.ffn_hidden_size,
        moe_expert_capacity_factor=model.moe.capacity_factor,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=model.moe.balance_loss,
        moe_z_loss_coeff=model.moe.z_loss,
        moe_input_jitter_eps=model.moe.jitter if model.moe.gate == "switch" and model.moe.jitter else None,
        moe_router_pre_softmax=model.moe.gate != "naive",  # softmax over all experts, or over the chosen ones
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=recipe.parallel.expert,
        expert_tensor_parallel_size=recipe.parallel.expert_tensor,
    )
    spec = get_gpt_layer_local_spec(num_experts=model.moe.num_experts, moe_grouped_gemm=False)
    return build_gpt(recipe, config, spec)
