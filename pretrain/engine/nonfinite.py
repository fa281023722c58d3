"""Report of a step whose loss or gradient is not finite: the ranks, and the first non-finite tensor on each."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fmoe.runtime import collectives
from megatron_patch.fsdp import gathered_in_turn
from pretrain.checkpoint.ranks import Ranks
from pretrain.data.samples import Samples
from pretrain.engine.engine import Engine

_NAME_BYTES = 256


def nonfinite_report(engine: Engine, step: int, samples: Samples) -> str:
    """Name the ranks with a non-finite loss or gradient in a step, and the first non-finite tensor of each. Collective.

    If the loss of any rank is not finite, the report names these ranks. Otherwise, the step is computed again, and each
    rank observes its gradients before they are reduced, because a reduced gradient does not show which ranks made it
    non-finite. The report then names the ranks on which the step is non-finite again. Each rank searches its gradients
    from the last layer to the first. If the step is finite this time, the report suspects the machine.
    """
    is_finite = engine.last_loss is None or engine.last_loss.isfinite().item()
    report = _gather(None if is_finite else "loss")
    if report:
        return report
    names = [name for name, _ in reversed(list(engine.gpt.named_parameters()))]
    gradients = {name: getattr(parameter, "main_grad", None) for name, parameter in engine.gpt.named_parameters()}
    reduced = _gather(
        _first(names, {name for name, grad in gradients.items() if grad is not None and not grad.isfinite().all()})
    )
    for compressor in engine.compressors:
        compressor.undo()  # what the first pass has sent and remembered
    with _observed(engine.gpt) as nonfinite:
        loss = engine.backward(step, samples)
    report = _gather(_first(names, nonfinite) if loss.isfinite().item() else "loss")
    return report or f"{reduced or 'the norm of the gradient'} (finite when computed again: suspect the machine)"


def _first(names: list[str], nonfinite: set[str]) -> str | None:
    return next((f"gradient of {name}" for name in names if name in nonfinite), None)


@contextlib.contextmanager
def _observed(gpt: nn.Module) -> Iterator[set[str]]:
    """Yield a set to which backward passes in the ``with`` block add the names of parameters with non-finite gradients.

    These are gradients of one micro batch on this rank.
    """
    nonfinite: set[str] = set()
    handles = {}

    def observe(name: str, gradient: Tensor) -> None:
        if not gradient.isfinite().all():
            nonfinite.add(name)

    for _ in gathered_in_turn(gpt):  # a sharded parameter has no gradient of this rank alone
        for name, parameter in gpt.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                handles[name] = parameter.register_hook(partial(observe, name))
    try:
        yield nonfinite
    finally:
        for handle in handles.values():
            handle.remove()


def _gather(name: str | None) -> str:
    """Return ``"NAME on rank R, ..."`` for the ranks whose ``name`` is not None; empty without such ranks."""
    letters = (name or "").encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    row = torch.tensor(list(letters), dtype=torch.uint8, device=Ranks().device())
    names = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in collectives.gather(row)]
    bad = [f"{name} on rank {rank}" for rank, name in enumerate(names) if name]
    remainder = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return ", ".join(bad[:8]) + remainder
