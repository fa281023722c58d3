"""Feed-forward experts computed by other packages, if they are installed: ``backend="te"`` and ``"sonicmoe"``.

These adapters call TransformerEngine's ``GroupedLinear`` (2.x) and SonicMoE's ``moe_general_routing_inputs`` (0.1.2).
Parameters stay in fmoe's own layout, so that checkpoints and optimizers do not depend on the package. With
``backend="auto"``, `fastest_ffn` measures the packages against fmoe's cuda backend.

Shape letters: T tokens, K choices, N = T * K assignments, M rows, L experts, D width, H hidden width, P height of the
first map (2 H if gated, else H).
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence, Set
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from fmoe.errors import UserError, one_line
from fmoe.kernels.cuda import tuning
from fmoe.kernels.ffn import expert_ffn
from fmoe.kernels.glu import Activation, gate
from fmoe.kernels.rows import combine, permute, weigh_gradient

logger = logging.getLogger("fmoe")

Stacks = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # weight_in, bias_in, weight_out, bias_out

BACKENDS = ("te", "sonicmoe")
_NEEDS = {
    "te": ("transformer_engine.pytorch", "pip install --no-build-isolation 'transformer_engine[pytorch]'"),
    "sonicmoe": (
        "sonicmoe.functional",
        "pip install --no-deps sonic-moe && pip install quack-kernels nvidia-cutlass-dsl",
    ),
}
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_tuned = tuning.TuningCache("backends.json", lambda name: name in ("cuda", *BACKENDS))


def check(
    backend: str,
    activation: Activation,
    *,
    gated: bool,
    dropout: float,
    num_experts: int,
    d_model: int,
    d_hidden: int,
) -> None:
    """Check that the backend supports experts with these settings.

    Raises:
        UserError: the backend does not support them, or its package is too old or cannot be imported.
    """
    if dropout:
        raise UserError(f"dropout={dropout} needs backend='torch' or 'auto', not {backend!r}")
    if backend == "sonicmoe":
        if not gated or activation is not F.silu:
            raise UserError("backend='sonicmoe' supports only swiglu experts: use expert='swiglu' or another backend")
        if not _fits_sonic(4, d_model, d_hidden):
            raise UserError(
                f"backend='sonicmoe' does not support d_model={d_model}, d_hidden={d_hidden}: d_model must be a "
                "multiple of 64 and at least 512, d_hidden a multiple of 64"
            )
        if num_experts % 4:
            raise UserError(f"backend='sonicmoe' needs a multiple of 4 experts per rank, got {num_experts}")
    package = _module(backend)
    if backend == "sonicmoe":
        # Gated weights are two halves: gate, then value.
        parameters = inspect.signature(package.moe_general_routing_inputs).parameters
        if "concat_layout" not in parameters:
            raise UserError("backend='sonicmoe' needs sonic-moe 0.1.2 or later: the installed one lacks concat_layout")


def _fits_sonic(num_experts: int, d_model: int, d_hidden: int) -> bool:
    return num_experts % 4 == 0 and d_model % 64 == 0 and d_model >= 512 and d_hidden % 64 == 0


def _module(backend: str) -> ModuleType:
    name, command = _NEEDS[backend]
    try:
        return importlib.import_module(name)
    except Exception as error:  # an extension built for another torch or CUDA may raise any error
        package = name.partition(".")[0]
        raise UserError(f"backend={backend!r} needs {package} ({one_line(error, 120)}): {command}") from error


def ffn(
    backend: str,
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Tensor | Sequence[int],
    activation: Activation,
    gated: bool = False,
    *,
    perm_N: Tensor | None = None,
    inverse_TK: Tensor | None = None,
    weight_TK: Tensor | None = None,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Run feed-forward experts by ``backend``, on rows that are sorted by expert, as `fmoe.kernels.expert_ffn` does.

    With all of ``perm_N``, ``inverse_TK`` and ``weight_TK``, ``rows_MD`` holds tokens [T, D] instead. The function then
    gathers them, runs the experts, and returns the combined outputs [T, D].

    With only ``weight_TK``, it holds one weight per row, [M]. The output is not weighted, but the backward pass
    multiplies the gradient of each output row by the row's weight.

    The host waits for counts that are on the device. The exception is "sonicmoe" if all of these hold:

    * ``rows_MD`` holds tokens;
    * ``perm_N`` has all T * K assignments;
    * K < L.

    Raises:
        UserError: the rows are not 16-bit or not on a GPU; or, in the backward pass, second derivatives are requested.
    """
    _check_rows(backend, rows_MD)
    stacks = (w_in_LPD, b_in_LP, w_out_LDH, b_out_LD)
    with torch.cuda.device_of(rows_MD):  # packages may launch on the current device
        if perm_N is None or inverse_TK is None or weight_TK is None:
            out = _of_rows(backend, rows_MD, stacks, _on_host(counts), activation, gated)
            out = out if weight_TK is None else weigh_gradient(out, weight_TK)
        elif backend == "sonicmoe" and 0 < inverse_TK.numel() == perm_N.numel():  # SonicMoE also computes dropped rows
            counts = torch.as_tensor(counts, dtype=torch.int64, device=rows_MD.device)
            end_L = counts.cumsum(0) if offsets[0] is None else offsets[0]
            out = _by_sonic(rows_MD, stacks, *_routing_of(inverse_TK, weight_TK, end_L))
        else:
            on_host = _on_host(counts)
            rows = permute(rows_MD, perm_N, inverse_TK, sum(on_host))
            out = combine(_of_rows(backend, rows, stacks, on_host, activation, gated), weight_TK, inverse_TK)
    if out.requires_grad:
        out.register_hook(functools.partial(_refuse_second_derivatives, backend))
    return out


def _on_host(counts: Tensor | Sequence[int]) -> list[int]:
    return counts.tolist() if isinstance(counts, Tensor) else list(counts)


def _refuse_second_derivatives(backend: str, _grad: Tensor) -> None:
    if torch.is_grad_enabled():  # the package's gradients have no graph: second derivatives would be silently wrong
        raise UserError(f"backend={backend!r} has no second derivatives (create_graph=True): use backend='cuda'")


def _of_rows(
    backend: str,
    rows_MD: Tensor,
    stacks: Stacks,
    counts: list[int],
    activation: Activation,
    gated: bool,
) -> Tensor:
    """Return the outputs of the experts for rows that are sorted by expert."""
    if not sum(counts):  # PyTorch computes an empty batch, so that gradients are not None
        return expert_ffn(rows_MD, *stacks, counts, activation, gated)
    if backend == "te":
        return _by_te(rows_MD, stacks, counts, activation, gated)
    end_L = torch.tensor(counts, dtype=torch.int64, device="cpu").cumsum(0)
    if rows_MD.is_cuda:  # a copy from pinned memory is asynchronous
        end_L = end_L.pin_memory().to(rows_MD.device, non_blocking=True)
    row_M = torch.arange(rows_MD.shape[0], device=rows_MD.device, dtype=torch.int64)
    score_M = torch.ones(rows_MD.shape[0], device=rows_MD.device, dtype=torch.float32)
    return _by_sonic(rows_MD, stacks, score_M, row_M.int(), torch.searchsorted(end_L, row_M, right=True).int())


def _check_rows(backend: str, rows: Tensor) -> None:
    if not rows.is_cuda or rows.dtype not in _SIXTEEN_BITS:
        raise UserError(f"backend={backend!r} needs 16-bit rows on a GPU: rows are {rows.dtype} on {rows.device}")


def _by_te(rows: Tensor, stacks: Stacks, counts: list[int], activation: Activation, gated: bool) -> Tensor:
    """Return the outputs of the experts, computed by TransformerEngine."""
    w_in, b_in, w_out, b_out = stacks
    hidden = _linear(rows, w_in, b_in, counts)
    return _linear(gate(activation, hidden) if gated else activation(hidden), w_out, b_out, counts)


def _linear(rows: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None, counts: list[int]) -> Tensor:
    module = _grouped_linear(*weight_LOI.shape, bias_LO is not None, weight_LOI.dtype)
    # The module takes a parameter per expert. Autograd stacks their gradients in a further pass.
    parameters = {f"weight{i}": w for i, w in enumerate(weight_LOI.unbind(0))}
    if bias_LO is not None:
        parameters |= {f"bias{i}": b for i, b in enumerate(bias_LO.unbind(0))}
    return torch.func.functional_call(module, parameters, (rows, counts))


@functools.lru_cache(64)
def _grouped_linear(experts: int, height: int, width: int, has_bias: bool, dtype: torch.dtype) -> nn.Module:
    """Return TransformerEngine's ``GroupedLinear`` on the meta device, where its weights take no memory."""
    options = {"bias": has_bias, "params_dtype": dtype, "device": "meta"}
    return _module("te").GroupedLinear(experts, width, height, **options)


def _routing_of(inverse_TK: Tensor, weight_TK: Tensor, end_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the score, token and expert of each assignment. SonicMoE requires them in the order of tokens."""
    # The host must know the number of assignments, so dropped ones stay, as rows of an arbitrary expert with a score of
    # 0. If K >= L, they are removed instead, and the host waits for the number of the rest: gates with so many choices
    # drop most of them.
    num_tokens, top_k = inverse_TK.shape
    num_experts = len(end_L)
    device = inverse_TK.device
    row_N = inverse_TK.reshape(-1)
    index_N = torch.arange(num_tokens * top_k, device=device, dtype=torch.int64)
    expert_N = torch.searchsorted(end_L, row_N, right=True)  # L if dropped
    is_kept_N = expert_N < num_experts
    score_N = torch.where(is_kept_N, weight_TK.float().reshape(-1), 0)
    expert_N = torch.where(is_kept_N, expert_N, index_N % num_experts)
    if top_k >= num_experts:
        index_N = is_kept_N.nonzero().squeeze(1)
        score_N = score_N[index_N]
        expert_N = expert_N[index_N]
    return score_N, (index_N // top_k).int(), expert_N.int()


def _by_sonic(x: Tensor, stacks: Stacks, score_N: Tensor, token_N: Tensor, expert_N: Tensor) -> Tensor:
    """Return the combined outputs of the experts for tokens ``x``, computed by SonicMoE."""
    w_in, b_in, w_out, b_out = stacks
    out, _frequency = _module("sonicmoe").moe_general_routing_inputs(
        x.contiguous(),
        score_N,
        token_N,
        expert_N,
        w_in.contiguous().permute(1, 2, 0),
        b_in,
        w_out.contiguous().permute(1, 2, 0),
        b_out,
        len(w_out),
        torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0,
        importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU,
        not torch.is_grad_enabled(),
        concat_layout=True,
    )
    return out


def candidates(
    device: torch.device,
    dtypes: Set[torch.dtype],
    sizes: Sequence[int],
    activation: Activation,
    gated: bool,
) -> list[str]:
    """Return the installed backends that ``backend="auto"`` measures for these experts.

    These are "te" on GPUs, and "sonicmoe" for swiglu of supported sizes on sm_90. There are none for rows that are
    not 16-bit, and none under torch.compile, which cannot trace these backends.

    Args:
        dtypes: dtypes of rows and parameters.
        sizes: number of experts, d_model and d_hidden.
    """
    if torch.compiler.is_compiling() or not dtypes <= set(_SIXTEEN_BITS) or not _architecture(device):
        return []
    fits_sonic = _architecture(device) == 9 and _fits_sonic(*sizes) and gated and activation is F.silu
    names = ["sonicmoe", "te"] if fits_sonic else ["te"]
    return [name for name in names if _is_installed(name)]


def _architecture(device: torch.device) -> int:
    """Return the major compute capability of a GPU; 0 for other devices."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@functools.cache
def _is_installed(backend: str) -> bool:
    return importlib.util.find_spec(_NEEDS[backend][0].partition(".")[0]) is not None


def fastest_ffn(
    ours: Callable[..., Tensor], others: Sequence[str], is_training: bool, *arguments: Any, **plan: Any
) -> Tensor:
    """Run feed-forward experts by the fastest of ``ours``, fmoe's CUDA operation, and the backends ``others``.

    The candidates are timed at the first use of each input size. ``arguments`` and ``plan`` are those of `ffn` after
    ``backend``.

    * With ``is_training``, the timing includes the backward pass, even where gradients are disabled. Otherwise
      activation checkpointing could recompute the experts by another operation than in the forward pass.
    * A backend whose results are wrong on this device is left out, with a warning.
    * "te" is left out if the counts are on the device, because the host would wait for them in each step.
    * During CUDA graph capture nothing is timed. ``ours`` is then used for input sizes that were not timed before.
    """
    rows_MD, w_in_LPD, _, w_out_LDH, _, counts, *_ = arguments
    if isinstance(counts, Tensor) and counts.device.type != "cpu":
        others = [name for name in others if name != "te"]
    names = [name for name in others if _wrong(name, rows_MD.device) is None]
    if not names:
        return ours(*arguments, **plan)
    operations: dict[str, Callable[..., Tensor]] = {name: functools.partial(ffn, name) for name in names}
    operations["cuda"] = ours
    perm_N = plan.get("perm_N")
    num_rows = rows_MD.shape[0] if perm_N is None else perm_N.numel()
    versions = [f"{name} {_version(name)}" for name in names]
    step = "forward and backward" if is_training else "forward"
    key = f"{tuning.cache_key(rows_MD, num_rows, w_in_LPD, w_out_LDH, *versions)}, {step}"
    fastest = _tuned.get(key)
    if fastest not in operations:
        fastest = "cuda"
        with torch.cuda.device_of(rows_MD):  # the device whose stream is timed
            if num_rows and not torch.cuda.is_current_stream_capturing():

                def run(name: str) -> None:
                    _with_gradients(operations[name], is_training, arguments, plan)

                fastest, lasts = tuning.fastest([*names, "cuda"], run, key)
                _tuned.put(key, fastest, lasts)
    return operations[fastest](*arguments, **plan)


def _with_gradients(
    operation: Callable[..., Tensor], is_training: bool, arguments: Sequence[Any], plan: dict[str, Any]
) -> list[Tensor]:
    """Return the output of ``operation`` and, if ``is_training``, the gradients, outside the caller's graph."""
    # A checkpoint around the caller must not see the tensors saved here, and a selective checkpoint must not see the
    # operations: a recomputation does not repeat them.
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(is_training),
        torch.autocast(arguments[0].device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved),
        _disable_current_modes(),
    ):
        inputs = [_apart(value) for value in arguments]
        plan = {name: _apart(value) for name, value in plan.items()}
        trained = [t.requires_grad_(is_training) for t in inputs[:5] if t is not None]
        out = operation(*inputs, **plan)
        return [out, *(torch.autograd.grad(out, trained, torch.ones_like(out)) if is_training else [])]


def _apart(value: Any) -> Any:
    """Detach a tensor, or each tensor of a tuple; copy those made in inference mode, which autograd rejects."""
    if isinstance(value, tuple):
        return tuple(_apart(part) for part in value)
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.is_inference() else value.detach()


@functools.cache
def _version(backend: str) -> str:
    package = {"te": "transformer_engine", "sonicmoe": "sonic-moe"}[backend]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


_checked: dict[tuple[str, torch.device], str | None] = {}


def _wrong(backend: str, device: torch.device) -> str | None:
    """Return the reason why ``backend`` must not be used on ``device``; None if its results are right."""
    if (backend, device) not in _checked:
        if torch.cuda.is_current_stream_capturing():
            return "it has not been checked yet"
        try:
            wrong = _self_check(backend, device)
        except Exception as error:  # a package built for another torch or CUDA may raise any error
            wrong = one_line(error, 200, with_type=True)
        if wrong is not None:
            logger.warning("backend='auto' leaves out %s on %s: %s", backend, device, wrong)
        _checked[backend, device] = wrong
    return _checked[backend, device]


def _self_check(backend: str, device: torch.device) -> str | None:
    """Compare small experts in bfloat16 with float64; return a message about the first wrong result, or None."""
    experts = 4
    width = 512
    hidden = 64
    counts = [5, 0, 17, 10]
    sizes = {"num_experts": experts, "d_model": width, "d_hidden": hidden}
    check(backend, F.silu, gated=True, dropout=0.0, **sizes)
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(counts), width), (experts, 2 * hidden, width), (experts, width, hidden))
    scales = (1.0, width**-0.5, hidden**-0.5)
    values = [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul(scale).bfloat16()
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    results = []
    operations = ((functools.partial(ffn, backend), device, None), (expert_ffn, "cpu", torch.float64))
    for operation, where, dtype in operations:
        x, w_in, w_out = (t.to(where, dtype) for t in values)
        results.append(_with_gradients(operation, True, (x, w_in, None, w_out, None, counts, F.silu, True), {}))
    names = ("output", "gradient of rows", "gradient of first matrices", "gradient of second matrices")
    for name, computed, expected in zip(names, *results, strict=True):
        error = float((computed.detach().cpu().double() - expected.detach()).norm() / expected.detach().norm())
        if not error <= 5e-2:
            return f"the {name} has a relative error of {error:.1e}"
    return None
