"""Recomputation changes no bit of loss, gradients and routing statistics, counts nothing twice, and saves memory."""

import pytest
import torch
from forks import values
from tiny_gpt import LAYERS, batch, start, tiny_config

from bench.studies.recompute import Kept

MODES = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "full, every second": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "feed-forward blocks": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "norms and attention": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "core_attn"]},
}


def gpt(size, options):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_patch import fmoe_layer_spec
    from megatron_patch.attention import SDPAttention

    config = tiny_config(
        tensor_model_parallel_size=size if options.get("tensor") else 1,
        sequence_parallel=size > 1 and bool(options.get("tensor")),
        **MODES.get(options["mode"], {}),
    )
    base = get_gpt_layer_local_spec()
    if options.get("tensor"):
        base.submodules.self_attention.submodules.core_attention = SDPAttention
    spec = fmoe_layer_spec(
        base,
        num_experts=4,
        d_hidden=96,
        top_k=2,
        gate="switch",
        gate_options={"jitter": 0.3, "capacity_factor": 1.0},
        expert_options={"dropout": 0.2},
        seed=5,
    )
    torch.manual_seed(0)
    return GPTModel(config, spec, vocab_size=96, max_sequence_length=16, position_embedding_type="rope")


def train(options):
    import torch.distributed as dist
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

    import fmoe

    random.load_inline = None  # from megatron-core 0.17 on, it would need ninja and a compiler
    size = dist.get_world_size()
    start(**{("tensor" if options.get("tensor") else "expert_parallel"): size})
    seen = {}
    for mode in (None, options["mode"]):
        clear_aux_losses_tracker()
        model = gpt(size, {**options, "mode": mode}).train()
        first = 0 if options.get("tensor") else 4 * dist.get_rank()
        for micro in range(2):  # both forward before any backward, as in a pipeline
            fmoe.random.set_position(1, 3, (first + 8 * micro) * 16)
            tokens, positions, labels = batch(first + 8 * micro)
            kept = Kept(model)
            with kept:
                loss = model(tokens, positions, None, labels=labels).mean()
            seen.setdefault(mode, []).append(loss)
        for loss in seen[mode]:
            loss.backward()
        layers = [layer.mlp for layer in model.decoder.layers]
        seen[mode] = (
            {
                "loss": torch.stack([loss.detach() for loss in seen[mode]]),
                **{f"statistics {n}": layer.metrics.sums() for n, layer in enumerate(layers)},
                **{name: of["values"].clone() for name, of in get_moe_layer_wise_logging_tracker().items()},
                **{name: p.grad for name, p in model.named_parameters()},
            },
            kept.bytes,
        )
    (plain, plain_bytes) = seen[None]
    (again, again_bytes) = seen[options["mode"]]
    reports = fmoe.metrics(model).values()
    for name, loss in (("load_balancing_loss", "balance"), ("z_loss", "z")):
        # Megatron's tracker adds up micro batches, ours is their mean; both are without the loss's weight.
        means = [2 * report.losses[loss] for report in reports]
        assert size > 1 or again[name].tolist() == pytest.approx(means, rel=1e-5)
    return [name for name in plain if not torch.equal(plain[name], again[name])], plain_bytes, again_bytes


@pytest.mark.cover(1)
@pytest.mark.parametrize("split", ["one", "expert", "tensor"])
@pytest.mark.parametrize("mode", MODES)
def test_no_bit_changes(forks, mode, split):
    options = {"mode": mode, "tensor": split == "tensor"}
    assert LAYERS == 2
    for different, plain, again in values(forks.run(1 if split == "one" else 2, train, options)):
        assert not different
        if mode not in ("norms and attention",):
            assert again < {"full": 0.2, "full, every second": 0.6}.get(mode, 0.75) * plain, (again, plain)
