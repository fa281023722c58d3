"""Search for experts that a model has already, and their conversion to `RoutedMoE` layers with the same weights.

The MoE models of transformers 5 have one interface: ``experts(hidden_states, top_k_index, top_k_weights)``, with
stacked weights. Routers, shared experts and auxiliary losses are outside of this module, and stay the model's own.
Layout and activation are not inferred from names: a small float64 copy of the module runs, and its conversion must have
the same output and the same gradients.

Shape letters: as in `fmoe.convert.routed`.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fmoe import random
from fmoe.convert.blocks import addition, is_plain, known_activation, obstacle
from fmoe.convert.injection import difference
from fmoe.convert.routed import Form, RoutedMoE
from fmoe.convert.trace import Refusal
from fmoe.errors import one_line
from fmoe.experts.ffn import ACTIVATIONS, GATED_ACTIVATIONS, FFNExperts
from fmoe.kernels.glu import Activation

# Sizes of the copy that runs, under the names that models have for them.
_EXPERTS, _WIDTH, _HIDDEN = 3, 6, 4
_SIZES = {"num_experts": _EXPERTS, "hidden_dim": _WIDTH, "hidden_size": _WIDTH}
_SIZES |= {"intermediate_dim": _HIDDEN, "intermediate_size": _HIDDEN, "expert_dim": _HIDDEN}
_DOUBLE: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


@dataclass(frozen=True, eq=False)
class ExpertBlock:
    """Experts of a model, called as ``module(hidden_states, top_k_index, top_k_weights)`` (`RoutedMoE.forward`).

    Attributes:
        module: the module that holds the weights. The layer inherits its mode (training or evaluation).
        form: names and layout of the weights.
        num_experts: E.
        activation, dropout: as in `fmoe.experts.FFNExperts`.
        is_gated: whether the first map computes gate and value.
        install: function that puts the layer, its argument, into the model. None replaces `module` in its parents.
    """

    module: nn.Module
    form: Form
    num_experts: int
    activation: str | Activation = "silu"
    is_gated: bool = True
    dropout: float = 0.0
    install: Callable[[nn.Module], None] | None = None
    after: tuple[nn.Module, ...] = ()
    place: str = ""

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        """The parameters that hold the experts, by name."""
        experts = range(self.num_experts)
        keys = [key for name in self.form.names for key in self.form.keys(name, experts)]
        return {key: self.module.get_parameter(key) for key in keys}

    def layer(self, name: str = "MoE", backend: str = "auto", **options: Any) -> RoutedMoE:
        """Return a layer with these experts. It shares parameters that it needs as a whole and in the same layout.

        Args:
            backend, options: options of `fmoe.build.Spec`.
        """
        form = self.form
        tensors = self.tensors
        meta = {key: tensor.to("meta") for key, tensor in tensors.items()}
        _, d_model, d_hidden = form.read("weight_out", meta, range(self.num_experts)).shape
        options |= {"gate": nn.Identity(), "expert": None}  # the router is the model's
        layer = RoutedMoE.build(d_model=d_model, num_experts=self.num_experts, name=name, seed=0, **options)
        local = layer.local_experts
        with torch.device("meta"):
            experts = FFNExperts(
                len(local),
                d_model,
                d_hidden,
                activation=self.activation,
                gated=self.is_gated,
                bias="bias_in" in form.names,
                dropout=self.dropout,
                backend=backend,
                first_expert=local.start,
            )
        for own in form.names:
            keys = form.keys(own, local)
            parameter = tensors[keys[0]]
            if len(local) < self.num_experts or not form.is_same(own):
                held = {key: tensors[key].detach() for key in keys}
                if not form.is_listed:
                    held = {key: tensor[local.start : local.stop] for key, tensor in held.items()}
                value = form.read(own, held, local)
                value = value.clone() if form.is_same(own) else value  # a view would keep the experts of other ranks
                parameter = nn.Parameter(value, parameter.requires_grad)
            setattr(experts, own, parameter)
        experts._prepare_backend()  # again, for the device of the weights
        layer.experts = experts
        layer.form = form
        return layer.train(self.module.training)


def stacked_experts(module: nn.Module) -> list[ExpertBlock | Refusal]:
    """Find experts with stacked weights, as in the MoE models of transformers 5.

    They hold ``gate_up_proj`` (``up_proj`` if ungated), ``down_proj`` and possibly biases, in any layout of `Form`.
    """
    held = dict(module.named_parameters(recurse=False))
    first = next((name for name in ("gate_up_proj", "up_proj") if name in held), None)
    if first is None or "down_proj" not in held:
        return []
    names: dict[str, tuple[str, ...]] = {"weight_in": (first,), "weight_out": ("down_proj",)}
    if f"{first}_bias" in held:
        names |= {"bias_in": (f"{first}_bias",), "bias_out": ("down_proj_bias",)}
    reason = _obstacle(module, {name for theirs in names.values() for name in theirs})
    if reason is not None:
        return [Refusal(reason)]
    is_gated = first == "gate_up_proj"
    activations = [*ACTIVATIONS, *(GATED_ACTIVATIONS if is_gated else ())]
    activations += [f for f in (*module.children(), *vars(module).values()) if callable(f) and not isinstance(f, type)]
    reasons = []
    for is_transposed in (False, True):
        twin = _small_copy(module, names, is_gated, is_transposed)
        forward = inspect.unwrap(type(module).forward)  # not the implementation that the model's config chooses
        try:
            expected = _trial(functools.partial(forward, twin), twin._parameters)
        except Exception as error:  # of the other layout
            reasons.append(f"does not run with small weights ({one_line(error, 120, with_type=True)})")
            continue
        for is_interleaved in (False, True)[: 1 + is_gated]:
            for activation in activations:
                block = ExpertBlock(twin, Form(names, is_transposed, is_interleaved), _EXPERTS, activation, is_gated)
                if _computes(block, expected):
                    return [replace(block, module=module, num_experts=len(held[first]))]
        reasons.insert(0, "computes something else than feed-forward experts with an activation between two maps")
    return [Refusal(reasons[0])]


def switch_experts(module: nn.Module) -> list[ExpertBlock | Refusal]:
    """Find the experts of Switch Transformers, one module each."""
    if type(module).__name__ != "SwitchTransformersExperts":
        return []
    for name, expert in module.named_children():
        for part in ("wi", "wo"):
            if (why := obstacle(getattr(expert, part))) is not None:
                return [Refusal(f"{name}.{part} {why}")]
    first: Any = next(module.children())
    form = Form({"weight_in": ("expert_{}.wi.weight",), "weight_out": ("expert_{}.wo.weight",)})
    activation = known_activation(first.act, torch.float64)
    return [ExpertBlock(module, form, len(list(module.children())), activation, False, first.dropout.p)]


def _obstacle(module: nn.Module, names: set[str]) -> str | None:
    """Return a phrase that explains why the module is not just plain parameters of these names; None if it is."""
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    if tensors.keys() != names:
        return f"has {', '.join(sorted(tensors))} instead of {', '.join(sorted(names))}: dequantize the experts first"
    for name, value in tensors.items():
        if type(value) is not nn.Parameter or not value.is_floating_point() or torch.finfo(value.dtype).bits < 16:
            return (
                f"has a {name} of {type(value).__name__} {value.dtype}: experts need plain weights of 16 bits or more"
            )
    if not all(is_plain(child) and addition(child) is None for child in module.children()):
        return "has modules with weights or hooks inside"
    return addition(module)


def _small_copy(module: nn.Module, names: dict[str, tuple[str, ...]], is_gated: bool, is_transposed: bool) -> Any:
    """Return a float64 copy on the CPU, in training mode, with few experts and small matrices of random values."""
    height = (1 + is_gated) * _HIDDEN
    shapes = {
        "weight_in": (height, _WIDTH),
        "weight_out": (_WIDTH, _HIDDEN),
        "bias_in": (height,),
        "bias_out": (_WIDTH,),
    }
    twin: Any = copy.copy(module)
    vars(twin).update({key: size for key, size in _SIZES.items() if hasattr(twin, key)}, training=True, _parameters={})
    with random.seeded(0):
        for own, (name,) in names.items():
            shape = shapes[own][::-1] if is_transposed else shapes[own]
            twin.register_parameter(name, nn.Parameter(torch.randn(_EXPERTS, *shape, **_DOUBLE)))
    return twin


@torch.enable_grad()
def _trial(experts: Callable[..., Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the output of ``experts`` for random tokens, and the gradients of its inputs and parameters."""
    size_T1 = torch.exp2(torch.linspace(-6, 4, 48, **_DOUBLE)).unsqueeze(1)  # large enough for clamps
    with random.seeded(1):
        x_TD = (torch.randn(48, _WIDTH, **_DOUBLE) * size_T1).requires_grad_()
        index_TK = torch.randn(48, _EXPERTS, **_DOUBLE).argsort(1)[:, :2]
        weight_TK = torch.randn(48, 2, **_DOUBLE).requires_grad_()
        upstream_TD = torch.randn(48, _WIDTH, **_DOUBLE)
    y_TD = experts(x_TD, index_TK, weight_TK)
    leaves = {"x": x_TD, "weight": weight_TK, **parameters}
    gradients = torch.autograd.grad(y_TD, list(leaves.values()), upstream_TD, materialize_grads=True)
    return {"y": y_TD.detach(), **dict(zip(leaves, gradients, strict=True))}


def _computes(block: ExpertBlock, expected: dict[str, Tensor]) -> bool:
    """Return whether the layer of a small block has the ``expected`` output and gradients."""
    try:
        layer = block.layer(backend="torch")
        actual = _trial(layer, dict(layer.experts.named_parameters()))
    except Exception:  # the activation is not a function of rows
        return False
    for own in block.form.names:
        actual |= block.form.write(own, actual.pop(own), range(_EXPERTS))
    return all(difference(actual[name], value) < 1e-9 for name, value in expected.items())
