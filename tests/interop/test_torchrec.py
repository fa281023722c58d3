"""A table against torchrec's row-wise sharded EmbeddingBagCollection with its fused row-wise Adagrad, if it is here."""

import pytest
import torch
import torch.distributed as dist
from forks import values

from fmoe import parallel
from fmoe.optim import RowAdagrad

ROWS, DIM, BAG = 1000, 16, 5


def train():
    """Largest relative differences of pooled rows in each step, and of the table afterwards."""
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    group = dist.group.WORLD
    cpu = torch.device("cpu")
    config = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"], pooling=torchrec.PoolingType.SUM
    )
    bags = torchrec.EmbeddingBagCollection(device=cpu, tables=[config])
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1, "eps": 1e-8})
    by_row = {"t": row_wise(compute_kernel="fused")}
    plan = construct_module_sharding_plan(bags, by_row, world_size=2, local_size=2, device_type="cpu")
    theirs = DistributedModelParallel(
        bags,
        env=ShardingEnv.from_process_group(group),
        plan=ShardingPlan({"": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
        device=cpu,
        init_data_parallel=False,
    )
    ours = parallel.ShardedEmbedding(ROWS, DIM, group, std=0.1, seed=1)
    optimizer = RowAdagrad([ours.weight], lr=0.1)
    (shard,) = next(iter(theirs.state_dict().values())).local_shards()
    begin = shard.metadata.shard_offsets[0]
    ids = torch.arange(begin, begin + len(shard.tensor))
    with torch.no_grad():
        first = ours(ids)
    shard.tensor.copy_(first)
    gaps = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + group.rank())
        batch = torch.randint(ROWS, (32, BAG), generator=generator).square() % ROWS
        target = torch.randn(32, DIM, generator=generator)
        offsets = torch.arange(0, batch.numel() + 1, BAG)
        pooled = theirs(torchrec.KeyedJaggedTensor.from_offsets_sync(["f"], batch.flatten(), offsets)).wait()["f"]
        rows = ours(batch).sum(1)
        gaps.append(float((pooled - rows).abs().max() / rows.abs().max()))
        (pooled - target).square().mean().backward()
        optimizer.zero_grad()
        (rows - target).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        last = ours(ids)
    gaps.append(float((shard.tensor - last).abs().max() / last.abs().max()))
    return gaps, float((last - first).abs().max())


@pytest.mark.slow
def test_rows_and_updates_are_those_of_torchrec(forks):
    # Its kernels, fbgemm-gpu, raise an OSError for a torch that they were not built for.
    pytest.importorskip("torchrec", reason="torchrec is not installed", exc_type=(ImportError, OSError))
    for gaps, moved in values(forks.run(2, train)):
        assert max(gaps) < 1e-6 and moved > 0.1
