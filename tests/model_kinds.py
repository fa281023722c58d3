"""T5, BERT and GPT, also with a document mask, on made-up tokens. Not a test."""

from dataclasses import replace

import numpy as np
from engines import LENGTH, VOCAB, Samples, engine_of

from pretrain.config import (
    AttentionConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from pretrain.data.masking import Masking
from pretrain.data.packing import DocumentMask
from pretrain.data.spans import SpanCorruption

STEPS = 4
END = 3
DROPOUT_STEPS = 3
SENTINELS = tuple(range(7, 12))
TEXT = np.arange(12, VOCAB)
RECIPE = Recipe(
    model=ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=24,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        init_std=0.2,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(
            num_experts=4,
            top_k=2,
            gate="switch",
            capacity_factor=1.0,
            eval_capacity_factor=None,
            jitter=0.3,
            balance_loss=0.1,
        ),
    ),
    # A large eps: where a gradient is rounding alone, the size of the step is not.
    optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2, clip_grad=0.5, eps=1e-3),
    train=TrainConfig(steps=STEPS, global_batch=8, micro_batch=2),
)
KINDS = {  # options of [model] and [data]
    "t5": ({"kind": "t5", "num_decoder_layers": 1}, {"noise_density": 0.35, "mean_span": 2.0}),
    "t5, relative positions": (
        {"kind": "t5", "num_decoder_layers": 1, "position.encoding": "relative", "dropout": 0.1}
        | {"tied_output_bias": False, "output_scale": True, "activation": "gelu_tanh"},
        {"noise_density": 0.35, "mean_span": 2.0},
    ),
    "bert": ({"kind": "bert"}, {}),
    "documents": ({}, {"document_mask": True}),
    "documents, learned positions": (
        {"position.encoding": "learned_absolute", "moe.layers": (2,)},
        {"document_mask": True},
    ),
}


def recipe_of(kind, micro_batch=2, **parallel):
    model, data = KINDS[kind]
    return replace(
        RECIPE,
        model=RECIPE.model.with_values(model),
        data=DataConfig(**data),
        parallel=ParallelConfig(**parallel),
        train=replace(RECIPE.train, micro_batch=micro_batch),
    )


class Blocks:
    """Tokens that count up by 1, 2 or 3, with an end of document here and there, more of them the larger n is."""

    samples_per_epoch = 1 << 30

    def __getitem__(self, n):
        tokens = TEXT[(np.arange(40) * (1 + n % 3) + 5 * n) % len(TEXT)]
        tokens[5 :: 11 - n % 8] = END
        return tokens


def samples_of(recipe):
    if recipe.model.kind == "t5":
        return SpanCorruption(Blocks(), recipe.spans, SENTINELS, END, 0, 1)
    if recipe.model.kind == "bert":
        return Masking(Blocks(), LENGTH, 0.3, cls=4, sep=5, mask=6, end=END, text=TEXT, seed=1)

    if not recipe.data.document_mask:
        return Samples()

    class Cut(Blocks):
        def __getitem__(self, n):
            return super().__getitem__(n)[: LENGTH + 1]

    return DocumentMask(Cut(), END)


def with_dropout(kind, micro_batch=8, precision="fp32", model=None, **parallel):
    """Recipe of a kind, or of a plain GPT, with dropout."""
    recipe = recipe_of("documents" if kind == "gpt" else kind, micro_batch, **parallel)
    shape = {"dropout": 0.2, "attention.num_heads": 4, "num_layers": 4, **(model or {})}
    if kind == "gpt":
        shape["attention.num_query_groups"] = 2
        recipe = replace(recipe, data=DataConfig())
    train = replace(recipe.train, steps=DROPOUT_STEPS, precision=precision)
    return replace(recipe, model=recipe.model.with_values(shape), train=train)


def losses(recipe, steps=range(DROPOUT_STEPS)):
    """Loss and gradient norm of each step."""
    engine = engine_of(recipe)
    samples = samples_of(recipe)
    results = [engine.train_step(step, samples) for step in steps]
    return [(result.loss, result.grad_norm) for result in results]
