"""Training through the engine at any split of Megatron, and what of it is to be the same at all of them. Not a test."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import model_kinds
import numpy as np
import torch
from engines import engine_of

from pretrain.config import (
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)

STEPS = 20
LENGTH = 16
VOCAB = 64
GPT = Recipe(
    model=ModelConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=24,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        init_std=0.2,
        attention=AttentionConfig(num_heads=4),
        moe=MoEConfig(
            num_experts=4, layers=(1, 2, 4), top_k=2, gate="switch", capacity_factor=1.0, jitter=0.3, balance_loss=0.1
        ),
    ),
    optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=2, clip_grad=0.5, eps=1e-3),
    train=TrainConfig(steps=STEPS, global_batch=8, micro_batch=2),
)


class Tokens:
    """Sample n: tokens that count up by 1, 2 or 3."""

    def __getitem__(self, n):
        return (np.arange(LENGTH + 1) * (1 + n % 3) + 5 * n) % VOCAB


@dataclass(frozen=True)
class Builder:
    """A model to train: its recipe, and what makes its samples of that."""

    recipe: Recipe
    samples: Callable = lambda recipe: Tokens()


def kind(name: str, noise: float = 0.15, **model) -> Builder:
    """T5 or BERT: the GPT's sizes, and what is predicted made up of its own."""
    model = {"kind": name, "moe.layers": (1, 2, 4), **model}
    data = replace(GPT.data, noise_density=noise)
    return Builder(replace(GPT, model=GPT.model.with_values(model), data=data), model_kinds.samples_of)


BUILDERS = {
    "gpt": Builder(GPT),
    "gpt, gated and untied": Builder(
        replace(
            GPT,
            model=GPT.model.with_values(
                {
                    "gated": True,
                    "activation": "silu",
                    "tie_embeddings": False,
                    "moe.group_size": 8,
                    "moe.gate": "naive",
                    "moe.jitter": 0.0,
                }
            ),
        )
    ),
    "gpt, modern": Builder(
        replace(
            GPT,
            model=GPT.model.with_values(
                {
                    "norm": "rms",
                    "norm_eps": 1e-6,
                    "attention.num_query_groups": 2,
                    "attention.head_dim": 6,
                    "attention.qk_norm": True,
                    "position.rope_theta": 1e6,
                    "moe.layers": (2, 3, 4),
                    "dense_ffn_hidden_size": 40,
                    "moe.num_shared_experts": 2,
                    "moe.gate": "sigmoid",
                    "moe.bias_step": 0.02,
                    "moe.normalize": False,
                    "moe.routed_scale": 2.5,
                    "gated": True,
                    "activation": "silu",
                    "tie_embeddings": False,
                }
            ),
        )
    ),
    "gpt, latent attention": Builder(
        replace(
            GPT,
            model=GPT.model.with_values(
                {
                    "norm": "rms",
                    "attention.kv_lora_rank": 14,
                    "attention.q_lora_rank": 12,
                    "attention.qk_head_dim": 7,
                    "attention.qk_rope_head_dim": 4,
                    "attention.v_head_dim": 6,
                    "position.rope_theta": 1e3,
                    "moe.layers": (2, 3, 4),
                    "dense_ffn_hidden_size": 40,
                    "moe.num_shared_experts": 2,
                    "moe.gate": "naive",
                    "moe.jitter": 0.0,
                    "moe.normalize": False,
                    "gated": True,
                    "activation": "silu",
                    "tie_embeddings": False,
                }
            ),
        )
    ),
    "gpt, mtp": Builder(replace(GPT, model=replace(GPT.model, mtp_layers=2, mtp_loss=0.5))),
    "gpt, mtp, dense and untied": Builder(
        replace(
            GPT,
            model=GPT.model.with_values(
                {"moe.layers": (1, 3), "mtp_layers": 1, "tie_embeddings": False, "norm": "rms"}
            ),
        )
    ),
    "t5, modern": kind(
        "t5",
        0.35,
        **{
            "num_layers": 2,
            "num_decoder_layers": 2,
            "norm": "rms",
            "attention.head_dim": 10,
            "attention.qk_norm": True,
            "position.rope_theta": 1e5,
            "dense_ffn_hidden_size": 40,
            "moe.num_shared_experts": 1,
        },
    ),
    "t5": kind("t5", 0.35, num_layers=2, num_decoder_layers=2),
    "bert": kind("bert"),
}


def recipe_of(builder: str, *, precision: str = "fp32", optimizer: str = "adamw", **parallel) -> Recipe:
    recipe = BUILDERS[builder].recipe
    return replace(
        recipe,
        parallel=ParallelConfig(**parallel),
        optimizer=replace(recipe.optimizer, name=optimizer),
        train=replace(recipe.train, precision=precision),
    )


@dataclass(frozen=True)
class Seen:
    """Result of one rank: figures, equal on all ranks; and its parts of tensors, (name, offset, block) -> values."""

    figures: dict
    held: dict


def train(recipe: Recipe, builder: str, steps: int = STEPS) -> Seen:
    from pretrain.engine import locations, state

    engine = engine_of(recipe)
    samples = BUILDERS[builder].samples(recipe)
    held = {}
    places = locations.ShardLocations(engine.chunks)

    def hold(prefix, pick):
        for _, tensor in locations.named_tensors(engine.chunks):
            for place in places.of(tensor):
                value = pick(tensor).detach().reshape(-1)[place.begin : place.end].view(place.block)
                held[f"{prefix} {place.name}", place.shape, place.offset] = value.clone()

    figures = {"validation before": engine.evaluate(samples, 16)}
    if recipe.parallel.shard == "none":  # there a rank has its shard of the sum alone
        engine.backward(0, samples)
        hold("gradient of", lambda p: p.main_grad if hasattr(p, "main_grad") else torch.zeros_like(p))
        engine.routing()
    for step in range(steps):
        result = engine.train_step(step, samples)
        figures |= {f"loss {step}": result.loss, f"gradient norm {step}": result.grad_norm}
        figures |= {f"mtp loss {step} {depth}": loss for depth, loss in enumerate(result.mtp_losses)}
        for number, report in engine.routing().items():
            figures |= {
                f"load {step} {number}": torch.tensor(report.load),
                f"drop rate {step} {number}": report.drop_rate,
                f"entropy {step} {number}": report.entropy,
                f"tokens {step} {number}": report.tokens,
            }
            figures |= {f"{name} loss {step} {number}": value for name, value in report.losses.items()}
    figures["validation"] = engine.evaluate(samples, 16)
    hold("final", lambda p: p)
    for piece in state.pieces(engine):
        if piece.name.startswith("optimizer/"):
            data = piece.data.detach().reshape(-1).clone()
            held[piece.name, piece.shape, piece.offset, piece.block, piece.start] = data
    return Seen(figures, held)


def whole(seen: Seen) -> dict[str, torch.Tensor]:
    """All tensors of one process, by name."""
    tensors = {}
    for key, value in seen.held.items():
        name, shape, offset = key[:3]
        target = tensors.setdefault(name, torch.full(shape, float("nan")))
        block = value.view(key[3]) if len(key) > 3 else value
        target[tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))] = block
    return tensors


def errors(alone: Seen, ranks: list[Seen]) -> dict[str, float]:
    """Relative errors of every figure and tensor, the worst of all ranks: norm-wise, of the whole tensor."""
    expected = whole(alone)
    found = {}

    def note(name, error):
        found[name] = max(found.get(name, 0.0), error)

    if not any(key[0].startswith("gradient of") for key in ranks[0].held):
        expected = {name: value for name, value in expected.items() if not name.startswith("gradient of")}
    covered = dict.fromkeys(expected, 0)
    square = {}
    for seen in ranks:
        assert seen.figures.keys() == alone.figures.keys()
        for name, value in alone.figures.items():
            actual = torch.as_tensor(seen.figures[name]).double()
            value = torch.as_tensor(value).double()
            note(name, ((actual - value).norm() / value.norm().clamp(min=1e-12)).item())
        own = {}
        for key, value in seen.held.items():
            name, _, offset = key[:3]
            block = key[3] if len(key) > 3 else value.shape
            region = expected[name][tuple(slice(o, o + n) for o, n in zip(offset, block, strict=True))].reshape(-1)
            region = region[key[4] : key[4] + value.numel()] if len(key) > 3 else region
            own[name] = own.get(name, 0.0) + (value.reshape(-1).double() - region.double()).square().sum().item()
            covered[name] += value.numel()
        for name, difference in own.items():
            square[name] = max(square.get(name, 0.0), difference)
    for name, tensor in expected.items():
        assert covered[name] >= tensor.numel(), f"{name}: {covered[name]} of {tensor.numel()} elements are held"
        note(name, square[name] ** 0.5 / max(tensor.double().norm().item(), 1e-12))
    return found
