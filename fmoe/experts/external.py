"""Feed-forward experts computed by other packages, if they are installed: ``backend="te"`` and ``"sonicmoe"``.

Thin adapters for TransformerEngine's ``GroupedLinear`` (2.x) and SonicMoE's ``moe_general_routing_inputs`` (0.0.1).
Parameters stay in our own layout, so that checkpoints, optimizers and the layer do not depend on the package; each
adapter states the cost of converting to the layout of its package.

Shape letters: T tokens, K choices, N = T * K assignments, M rows, L experts, D width, H hidden width, P height of the
first map (2 H if gated, else H).
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.kernels.ffn import expert_ffn
from fmoe.kernels.glu import gate
from fmoe.kernels.rows import combine, permute

Stacks = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # weight_in, bias_in, weight_out, bias_out

BACKENDS = ("te", "sonicmoe")
_NEEDS = {
    "te": ("transformer_engine.pytorch", "pip install --no-build-isolation 'transformer_engine[pytorch]'"),
    "sonicmoe": ("sonicmoe.functional", "pip install git+https://github.com/Dao-AILab/sonic-moe"),
}
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def check(
    backend: str,
    activation: Callable[[Tensor], Tensor],
    *,
    gated: bool,
    dropout: float,
    num_experts: int,
    d_model: int,
    d_hidden: int,
) -> None:
    """Check that the backend supports such experts.

    Raises:
        UserError: the backend does not support them, or its package cannot be imported.
    """
    if dropout:
        raise UserError(f"backend={backend!r} has no dropout of hidden units (dropout={dropout})")
    if backend == "sonicmoe":
        if not gated or activation is not F.silu:
            raise UserError("backend='sonicmoe' is for swiglu experts: its other activations are not exactly ours")
        if d_model % 64 or d_model < 512 or d_hidden % 64:
            raise UserError(
                f"backend='sonicmoe' does not support d_model={d_model}, d_hidden={d_hidden}: d_model must be a "
                "multiple of 64 and at least 512, d_hidden a multiple of 64"
            )
        if num_experts % 4:
            raise UserError(f"backend='sonicmoe' needs a multiple of 4 experts per rank, got {num_experts}")
    _module(backend)


def _module(backend: str) -> ModuleType:
    name, command = _NEEDS[backend]
    try:
        return importlib.import_module(name)
    except Exception as error:  # an extension built for another torch or CUDA may raise any error
        package = name.partition(".")[0]
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"backend={backend!r} needs {package} ({reason}): {command}") from error


def ffn(
    backend: str,
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Tensor | Sequence[int],
    activation: Callable[[Tensor], Tensor],
    gated: bool = False,
    *,
    perm_N: Tensor | None = None,
    inverse_TK: Tensor | None = None,
    weight_TK: Tensor | None = None,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Compute `fmoe.kernels.expert_ffn` by the backend. With ``perm_N``, ``inverse_TK`` and ``weight_TK`` the rows are
    tokens, which are gathered, computed and combined, [T, D] to [T, D]. The host waits for the counts.

    Raises:
        UserError: the rows are not in 16 bits on a GPU.
    """
    _check_rows(backend, rows_MD)
    counts = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    stacks = (w_in_LPD, b_in_LP, w_out_LDH, b_out_LD)
    if sum(counts) and backend == "sonicmoe":
        return _by_sonic(rows_MD, stacks, counts, inverse_TK, weight_TK)
    # Without any rows torch computes, so that gradients are zero and not None.
    of_rows = _by_te if sum(counts) else _by_torch
    if perm_N is None or inverse_TK is None or weight_TK is None:
        return of_rows(rows_MD, stacks, counts, activation, gated)
    rows = permute(rows_MD, perm_N, inverse_TK, sum(counts))
    return combine(of_rows(rows, stacks, counts, activation, gated), weight_TK, inverse_TK)


def _check_rows(backend: str, rows: Tensor) -> None:
    if not rows.is_cuda or rows.dtype not in _SIXTEEN_BITS:
        raise UserError(f"backend={backend!r} is for 16 bits on a GPU: rows are {rows.dtype} on {rows.device}")


def _by_torch(
    rows: Tensor, stacks: Stacks, counts: list[int], activation: Callable[[Tensor], Tensor], gated: bool
) -> Tensor:
    return expert_ffn(rows, *stacks, counts, activation, gated)


def _by_te(
    rows: Tensor, stacks: Stacks, counts: list[int], activation: Callable[[Tensor], Tensor], gated: bool
) -> Tensor:
    """Compute by TransformerEngine. Its module takes a parameter per expert, here slices of the stack. Autograd stacks
    their gradients again, an additional pass over the gradients of the weights, which our own operations avoid."""
    w_in, b_in, w_out, b_out = stacks
    hidden = _linear(rows, w_in, b_in, counts)
    return _linear(gate(activation, hidden) if gated else activation(hidden), w_out, b_out, counts)


def _linear(rows: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None, counts: list[int]) -> Tensor:
    module = _grouped_linear(*weight_LOI.shape, bias_LO is not None, weight_LOI.dtype)
    given = {f"weight{i}": w for i, w in enumerate(weight_LOI.unbind(0))}
    if bias_LO is not None:
        given |= {f"bias{i}": b for i, b in enumerate(bias_LO.unbind(0))}
    return torch.func.functional_call(module, given, (rows, counts))


@functools.lru_cache(64)
def _grouped_linear(experts: int, height: int, width: int, has_bias: bool, dtype: torch.dtype) -> nn.Module:
    """Return TransformerEngine's module without weights, on the meta device."""
    options = {"bias": has_bias, "params_dtype": dtype, "device": "meta"}
    return _module("te").GroupedLinear(experts, width, height, **options)


def _by_sonic(
    rows: Tensor, stacks: Stacks, counts: list[int], inverse_TK: Tensor | None, weight_TK: Tensor | None
) -> Tensor:
    """Compute by SonicMoE. It alternates the rows of gate and value, which are two halves in our layout. Conversion
    is an additional pass over the first matrices and over their gradients."""
    package = _module("sonicmoe")
    w_in, b_in, w_out, b_out = stacks
    experts, device = len(counts), rows.device
    if inverse_TK is None or weight_TK is None:
        token = torch.arange(rows.shape[0], dtype=torch.int32, device=device)
        expert = torch.repeat_interleave(
            torch.arange(experts, dtype=torch.int64, device="cpu"),
            torch.tensor(counts, dtype=torch.int64, device="cpu"),
        ).to(device, torch.int32)
        score = torch.ones(rows.shape[0], device=device, dtype=torch.float32)
    else:
        row_N = inverse_TK.reshape(-1)
        kept = (row_N < sum(counts)).nonzero().squeeze(1)  # in the order of tokens, as SonicMoE requires
        end_E = torch.tensor(counts, dtype=torch.int64, device="cpu").cumsum(0).to(device)
        expert = torch.searchsorted(end_E, row_N[kept], right=True).to(torch.int32)
        token = (kept // inverse_TK.shape[1]).to(torch.int32)
        score = weight_TK.float().reshape(-1)[kept]
    out, _frequency = package.moe_general_routing_inputs(
        rows.contiguous(),
        score,
        token,
        expert,
        _interleaved(w_in).permute(1, 2, 0),
        None if b_in is None else _interleaved(b_in),
        w_out.contiguous().permute(1, 2, 0),
        b_out,
        experts,
        torch.cuda.current_stream(device).cuda_stream if rows.is_cuda else 0,
        importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU,
        not torch.is_grad_enabled(),
    )
    return out


def _interleaved(stack: Tensor) -> Tensor:
    """Return a stack [L, 2 H, ...] with the rows of its first and second half in alternation."""
    experts, height, *rest = stack.shape
    return stack.view(experts, 2, height // 2, *rest).transpose(1, 2).reshape(experts, height, *rest)
