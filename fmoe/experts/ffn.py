"""Feed-forward experts with stacked weights.

Shape letters: T tokens, K experts per token, R rows, L experts of this rank, D model width, H hidden width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from fmoe import random
from fmoe.errors import UserError
from fmoe.experts import external, initial
from fmoe.experts.external import Stacks
from fmoe.kernels import backends
from fmoe.kernels.cuda import ffn as cuda_ops
from fmoe.kernels.cuda import gemm as cuda_gemm
from fmoe.kernels.cuda import loader as cuda
from fmoe.kernels.ffn import expert_ffn, grouped_linear
from fmoe.kernels.glu import Activation, SwiGLUOAI, gate
from fmoe.kernels.native import loader as native
from fmoe.kernels.native import ops as native_ops
from fmoe.runtime import ownership

Counts = Tensor | Sequence[int]  # number of rows of each expert

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),  # not a lambda: layers can be pickled
    "relu": F.relu,
    "silu": F.silu,
}
# Activations for gated experts only: they also transform the second half.
GATED_ACTIVATIONS: dict[str, Activation] = {"swiglu_oai": SwiGLUOAI()}

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
        parameters = dict(self.named_parameters(recurse=False))
        # Norms of weight_norm may lack the axis of the experts. Its deprecated version keeps them as own parameters.
        directions = {
            name: parameters.get(f"{name.removesuffix('_g')}_v", parameter) for name, parameter in parameters.items()
        }
        groups: list[list[Any]] = [[parameters[name], direction] for name, direction in directions.items()]
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
            activations = ACTIVATIONS | GATED_ACTIVATIONS
            if activation not in activations:
                raise UserError(f"activation={activation!r} is not known; valid names: {', '.join(activations)}")
            activation = activations[activation]
        if isinstance(activation, SwiGLUOAI) and not gated:
            raise UserError(f"activation={activation} needs gated=True: it multiplies gates and values")
        if not callable(activation):
            raise UserError(f"activation={activation!r} is neither a name nor a function")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout={dropout} is not in [0, 1)")
        self.num_experts = num_experts
        self.d_model = d_model
        self.d_hidden = d_hidden
        self.dropout = dropout
        self.activation = activation
        self.gated = gated
        self.backend = backend
        self.gemm = gemm
        self.first_expert = first_expert
        self.seed = seed
        self.init_method = init_method
        self.output_init_method = output_init_method
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
        return self._run(self._stacks(), rows_RD, counts_L, keys_R)

    @property
    def kind(self) -> str:
        """Description of the experts. It must be equal on all ranks."""
        activation = getattr(self.activation, "__name__", repr(self.activation))
        return f"{type(self).__name__}({activation}, gated={self.gated}, bias={self.bias_in is not None})"

    def shadow(self, local: int) -> list[Tensor]:
        """Return the parameters of expert ``local`` of this rank, differentiable, for `run_with` on another rank."""
        return [stack[local] for stack in self._stacks() if stack is not None]

    def run_with(
        self, parameters: list[list[Tensor]], rows_RD: Tensor, counts: Counts, keys_R: Tensor | None = None
    ) -> Tensor:
        """Run rows through experts of other ranks, given their parameters from `shadow`; otherwise like `forward`."""
        weight_in, *others = [torch.stack(column) for column in zip(*parameters, strict=True)]
        bias_in = None if self.bias_in is None else others.pop(0)
        bias_out = None if self.bias_out is None else others.pop()
        return self._run((weight_in, bias_in, others[0], bias_out), rows_RD, counts, keys_R)

    def _stacks(self) -> Stacks:
        return self.weight_in, self.bias_in, self.weight_out, self.bias_out

    def _run(self, parameters: Stacks, rows_RD: Tensor, counts_L: Counts, keys_R: Tensor | None) -> Tensor:
        operation = self.operation(rows_RD)
        rows_RD, parameters = _autocast(rows_RD, parameters)
        if operation is not None:
            return operation(rows_RD, *parameters, counts_L, self.activation, self.gated)
        counts = counts_L.tolist() if isinstance(counts_L, Tensor) else counts_L
        if not (self.dropout and self.training):
            return expert_ffn(rows_RD, *parameters, counts, self.activation, self.gated)
        weight_in, bias_in, weight_out, bias_out = parameters
        hidden_RP = grouped_linear(rows_RD, weight_in, bias_in, counts)
        hidden_RH = gate(self.activation, hidden_RP) if self.gated else self.activation(hidden_RP)
        if keys_R is None:
            hidden_RH = F.dropout(hidden_RH, self.dropout)
        else:
            kept_RH = self.own_hidden(random.uniform(keys_R, self.d_hidden * self.hidden_parts)) >= self.dropout
            hidden_RH = hidden_RH * (kept_RH / (1 - self.dropout)).to(hidden_RH.dtype)
        return grouped_linear(hidden_RH, weight_out, bias_out, counts)

    def fused_forward(
        self, operation: Callable[..., Tensor], x_TD: Tensor, counts_L: Tensor, **arguments: Any
    ) -> Tensor:
        """Compute the experts by one operation of a backend.

        Args:
            operation: result of the method `operation`.
            x_TD: tokens, or rows sorted by expert. For tokens, the operation also permutes them to the order of
                experts, and combines the outputs.
            counts_L: number of rows of each expert.
            arguments: for tokens, `DispatchPlan.fused_arguments` of a plan whose experts are all on this rank. For
                rows, ``weight_TK`` of shape [R], if anything. With it, the backward pass multiplies the gradient of
                output r by ``weight_TK[r]``.
        """
        x_TD, parameters = _autocast(x_TD, self._stacks())
        return operation(x_TD, *parameters, counts_L, self.activation, self.gated, **arguments)

    def operation(self, x_TD: Tensor) -> Callable[..., Tensor] | None:
        """Return the backend's operation for tokens or rows like ``x_TD``; None if torch computes the experts.

        Raises:
            UserError: the ``backend`` that was chosen by name does not support dtype or device.
        """
        backend = self.backend
        if backend == "torch" or (self.dropout and self.training):
            return None
        if backend in external.BACKENDS:
            return functools.partial(external.ffn, backend)
        tensors = [x_TD, *(stack for stack in self._stacks() if stack is not None)]
        dtype = autocast_dtype(x_TD.device, x_TD.dtype, tensors[1].dtype)
        dtypes = {tensor.dtype for tensor in tensors} if dtype is None else {dtype}
        devices = {tensor.device for tensor in tensors}
        if backend != "cuda" and backends.native_takes_ffn(self.activation, devices, dtypes):
            return functools.partial(native_ops.expert_ffn, into_main_grad=self.into_main_grad)
        if backend != "native" and backends.cuda_takes_ffn(self.activation, devices, dtypes):
            ours = functools.partial(cuda_ops.expert_ffn, gemm=self.gemm, into_main_grad=self.into_main_grad)
            others: Sequence[str] = ()
            if backend == "auto" and cuda_gemm.requested(self.gemm) == "auto":
                sizes = (self.num_experts, self.d_model, self.d_hidden)
                others = external.candidates(x_TD.device, dtypes, sizes, self.activation, self.gated)
            return functools.partial(external.fastest_ffn, ours, others, self.training) if others else ours
        if backend == "cuda" or (backend == "native" and backends.native_is_loaded):
            kinds = "float32 or bfloat16, on the CPU" if backend == "native" else "float32 or 16 bits, on a GPU"
            held = tensors[1]
            raise UserError(
                f"backend={backend!r} needs rows and weights in one dtype, {kinds}: rows are "
                f"{dtype or x_TD.dtype} on {x_TD.device}, weights are {dtype or held.dtype} on {held.device}"
            )
        return None

    def own_hidden(self, x_RH: Tensor) -> Tensor:
        """Return this rank's slice of ``x_RH`` along the hidden dimension."""
        return x_RH

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, d_model={self.d_model}, d_hidden={self.d_hidden}"


def autocast_dtype(device: torch.device, *dtypes: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which autocast casts operands of these dtypes; None if it does not. It casts no float64."""
    if not torch.is_autocast_enabled(device.type) or torch.float64 in dtypes:
        return None
    return torch.get_autocast_dtype(device.type)


def _autocast(rows_RD: Tensor, parameters: Stacks) -> tuple[Tensor, Stacks]:
    weight_in, bias_in, weight_out, bias_out = parameters
    dtype = autocast_dtype(rows_RD.device, rows_RD.dtype, weight_in.dtype)
    if dtype is None:
        return rows_RD, parameters
    bias_in, bias_out = (None if bias is None else bias.to(dtype) for bias in (bias_in, bias_out))
    return rows_RD.to(dtype), (weight_in.to(dtype), bias_in, weight_out.to(dtype), bias_out)
