"""After a step that is not finite: on which rank, and in what."""

import torch
import torch.distributed as dist

from pretrain.data.samples import GPTSamples

_NAME_BYTES = 400  # of a tensor's name, the same on all ranks


def find_culprit(engine, step: int, samples: GPTSamples) -> str:
    """Names rank and first bad tensor of a step whose loss or gradient is not finite. Collective.

    Reduced gradients are bad on all ranks, so the step is computed once more without reduction: the ranks on which it
    is bad again are named, with the first bad gradient in the order of the backward pass, which begins at the last
    layer. A step that is finite this time had no reason in weights and data.
    """
    found = _gather(engine, None if engine.last_loss.isfinite().item() else "loss")
    if found:
        return found
    reduced = _gather(engine, _first_bad(engine.gpt))
    finalize, engine.config.finalize_model_grads_func = engine.config.finalize_model_grads_func, None
    try:
        loss = engine.backward(step, samples)
    finally:
        engine.config.finalize_model_grads_func = finalize
    found = _gather(engine, _first_bad(engine.gpt) if loss.isfinite().item() else "loss")
    if found:
        return found
    return f"{reduced or 'the norm of the gradient'} (finite when computed again: look at the machine)"


def _first_bad(gpt: torch.nn.Module) -> str | None:
    for name, parameter in reversed(list(gpt.named_parameters())):
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None and not gradient.isfinite().all():
            return f"gradient of {name}"
    return None


def _gather(engine, mine: str | None) -> str:
    """``NAME on rank R, ...`` of all ranks that have a name."""
    text = bytearray((mine or "").encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"))
    own = torch.frombuffer(text, dtype=torch.uint8).to(engine.processes.device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    names = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in everyone]
    bad = [f"{name} on rank {rank}" for rank, name in enumerate(names) if name]
    return ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
