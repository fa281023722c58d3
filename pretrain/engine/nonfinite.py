"""Report of a step whose loss or gradient is not finite: the ranks, and the first non-finite tensor on each."""

import torch
import torch.distributed as dist

from pretrain.checkpoint.ranks import Ranks
from pretrain.data.samples import Samples
from pretrain.engine.engine import Engine

_NAME_BYTES = 256


def nonfinite_report(engine: Engine, step: int, samples: Samples) -> str:
    """Name the ranks with a non-finite loss or gradient in a step, and the first non-finite tensor of each. Collective.

    If the loss of any rank is not finite, the report names these ranks. Otherwise, the step is computed again without
    reduction, because a reduced gradient does not show which ranks made it non-finite. The report then names the ranks
    on which the step is non-finite again. Each rank searches its gradients from the last layer to the first. If the
    step is finite this time, the report suspects the machine.
    """
    is_finite = engine.last_loss is None or engine.last_loss.isfinite().item()
    report = _gather(None if is_finite else "loss")
    if report:
        return report
    reduced = _gather(_first_bad(engine.gpt))
    loss = engine.backward(step, samples, reduce=False)
    report = _gather(_first_bad(engine.gpt) if loss.isfinite().item() else "loss")
    return report or f"{reduced or 'the norm of the gradient'} (finite when computed again: suspect the machine)"


def _first_bad(gpt: torch.nn.Module) -> str | None:
    for name, parameter in reversed(list(gpt.named_parameters())):
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None and not gradient.isfinite().all():
            return f"gradient of {name}"
    return None


def _gather(name: str | None) -> str:
    """Return ``"NAME on rank R, ..."`` for the ranks whose ``name`` is not None; empty without such ranks."""
    letters = (name or "").encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    row = torch.tensor(list(letters), dtype=torch.uint8, device=Ranks().device())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    names = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
    bad = [f"{name} on rank {rank}" for rank, name in enumerate(names) if name]
    remainder = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return ", ".join(bad[:8]) + remainder
