"""FastMoE's Megatron-LM plugin, importable without Megatron.

`fmoefy` converts megatron-core models, and models with the layout of Megatron-LM 2.2 to 3.0. FastMoE also replaced
parts of Megatron-LM's training loop. `patch_model_provider` and `patch_forward_step` work with a current Megatron-LM.
The other functions raise an error that names a substitute.
"""

import argparse
import contextlib
import functools
import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe import convert, random
from fmoe.errors import UserError, known_names
from fmoe.fastmoe import gates
from fmoe.fastmoe.balance import reset_balance_profile, update_balance_profile
from fmoe.fastmoe.transformer import FMoETransformerMLP


def add_fmoe_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add FastMoE's arguments to a parser, and return it.

    If the parser has ``--num-experts`` already, FastMoE's argument is ``--fmoe-num-experts``.
    """
    group = parser.add_argument_group("fastmoe")
    taken = "--num-experts" in parser._option_string_actions
    group.add_argument("--fmoefy", action="store_true")
    group.add_argument("--fmoe-num-experts" if taken else "--num-experts", type=int, default=None)
    group.add_argument("--top-k", type=int, default=2)
    group.add_argument("--balance-loss-weight", type=float, default=1)
    group.add_argument("--balance-strategy", type=str, default=None)
    group.add_argument("--hidden-hidden-size", type=int, default=None)
    return parser


def megatron_args() -> Any:
    """Return Megatron-LM's arguments; None if Megatron-LM is not imported or has no arguments yet."""
    for name in ("megatron", "megatron.training"):
        get_args = getattr(sys.modules.get(name), "get_args", None)
        if get_args is not None:
            with contextlib.suppress(AssertionError):  # not initialized
                return get_args()
    return None


def megatron_groups() -> ModuleType | None:
    """Return the module that has Megatron's process groups; None before they exist. Imports nothing."""
    for name in ("megatron.mpu", "megatron.core.parallel_state"):
        module = sys.modules.get(name)
        if module is not None and module.model_parallel_is_initialized():
            return module
    return None


def gone(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that raises a UserError: FastMoE's function ``name`` is not supported, use ``instead``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(
            f"fmoe.megatron.{name} is not supported: it belongs to the training loop of Megatron-LM 2 and 3; instead, "
            f"{instead}"
        )

    refuse.__name__ = name
    refuse.__doc__ = f"Raise UserError: {instead}."
    return refuse


_profile: dict[str, list] = {}
_known_layers = 0


def reset_gate_hook(num_layers: int | None = None) -> None:
    """Discard all metrics, and set the number of layers that store metrics; None keeps this number."""
    global _known_layers
    _known_layers = _known_layers if num_layers is None else num_layers
    reset_balance_profile(_profile, _known_layers, _strategy())


def get_balance_profile() -> dict[str, list]:
    """Return a dict from metric names to lists: the latest value of each layer, None for one that has not run."""
    return _profile


def generate_megatron_gate_hook(layer_idx: int, num_expert_global: int) -> Callable[[Tensor, Tensor, Any], None]:
    """Return a gate hook that stores the metrics of the layer ``layer_idx``.

    It stores nothing if the number of layers given to `reset_gate_hook` does not exceed ``layer_idx``.
    """
    strategy = _strategy()

    def hook(gate_top_k_idx: Tensor, gate_score_top_k: Tensor, gate_context: Any) -> None:
        if layer_idx < _known_layers:
            update_balance_profile(
                _profile, gate_top_k_idx, gate_score_top_k, gate_context, layer_idx, num_expert_global, strategy
            )

    return hook


def _strategy() -> str | None:
    return getattr(megatron_args(), "balance_strategy", None)


# FastMoE's gates by the name of their strategy, which is also the name of the router that replaces them.
STRATEGIES: dict[str, type[nn.Module]] = {
    "naive": gates.NaiveGate,
    "noisy": gates.NoisyGate,
    "gshard": gates.GShardGate,
    "switch": gates.SwitchGate,
    "swipe": gates.SwipeGate,
}


class MegatronMLP(FMoETransformerMLP):
    """`FMoETransformerMLP` with the constructor and the call of the MLP of Megatron-LM 2.2 to 3.0.

    Args:
        args: arguments of Megatron-LM and FastMoE, as attributes of one object:

            * ``fmoe_num_experts``: number of experts per rank, required;
            * ``hidden_size``: model width, required;
            * ``hidden_hidden_size``: hidden width of an expert, by default ``4 * hidden_size``;
            * ``top_k``: experts per token, by default that of the gate;
            * ``balance_strategy``: name of the gate, by default "naive";
            * ``distributed_experts``: whether the experts are split over ranks, by default False;
            * ``data_parallel_size``: number of these ranks, by default all; ignored if Megatron has process groups;
            * ``init_method_std``: standard deviation of the initial weights, by default 0.02;
            * ``num_layers``: number of layers, by default 1, for the initial weights.
        layer_idx: index of the layer, from 0.
        gate: gate to use instead of that of ``balance_strategy``.

    Raises:
        UserError: ``balance_strategy`` is unknown, or Megatron's tensor parallel size is above 1.
    """

    def __init__(self, args: Any, layer_idx: int, gate: Any = None):
        groups = megatron_groups()
        tensor_parallel = groups.get_tensor_model_parallel_world_size() if groups is not None else 1
        if tensor_parallel > 1:
            raise UserError(f"tensor_model_parallel_size={tensor_parallel} is not supported by MegatronMLP: use 1")
        strategy = getattr(args, "balance_strategy", None) or "naive"
        if gate is None and strategy not in STRATEGIES:
            raise UserError(f"balance_strategy={strategy!r} is not known; {known_names(strategy, STRATEGIES)}")
        distributed = getattr(args, "distributed_experts", False)
        moe_group = groups.get_data_parallel_group() if distributed and groups is not None else None
        world_size = 1
        if distributed:
            everyone = dist.get_world_size() if dist.is_initialized() else 1
            world_size = getattr(args, "data_parallel_size", everyone) if moe_group is None else moe_group.size()
        super().__init__(
            args.fmoe_num_experts,
            args.hidden_size,
            getattr(args, "hidden_hidden_size", None) or 4 * args.hidden_size,
            expert_dp_comm="none" if distributed else "dp",
            world_size=world_size,
            moe_group=moe_group,
            top_k=getattr(args, "top_k", None),
            gate=STRATEGIES[strategy] if gate is None else gate,
            gate_hook=generate_megatron_gate_hook(layer_idx, args.fmoe_num_experts * world_size),
        )
        self.hidden_size = args.hidden_size
        self.sigma = getattr(args, "init_method_std", 0.02)
        self.num_layers = getattr(args, "num_layers", 1)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw experts as Megatron draws an MLP.

        The standard deviation is ``init_method_std`` for the first matrix, and
        ``init_method_std / sqrt(2 * num_layers)`` for the second. Biases are zero.
        """
        output_sigma = self.sigma / math.sqrt(2 * self.num_layers)
        for index, expert in enumerate(self.experts, start=self.first_expert):
            with random.keyed("megatron expert", self.seed, index):
                for linear, sigma in ((expert.htoh4, self.sigma), (expert.h4toh, output_sigma)):
                    weight = torch.empty(linear.weight.shape, device="cpu", dtype=torch.float32)
                    linear.weight.copy_(weight.normal_(0, sigma))
                    linear.bias.zero_()

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # FastMoE's
        """Map [s, b, h] to ([s, b, h], bias of zeros [h])."""
        return super().forward(inp), torch.zeros(self.hidden_size, dtype=inp.dtype, device=inp.device)


def fmoefy(
    model: nn.Module,
    fmoe_num_experts: int | None = None,
    distributed_experts: bool | None = True,
    hidden_hidden_size: int | None = None,
    top_k: int | None = None,
    gate: Any = None,
    megatron_version: str | None = None,
) -> nn.Module:
    """Convert the MLPs of a Megatron model to Mixture-of-Experts layers, in place; return the model.

    In models with the layout of Megatron-LM 2.2 to 3.0 (``model.language_model.transformer.layers``, or
    ``.encoder.layers`` and ``.decoder.layers``, each with ``.mlp``), each MLP becomes a `MegatronMLP`. Megatron-core
    and other models are passed to `fmoe.fmoefy`. As in FastMoE, the experts get new random weights; the weights of the
    MLPs are not reused. Except for ``gate``, arguments that are None come from Megatron-LM's arguments, if it is
    initialized.

    Args:
        fmoe_num_experts: number of experts per rank. If it is None in Megatron-LM's arguments, too, it is their number
            ``--num-experts`` of all experts, divided by the expert parallel size.
        distributed_experts: whether experts are split over ranks. The ranks are those of Megatron-LM's data parallel
            group or of megatron-core's expert parallel group. Without Megatron, they are all ranks.
        hidden_hidden_size: hidden width of an expert. If it is None in Megatron-LM's arguments, too, it is the MLP's.
        gate: for MLPs that become a `MegatronMLP`, a gate class of FastMoE, or None for the gate of Megatron-LM's
            argument ``balance_strategy``. For other models, a gate class in `STRATEGIES`, any router by name or class,
            or None for the default of `fmoe.fmoefy`.
        megatron_version: a version that FastMoE knows, or None. It has no effect: the model's layout determines the
            version.

    Raises:
        UserError: ``fmoe_num_experts`` is missing, or the gate, the model or ``megatron_version`` is not supported.
    """
    if megatron_version not in (None, "v2.2", "v2.5", "v3.0.2"):
        raise UserError(f"megatron_version={megatron_version!r} is not supported: use v2.2, v2.5, v3.0.2 or None")
    args = megatron_args()
    settings = SimpleNamespace(**(vars(args) if args is not None else {}))
    arguments = {
        "fmoe_num_experts": fmoe_num_experts,
        "distributed_experts": distributed_experts,
        "hidden_hidden_size": hidden_hidden_size,
        "top_k": top_k,
    }
    vars(settings).update({name: value for name, value in arguments.items() if value is not None})
    if hasattr(settings, "fmoefy") and not hasattr(settings, "fmoe_num_experts"):  # see `add_fmoe_args`
        settings.fmoe_num_experts = getattr(settings, "num_experts", None)
    elif getattr(settings, "fmoe_num_experts", None) is None and hasattr(settings, "expert_model_parallel_size"):
        settings.fmoe_num_experts = (settings.num_experts or 0) // settings.expert_model_parallel_size or None
    if getattr(settings, "fmoe_num_experts", None) is None:
        raise UserError("fmoe_num_experts is missing: pass fmoefy(model, fmoe_num_experts=number of experts per rank)")
    layers = _old_layers(model)
    if not layers:
        return _fmoefy_core(model, settings, gate)
    settings.num_layers = len(layers)
    sizes = [_widths(layer.mlp, index) for index, layer in enumerate(layers)]  # before any layer is replaced
    for index, (layer, (width, hidden)) in enumerate(zip(layers, sizes, strict=True)):
        of_layer = SimpleNamespace(**vars(settings))
        of_layer.hidden_size = width
        of_layer.hidden_hidden_size = getattr(settings, "hidden_hidden_size", None) or hidden
        old = next(layer.mlp.parameters())
        layer.mlp = MegatronMLP(of_layer, index, gate).to(old.device, old.dtype).train(layer.training)
    reset_gate_hook(len(layers))
    return model


def _old_layers(model: Any) -> list[Any]:
    while hasattr(model, "module"):
        model = model.module
    language_model = getattr(model, "language_model", None)
    stacks = [getattr(language_model, name, None) for name in ("transformer", "encoder", "decoder")]
    return [layer for stack in stacks for layer in getattr(stack, "layers", ()) if hasattr(layer, "mlp")]


def _widths(mlp: nn.Module, index: int) -> tuple[int, int]:
    """Return the model width D and the hidden width H of ``mlp``, whose first matrix is [H, D]."""
    if isinstance(mlp, FMoETransformerMLP):
        raise UserError(f"the mlp of layer {index} has experts already: call fmoefy once")
    for parameter in mlp.parameters():
        if parameter.dim() == 2:
            return parameter.shape[1], parameter.shape[0]
    raise UserError(f"the mlp of layer {index} ({type(mlp).__name__}) has no 2-D parameter: fmoefy needs dense MLPs")


def _fmoefy_core(model: nn.Module, settings: SimpleNamespace, gate: Any) -> nn.Module:
    if isinstance(gate, type) and issubclass(gate, gates.BaseGate):
        names = [name for name, of_strategy in STRATEGIES.items() if of_strategy is gate]
        if not names:
            raise UserError(
                f"gate={gate.__name__} has no counterpart among fmoe's routers: pass the name or class of a router"
            )
        gate = names[0]
    options = {"top_k": getattr(settings, "top_k", None), "gate": gate}
    options["d_hidden"] = getattr(settings, "hidden_hidden_size", None)
    options = {name: value for name, value in options.items() if value is not None}
    ep_size = 1
    groups = megatron_groups()
    if getattr(settings, "distributed_experts", False):
        if groups is not None:  # MegatronMoE layers find the group themselves
            ep_size = groups.get_expert_model_parallel_world_size()
        elif dist.is_initialized() and dist.get_world_size() > 1:
            ep_size = dist.get_world_size()
            options["moe_group"] = dist.group.WORLD
    return convert.fmoefy(model, num_experts=settings.fmoe_num_experts * ep_size, upcycle=False, **options)


def patch_model_provider(
    model_provider: Callable[..., nn.Module], gate: Any = None, Megatron_Version: str | None = None, **options: Any
) -> Callable[..., nn.Module]:
    """Return a provider of the models of ``model_provider``, with experts in place of their MLPs (`fmoefy`).

    In the training program of Megatron-LM before 0.19, it is the only change needed (docs/megatron.md).

    Args:
        gate, Megatron_Version: arguments ``gate`` and ``megatron_version`` of `fmoefy`.
        options: further arguments of `fmoefy`.
    """

    @functools.wraps(model_provider)
    def provide(*args: Any, **kwargs: Any) -> nn.Module:
        model = model_provider(*args, **kwargs)
        return fmoefy(model, gate=gate, megatron_version=Megatron_Version, **options)

    return provide


def patch_forward_step(
    forward_step_func: Callable[..., Any], Megatron_Version: str | None = None
) -> Callable[..., Any]:
    """Return ``forward_step_func``: layers of a megatron-core model apply their losses themselves.

    Raises:
        UserError: ``Megatron_Version`` is set, or Megatron-LM 2 or 3 is imported: there, the function has to add the
            losses.
    """
    if Megatron_Version is not None or "megatron.mpu" in sys.modules:
        gone("patch_forward_step", "add the losses of the gates to the loss of forward_step")()
    return forward_step_func


add_balance_log = gone("add_balance_log", "fmoe.metrics(model) has load, drop rate and losses of every layer")
load_checkpoint = gone("load_checkpoint", "experts are part of megatron-core's own distributed checkpoints")
save_checkpoint = gone("save_checkpoint", "experts are part of megatron-core's own distributed checkpoints")
DistributedDataParallel = gone(
    "DistributedDataParallel",
    "megatron-core's own supports experts; for other models use fmoe.DistributedGroupedDataParallel",
)

__all__ = [
    "DistributedDataParallel",
    "MegatronMLP",
    "add_balance_log",
    "add_fmoe_args",
    "fmoefy",
    "generate_megatron_gate_hook",
    "get_balance_profile",
    "load_checkpoint",
    "patch_forward_step",
    "patch_model_provider",
    "reset_gate_hook",
    "save_checkpoint",
]
