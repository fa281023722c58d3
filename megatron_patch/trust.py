"""Trust ratios of the whole model, gathered over all ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from fmoe.optim.trust import TrustOptimizer
from fmoe.parallel.gradients import is_expert
from fmoe.runtime import collectives
from megatron_patch.optimizer import optimizers, parameters_of, sharding_group


def trust_ratios(optimizer: MegatronOptimizer) -> tuple[Tensor, Tensor]:
    """Return the trust ratios of the last step of LAMB or LARS, over all ranks. Collective; waits for the device.

    Returns:
        Two float32 vectors on the device of the parameters: one ratio per dense matrix, and one ratio per expert of
        each stacked weight. Both vectors are the same on every rank. Their order depends on the parallelism, their
        values do not. Both are empty before the first step, and for other optimizers.
    """
    mine: dict[bool, list[Tensor]] = {False: [], True: []}
    for of_experts, ratios in _held(optimizer):
        mine[of_experts].append(ratios)
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    vectors = [torch.cat([torch.empty(0, device=device, dtype=torch.float32), *mine[kind]]) for kind in (False, True)]
    sizes = torch.tensor([len(vector) for vector in vectors], device=device, dtype=torch.int64)
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    found = []
    for vector, size in zip(vectors, sizes.tolist(), strict=True):
        padded = vector.new_full((size,), torch.nan)
        padded[: len(vector)] = vector
        together = torch.cat(collectives.gather(padded))
        found.append(together[~together.isnan()])
    return found[0], found[1]


def _held(optimizer: MegatronOptimizer) -> Iterator[tuple[bool, Tensor]]:
    """Yield (is an expert, trust ratios) for each parameter of which this rank holds the first copy."""
    for part in optimizers(optimizer):
        if not isinstance(part.optimizer, TrustOptimizer):
            continue
        found = part.optimizer.trust_ratios()
        group = sharding_group(part)
        if group is not None:  # only ranks that step a slice of a block know its ratio
            together = torch.cat(found).nan_to_num(nan=-1.0)
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            together[together < 0] = torch.nan
            found = list(together.split([len(ratios) for ratios in found]))
        for parameter, ratios in zip(parameters_of(part), found, strict=True):
            # `shared`: the embedding's copy on the last pipeline stage.
            if _is_first_copy(parameter) and not getattr(parameter, "shared", False):
                yield is_expert(parameter), ratios.float()


def _is_first_copy(parameter: Tensor) -> bool:
    """Return whether no lower rank holds a copy or slice of the same parameter."""
    if is_expert(parameter):
        return (
            parallel_state.get_expert_data_parallel_rank() == 0
            and parallel_state.get_expert_tensor_parallel_rank() == 0
        )
    is_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return is_first and parallel_state.get_tensor_model_parallel_rank() == 0
