"""Feed-forward experts with stacked weights, and `ExpertCall`, through which an exchange calls experts of any kind.

Shape letters: T tokens, K experts per token, R rows, L experts of this rank, D model width, H hidden width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.parametrize import is_parametrized

from fmoe import random
from fmoe.errors import UserError
from fmoe.experts import external, initial
from fmoe.kernels import backends
from fmoe.kernels.cuda import ffn as cuda_ops
from fmoe.kernels.cuda import gemm as cuda_gemm
from fmoe.kernels.cuda import loader as cuda
from fmoe.kernels.ffn import expert_ffn, grouped_linear
from fmoe.kernels.glu import SwiGLUOAI, gate
from fmoe.kernels.native import loader as native
from fmoe.kernels.native import ops as native_ops
from fmoe.kernels.rows import DispatchPlan, weigh_gradient
from fmoe.runtime import ownership
from fmoe.runtime.adapters import adapted

Activation = Callable[[Tensor], Tensor]
Counts = Tensor | Sequence[int]  # number of rows of each expert
Parameters = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # weight_in, bias_in, weight_out, bias_out

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),  # not a lambda: layers can be pickled
    "relu": F.relu,
    "silu": F.silu,
}
# Activations for gated experts only: they also transform the second half.
GATED_ACTIVATIONS: dict[str, Activation] = {"swiglu_oai": SwiGLUOAI()}

# Kinds of module hooks. They see rows and outputs, which a fused forward pass does not have.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_NUMBERS_AT_ONCE = 1 << 26  # initial weights drawn at once: 256 MiB

BACKENDS = ("auto", "native", "cuda", "torch", *external.BACKENDS)


class Stacked(nn.Module):
    """A module whose own parameters stack experts along the first axis.

    These parameters have the attribute ``is_stacked = True``, so that `fmoe.optim` treats each expert's slice as a
    separate tensor.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        ownership.enrol(self)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        own = dict(self.named_parameters(recurse=False))
        # Norms of weight_norm may lack the axis of the experts. Its deprecated version keeps them as own parameters.
        directions = {name: own.get(f"{name.removesuffix('_g')}_v", parameter) for name, parameter in own.items()}
        groups: list[list[Any]] = [[own[name], direction] for name, direction in directions.items()]
        parametrizations: dict[str, Any] = getattr(self, "parametrizations", {})
        groups += [list(parametrization.parameters(recurse=False)) for parametrization in parametrizations.values()]
        for group in groups:
            for parameter in group:
                parameter.is_stacked = parameter.shape[:1] == max(tensor.shape[:1] for tensor in group) != ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # `to_empty`, for one, makes new parameters without the mark
        self._mark_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        ownership.enrol(self)
        self._mark_parameters()  # copies of parameters have lost the mark


class FFNExperts(Stacked):
    """L feed-forward experts, ``W_out act(W_in x + b_in) + b_out``.

    In gated experts (GLU variants, arXiv 2002.05202), W_in has twice the height. The hidden units are then
    ``act(first half) * second half`` of ``W_in x + b_in``. The activation "swiglu_oai" also transforms the second half.

    Args:
        num_experts: L, the number of experts of this rank.
        d_model, d_hidden: D and H.
        activation: a name in `ACTIVATIONS` or, for gated experts, in `GATED_ACTIVATIONS`; or a function of a tensor.
        gated: whether ``weight_in`` holds gate and value, [2 * H, D].
        bias: whether the two linear maps have biases.
        first_expert: global id of the first expert. The weights of an expert depend on its global id and ``seed``.
        seed: seed of the layer's weights.
        dropout: rate of dropout of the hidden units in training ("expert dropout", Switch section 2.4).
        backend: "native" (C++ operations on the CPU, docs/native.md), "cuda" (kernels on GPUs, docs/cuda.md), "te" or
            "sonicmoe" (TransformerEngine or SonicMoE, if installed), "torch", or "auto". The constructor loads the
            backend, and builds it if needed.
            "auto" uses native on the CPU. On a GPU it uses cuda, or te or sonicmoe if one is installed and faster. If
            native or cuda is unavailable or does not support the input, "auto" uses torch.
        gemm: GEMMs of the cuda backend: "grouped" (one call for all experts), "loop" (a call per expert), "triton", or
            "auto". "auto" takes the value of the environment variable FMOE_GEMM, or measures which is fastest.
        init_method: function that fills one expert's W_in in place, [H, D] or, if gated, [2 * H, D]. The bias of that
            map is then zero. None draws matrix and bias from U(-1/sqrt(fan in), 1/sqrt(fan in)), as in torch's Linear.
        output_init_method: the same for W_out, [D, H].

    Raises:
        UserError: an option is invalid, or the backend is unavailable or does not support the experts.
    """

    into_main_grad = False  # whether gradients are added to Megatron's main_grad (`fmoe.kernels.native.ops.expert_ffn`)
    hidden_parts = 1  # number of ranks over which the hidden units are spread (`ShardedFFNExperts`)

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        *,
        activation: str | Activation = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        backend: str = "auto",
        gemm: str = "auto",
        first_expert: int = 0,
        seed: int = 0,
        init_method: Callable[[Tensor], object] | None = None,
        output_init_method: Callable[[Tensor], object] | None = None,
    ):
        super().__init__()
        if d_hidden < 1:
            raise UserError(f"d_hidden={d_hidden} must be at least 1")
        if isinstance(activation, str):
            known = ACTIVATIONS | GATED_ACTIVATIONS
            if activation not in known:
                raise UserError(f"activation={activation!r} is not known; valid names: {', '.join(known)}")
            activation = known[activation]
        if isinstance(activation, SwiGLUOAI) and not gated:
            raise UserError(f"activation={activation} needs gated=True: it multiplies gates and values")
        if not callable(activation):
            raise UserError(f"activation={activation!r} is neither a name nor a function")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout={dropout} is not in [0, 1)")
        self.num_experts, self.d_model, self.d_hidden, self.dropout = num_experts, d_model, d_hidden, dropout
        self.activation, self.gated = activation, gated
        self.backend, self.gemm = backend, gemm
        self.first_expert, self.seed = first_expert, seed
        self.init_method, self.output_init_method = init_method, output_init_method
        self.weight_in = nn.Parameter(torch.empty(num_experts, d_hidden * (1 + gated), d_model))
        self.weight_out = nn.Parameter(torch.empty(num_experts, d_model, d_hidden))
        self.bias_in = nn.Parameter(torch.empty(num_experts, d_hidden * (1 + gated))) if bias else None
        self.bias_out = nn.Parameter(torch.empty(num_experts, d_model)) if bias else None
        self._prepare_backend()
        self.reset_parameters()

    def _prepare_backend(self) -> None:
        if self.backend not in BACKENDS:
            raise UserError(f"backend={self.backend!r} is not one of {', '.join(BACKENDS)}")
        cuda_gemm.requested(self.gemm)
        if self.backend == "auto":
            device = self.weight_in.device
            has_gpu = device.type == "cuda" or torch.cuda.is_available()
            is_loaded = has_gpu and cuda.load(device if device.type == "cuda" else None)  # logs why it fails, once
            if device.type == "cpu" and not is_loaded:
                native.load()
        elif self.backend in external.BACKENDS:
            sizes = {"num_experts": self.num_experts, "d_model": self.d_model, "d_hidden": self.d_hidden}
            external.check(self.backend, self.activation, gated=self.gated, dropout=self.dropout, **sizes)
        elif self.backend != "torch":
            if backends.activation_code(self.activation) is None:
                raise UserError(
                    f"backend={self.backend!r} does not support activation={self.activation!r}: use one of "
                    f"{', '.join(ACTIVATIONS)}, or backend='torch'"
                )
            if self.dropout:
                raise UserError(f"dropout={self.dropout} needs backend='torch' or 'auto', not {self.backend!r}")
            backend = native if self.backend == "native" else cuda
            if not backend.load():
                raise UserError(f"backend={self.backend!r} is unavailable: {backend.why()}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each parameter from (seed, global id of the expert, name), so that it is equal at every EP size.

        Values have the same bits on every device, and are drawn on the device of the parameters. For parameters on the
        CPU, a GPU with kernels draws them if the native backend is not loaded. However, an ``init_method`` or
        ``output_init_method`` other than `torch.nn.init.normal_` runs on the CPU, one expert at a time. Meta tensors
        stay as they are.
        """
        for name in ("weight_in", "weight_out", "bias_in", "bias_out"):
            parameter = getattr(self, name)
            if parameter is None or parameter.is_meta:
                continue
            if not is_parametrized(self, name):
                self._draw(name, parameter)
                continue
            value = torch.empty_like(parameter)
            self._draw(name, value)
            parametrizations: Any = self.parametrizations
            parametrization = parametrizations[name]
            if all(hasattr(function, "right_inverse") for function in parametrization):
                setattr(self, name, value)
            else:  # torch takes the identity as the inverse
                parametrization.original.copy_(value)

    def _draw(self, name: str, parameter: Tensor) -> None:
        shape = self.whole_shape(name, parameter.shape[1:])
        is_first = name.endswith("_in")
        method = self.init_method if is_first else self.output_init_method
        if method is not None and name.startswith("bias"):
            parameter.zero_()
            return
        bound = (self.d_model if is_first else self.d_hidden * self.hidden_parts) ** -0.5
        drawn = (0.0, bound) if method is None else initial.normal_of(method)
        experts = range(self.first_expert, self.first_expert + self.num_experts)
        keys = [random.key("expert", self.seed, expert, name) for expert in experts]
        at_once = 1 if drawn is None else max(1, _NUMBERS_AT_ONCE // max(1, shape.numel()))
        for first in range(0, len(keys), at_once):
            part = keys[first : first + at_once]
            if drawn is not None:
                values = initial.draw(part, shape.numel(), parameter.device, drawn[1], method is not None)
                values = values.add_(drawn[0]) if drawn[0] else values
            elif method is not None:
                values = torch.empty(shape, device="cpu", dtype=torch.float32)
                with random.seeded(part[0]):
                    method(values)
            for target, value in zip(parameter[first : first + len(part)], values.view(-1, *shape), strict=True):
                target.copy_(self.own_part(name, value))

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Return the unsharded shape of the parameter ``name`` of one expert, given its ``shape`` on this rank."""
        return shape

    def own_part(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's shard of the parameter ``name`` of one expert, given the unsharded ``value``."""
        return value

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and rows."""
        return self.weight_in.dtype

    @property
    def wants_row_keys(self) -> bool:
        """True with dropout: pass ``keys_R`` to `forward`, so that dropout does not depend on the number of ranks."""
        return self.dropout > 0

    def forward(self, rows_RD: Tensor, counts_L: Counts, keys_R: Tensor | None = None) -> Tensor:
        """Return the outputs of rows that are sorted by expert: [R, D].

        Args:
            counts_L: number of rows of each expert; a tensor on the CPU or numbers.
            keys_R: int64, random key (seed) of each row's dropout; None draws dropout from torch's default generator.
        """
        return self._run((self.weight_in, self.bias_in, self.weight_out, self.bias_out), rows_RD, counts_L, keys_R)

    @property
    def kind(self) -> str:
        """Description of the experts. It must be equal on all ranks."""
        activation = getattr(self.activation, "__name__", repr(self.activation))
        return f"{type(self).__name__}({activation}, gated={self.gated}, bias={self.bias_in is not None})"

    def shadow(self, local: int) -> list[Tensor]:
        """Return the parameters of expert ``local`` of this rank, differentiable, for `run_with` on another rank."""
        stacks = (self.weight_in, self.bias_in, self.weight_out, self.bias_out)
        return [stack[local] for stack in stacks if stack is not None]

    def run_with(
        self, parameters: list[list[Tensor]], rows_RD: Tensor, counts: Sequence[int], keys_R: Tensor | None = None
    ) -> Tensor:
        """Run rows through experts of other ranks, given their parameters from `shadow`; otherwise like `forward`."""
        stacks = iter([torch.stack(column) for column in zip(*parameters, strict=True)])
        weight_in, bias_in = next(stacks), None if self.bias_in is None else next(stacks)
        weight_out, bias_out = next(stacks), None if self.bias_out is None else next(stacks)
        return self._run((weight_in, bias_in, weight_out, bias_out), rows_RD, counts, keys_R)

    def _run(self, parameters: Parameters, rows_RD: Tensor, counts_L: Counts, keys_R: Tensor | None) -> Tensor:
        rows_RD, parameters = _autocast(rows_RD, parameters)
        if operation := self._backend_ffn(rows_RD, parameters):
            return operation(rows_RD, *parameters, counts_L, self.activation, self.gated)
        counts = counts_L.tolist() if isinstance(counts_L, Tensor) else counts_L
        if self.dropout and self.training:
            return self._run_with_dropout(parameters, rows_RD, counts, keys_R)
        return expert_ffn(rows_RD, *parameters, counts, self.activation, self.gated)

    def _run_with_dropout(
        self, parameters: Parameters, rows_RD: Tensor, counts: Sequence[int], keys_R: Tensor | None
    ) -> Tensor:
        weight_in, bias_in, weight_out, bias_out = parameters
        hidden_RH = self._activate(grouped_linear(rows_RD, weight_in, bias_in, counts))
        if keys_R is None:
            hidden_RH = F.dropout(hidden_RH, self.dropout)
        else:
            kept_RH = self.own_hidden(random.uniform(keys_R, self.d_hidden * self.hidden_parts)) >= self.dropout
            hidden_RH = hidden_RH * (kept_RH / (1 - self.dropout)).to(hidden_RH.dtype)
        return grouped_linear(hidden_RH, weight_out, bias_out, counts)

    def fused_forward(self, x_TD: Tensor, counts_L: Tensor, **arguments: Any) -> Tensor | None:
        """Compute the experts by one operation of the backend; return None if no operation supports this input.

        Args:
            x_TD: tokens, or rows sorted by expert. For tokens, the operation also permutes them to the order of
                experts, and combines the outputs.
            counts_L: number of rows of each expert.
            arguments: for tokens, `DispatchPlan.fused_arguments` of a plan whose experts are all on this rank. For
                rows, ``weight_TK`` of shape [R], if anything. With it, the backward pass multiplies the gradient of
                output r by ``weight_TK[r]``.
        """
        x_TD, parameters = _autocast(x_TD, (self.weight_in, self.bias_in, self.weight_out, self.bias_out))
        operation = self._backend_ffn(x_TD, parameters)
        return operation(x_TD, *parameters, counts_L, self.activation, self.gated, **arguments) if operation else None

    def _backend_ffn(self, rows_RD: Tensor, parameters: Parameters) -> Callable[..., Tensor] | None:
        """Return the backend's operation for these tensors; None if torch computes them."""
        if self.backend == "torch" or (self.dropout and self.training):
            return None
        if self.backend in external.BACKENDS:
            return functools.partial(external.ffn, self.backend)
        if self.backend != "cuda" and backends.native_takes_ffn(rows_RD, self.activation, *parameters):
            return functools.partial(native_ops.expert_ffn, into_main_grad=self.into_main_grad)
        if self.backend != "native" and backends.cuda_takes_ffn(rows_RD, self.activation, *parameters):
            return self._cuda_ffn(rows_RD, parameters)
        if self.backend == "cuda" or (self.backend == "native" and backends.native_is_loaded):
            self._refuse(rows_RD, parameters[0])
        return None

    def _cuda_ffn(self, rows_RD: Tensor, parameters: Parameters) -> Callable[..., Tensor]:
        """Return fmoe's CUDA operation, or `external.fastest_ffn` where "auto" may choose another package."""
        ours = functools.partial(cuda_ops.expert_ffn, gemm=self.gemm, into_main_grad=self.into_main_grad)
        if self.backend == "auto" and cuda_gemm.requested(self.gemm) == "auto":
            weights = (parameters[0], parameters[2])
            if others := external.candidates(rows_RD, *weights, self.activation, self.gated):
                return functools.partial(external.fastest_ffn, ours, others, self.training)
        return ours

    def _refuse(self, rows_RD: Tensor, weight: Tensor) -> NoReturn:
        wants = "float32 or bfloat16, on the CPU" if self.backend == "native" else "float32 or 16 bits, on a GPU"
        raise UserError(
            f"backend={self.backend!r} needs rows and weights in one dtype, {wants}: rows are {rows_RD.dtype} on "
            f"{rows_RD.device}, weights are {weight.dtype} on {weight.device}"
        )

    def own_hidden(self, x_RH: Tensor) -> Tensor:
        """Return this rank's slice of ``x_RH`` along the hidden dimension."""
        return x_RH

    def _activate(self, hidden: Tensor) -> Tensor:
        """Apply the activation: [n, H] -> [n, H], gated [n, 2 H] -> [n, H]."""
        return gate(self.activation, hidden) if self.gated else self.activation(hidden)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, d_model={self.d_model}, d_hidden={self.d_hidden}"


def autocast_dtype(device: torch.device, *dtypes: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which autocast casts operands of these dtypes; None if it does not. It casts no float64."""
    if not torch.is_autocast_enabled(device.type) or torch.float64 in dtypes:
        return None
    return torch.get_autocast_dtype(device.type)


def _autocast(rows_RD: Tensor, parameters: Parameters) -> tuple[Tensor, Parameters]:
    weight_in, bias_in, weight_out, bias_out = parameters
    dtype = autocast_dtype(rows_RD.device, rows_RD.dtype, weight_in.dtype)
    if dtype is None:
        return rows_RD, parameters
    bias_in, bias_out = (None if bias is None else bias.to(dtype) for bias in (bias_in, bias_out))
    return rows_RD.to(dtype), (weight_in.to(dtype), bias_in, weight_out.to(dtype), bias_out)


class ExpertCall:
    """One forward pass of a layer's experts.

    Module hooks of the experts, such as FSDP's, run in every call except `run_with`.

    Args:
        module: the experts.
        name: the layer's name in errors.
        x_TD: the tokens.
        training: whether the layer is in training mode, in which dropout drops hidden units.

    Attributes:
        is_training: the argument ``training``.
        needs_keys: whether a call requires dropout keys (`FFNExperts.wants_row_keys`). They are the last tensor of the
            call's argument ``rows``, int64 [R, 1].

    Raises:
        UserError: tokens and experts have different dtypes, and autocast is off or one of the dtypes is float64.
    """

    module: Any  # an nn.Module; its type lacks the experts' own methods

    def __init__(self, module: nn.Module, name: str, x_TD: Tensor, training: bool):
        self.module, self.name, self.is_training = module, name, training
        experts = module if isinstance(module, FFNExperts) else adapted(module)
        self.needs_keys = training and getattr(experts, "wants_row_keys", False)
        dtype = getattr(experts, "dtype", x_TD.dtype)
        # The mixed precision policy of fully_shard casts weights and rows when the experts are called.
        is_managed = getattr(module, "_is_fsdp_managed_module", False)
        if x_TD.dtype != dtype and not is_managed and autocast_dtype(x_TD.device, x_TD.dtype, dtype) is None:
            raise UserError(f"the input of {name} is {x_TD.dtype}, its experts are {dtype}: cast one, or use autocast")

    def __call__(self, rows: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Return the experts' outputs for their rows.

        Args:
            rows: tensors [R, ...], sorted by expert.
            counts: number of rows of each expert.
        """
        counts_L = torch.tensor(counts, dtype=torch.int64, device="cpu")
        rows, keys = (rows[:-1], [rows[-1].squeeze(1)]) if self.needs_keys else (rows, [])
        return self._checked(self.compute(rows, counts_L, *keys), sum(counts))

    def weighed(self, rows: list[Tensor], counts: list[int], weight_R: Tensor) -> list[Tensor]:
        """Like `__call__`, but the backward pass multiplies the gradient of row r by ``weight_R[r]``."""
        counts_L = torch.tensor(counts, dtype=torch.int64, device="cpu")
        fused = self.fused(rows, counts_L, weight_TK=weight_R)
        return fused or [weigh_gradient(y, weight_R) for y in self(rows, counts)]

    def compute(self, rows: list[Tensor], counts_L: Tensor, *keys_R: Tensor) -> list[Tensor]:
        return [self.module(rows[0], counts_L, *keys_R)]

    def combined(self, inputs: list[Tensor], weight_TK: Tensor, plan: DispatchPlan, counts: list[int]) -> list[Tensor]:
        """Permute tokens to the order of experts, run the experts, and return the combined outputs.

        Args:
            inputs: the tokens, as tensors [T, ...].
            plan: order of the rows. All its experts are on this rank.
            counts: number of rows of each expert.
        """
        num_rows = sum(counts)
        if outputs := self.fused(inputs, plan.count_E, **plan.kept_only(num_rows).fused_arguments(weight_TK)):
            return outputs
        rows = [plan.permute(x, num_rows) for x in inputs]
        return [plan.combine(y, weight_TK) for y in self(rows, counts)]

    def fused(self, inputs: list[Tensor], counts_L: Tensor, **arguments: Any) -> list[Tensor] | None:
        """Return the outputs of `FFNExperts.fused_forward`, or None if these experts cannot use it.

        The result is None in these cases:

        * `FFNExperts.fused_forward` returns None;
        * the experts have module hooks;
        * the experts apply dropout in this call;
        * the experts are not `FFNExperts`, or override `FFNExperts.forward`.
        """
        if self.needs_keys or not self._is_plain():
            return None
        out = self.module.fused_forward(inputs[0], counts_L, **arguments)
        return None if out is None else [out]

    def _is_plain(self) -> bool:
        is_ffn = isinstance(self.module, FFNExperts) and is_unchanged(self.module, "forward", FFNExperts.forward)
        return is_ffn and not any(getattr(self.module, hooks) for hooks in _HOOKS) and not _has_any_global_hook()

    def shadow(self, local: int) -> list[Tensor]:
        """Return the parameters of expert ``local`` of this rank."""
        return self.module.shadow(local)

    def run_with(
        self, parameters: list[list[Tensor]], rows: list[Tensor], counts: list[int], weight_R: Tensor | None = None
    ) -> list[Tensor]:
        """Run rows through experts of other ranks, given their parameters from `shadow`.

        With ``weight_R``, the backward pass multiplies gradients as in `weighed`.
        """
        rows, keys_R = (rows[:-1], rows[-1].squeeze(1)) if self.needs_keys else (rows, None)
        outputs = self._checked(self.compute_with(parameters, rows, counts, keys_R), sum(counts))
        return outputs if weight_R is None else [weigh_gradient(y, weight_R) for y in outputs]

    def compute_with(
        self, parameters: list[list[Tensor]], rows: list[Tensor], counts: list[int], keys_R: Tensor | None
    ) -> list[Tensor]:
        return [self.module.run_with(parameters, rows[0], counts, keys_R)]

    def _checked(self, outputs: list[Tensor], expected: int) -> list[Tensor]:
        for out in outputs:
            if out.shape[0] != expected:
                raise UserError(f"the experts of {self.name} returned {out.shape[0]} rows for {expected} rows of input")
        return outputs


def is_unchanged(owner: object, name: str, function: Callable[..., Any]) -> bool:
    """Return whether the method ``name`` of ``owner`` is ``function``: neither class nor instance overrides it."""
    return getattr(type(owner), name) is function and name not in owner.__dict__
