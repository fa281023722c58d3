"""T5, BERT and GPT with a document mask on made up tokens, of which samples predict different numbers. Not a test."""

from dataclasses import replace

import numpy as np

from pretrain.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from pretrain.data.masking import Masking
from pretrain.data.packing import DocumentMask
from pretrain.data.spans import SpanCorruption

STEPS, LENGTH, VOCAB, END = 4, 16, 64, 3
SENTINELS, TEXT = tuple(range(7, 12)), np.arange(12, VOCAB)
RECIPE = Recipe(
    model=ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        ffn_hidden_size=24,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        num_experts=4,
        top_k=2,
        gate="switch",
        capacity_factor=1.0,
        eval_capacity_factor=None,
        jitter=0.3,
        init_std=0.2,
        balance_loss=0.1,
    ),
    # A large eps: where a gradient is rounding alone, the size of the step is not.
    optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2, clip_grad=0.5, eps=1e-3),
    train=TrainConfig(steps=STEPS, global_batch=8, micro_batch=2),
)
KINDS = {
    "t5": ({"kind": "t5", "num_decoder_layers": 1}, {"noise_density": 0.35, "mean_span": 2.0}),
    "t5, relative positions": (
        {"kind": "t5", "num_decoder_layers": 1, "position": "relative", "dropout": 0.1}
        | {"tied_output_bias": False, "output_scale": True, "activation": "gelu_tanh"},
        {"noise_density": 0.35, "mean_span": 2.0},
    ),
    "bert": ({"kind": "bert"}, {}),
    "documents": ({}, {"document_mask": True}),
    "documents, learned positions": ({"position": "learned_absolute", "moe_layers": (2,)}, {"document_mask": True}),
}


def recipe_of(kind, micro_batch=2, distributed=False, **parallel):
    model, data = KINDS[kind]
    return replace(
        RECIPE,
        model=replace(RECIPE.model, **model),
        data=DataConfig(**data),
        parallel=ParallelConfig(**parallel),
        train=replace(RECIPE.train, micro_batch=micro_batch),
        optimizer=replace(RECIPE.optimizer, distributed=distributed),
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

    class Cut(Blocks):
        def __getitem__(self, n):
            return super().__getitem__(n)[: LENGTH + 1]

    return DocumentMask(Cut(), END)
