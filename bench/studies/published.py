"""``python -m bench published``: predictions of ``fmoe plan`` against published training measurements.

Each point is a published model with its split, on a cluster of published figures. Nothing runs on a device, and no
prediction uses a published throughput. A split that the publication leaves open is completed by the same rules in all
points: micro batches of one sequence, and one model chunk for each pipeline stage.

The error is that of a step's time, or of bytes: positive if the prediction is too slow or too large.
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import options, report
from fmoe.errors import UserError
from pretrain.config import ModelConfig, MoEConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from pretrain.config.load import read_recipe
from pretrain.config.model import AttentionConfig, PositionConfig
from pretrain.planner.cluster import CLUSTERS, Cluster, load_cluster

GIB = 2**30

SOURCES = {
    "Model Zoo": "github.com/yanring/Megatron-MoE-ModelZoo: best_practice and runtime_configs",
    "Megatron-LM": "github.com/NVIDIA/Megatron-LM: README and model_table.png; README of megatron/core/transformer/moe",
    "AutoModel": "NVIDIA NeMo AutoModel, performance summary of 2025-10-02 and its benchmark configurations",
    "DeepSeek-V2": "arXiv 2405.04434, sections 3.1.2, 3.1.3 and 3.2.3",
    "DeepSeek-V3": "arXiv 2412.19437, sections 1, 3.1, 3.2 and 4.2",
    "Narayanan": "Narayanan et al.: arXiv 2104.04473, tables 1 and 2, equation 3",
    "GShard": "arXiv 2006.16668, table 3",
    "Switch": "arXiv 2101.03961, table 1",
    "GPipe": "arXiv 1811.06965, table 1",
    "ZeRO": "arXiv 1910.02054, figure 1",
}

H800 = (CLUSTERS / "h100.toml").read_text()
H800 = H800.replace('name = "h100"', 'name = "h800"').replace("bandwidth = 450e9", "bandwidth = 160e9")
# A rank is a core, half of a chip. The inner level is the largest set of chips with full bandwidth in a torus of 4 x 4;
# the outer level is bound by a pod's bisection.
TPU_V3 = """
name = "tpu-v3"
source = "Google Cloud's documentation of TPU v3, for a core: half of a chip; efficiency by GShard, section 5.2"
num_ranks = 2048

[device]
memory = 17.18e9  # 32 GiB for each chip
bandwidth = 450e9
launch = 0  # a compiled program launches its operations itself
efficiency = 0.85

[device.peak]
bf16 = 61.5e12
fp32 = 10.25e12  # six products in bf16

[[links]]  # all-reduce bandwidth of a pod of 1,024 chips, 340 TB/s, over the 4 links of a chip
size = 32
bandwidth = 83e9
latency = 1e-6  # as in tpu-v5p.toml

[[links]]  # bisection bandwidth of the pod, 6.4 TB/s, which half of an all-to-all crosses
size = 2048
bandwidth = 6.25e9
latency = 1e-6
"""
CLUSTER_TEXTS = {"h800": H800, "tpu-v3": TPU_V3}


@dataclass(frozen=True)
class Point:
    """A published measurement.

    Attributes:
        name: model and split.
        cluster: a shipped cluster with its number of ranks, or a key of ``CLUSTER_TEXTS``.
        published: the figure.
        unit: its unit.
        figure: the figure that a prediction has in this unit.
        source: a key of ``SOURCES``.
        is_rate: whether larger is faster, so that the error of the time is that of the inverse.
    """

    name: str
    cluster: str
    recipe: Recipe
    published: float
    unit: str
    figure: Callable[[Any], float]
    source: str
    is_rate: bool = False


def main(argv: Sequence[str]) -> None:
    parser = options.bare_parser("published", __doc__)
    parser.add_argument("--points", nargs="+", type=int, help="numbers of the points, from 0 (default: all)")
    arguments = parser.parse_args(argv)
    every = points()
    chosen = arguments.points or range(len(every))
    if max(chosen) >= len(every):
        raise UserError(f"--points={max(chosen)} must be below {len(every)}")
    rows = []
    for number in chosen:
        point = every[number]
        rows.append(
            {
                "point": point.name,
                "cluster": point.cluster,
                "published": point.published,
                "unit": point.unit,
                "source": point.source,
                **predict(point),
            }
        )
        print(line(rows[-1]), flush=True)
    report.write_rows(rows, table(rows), arguments.out, "published")


def predict(point: Point) -> dict[str, Any]:
    """Return the predicted figure of a point, its error, and the prediction's terms and memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all tensors are fake ones of the CPU
    from pretrain.planner import loads
    from pretrain.planner.predict import Predictor

    model = point.recipe.model
    num_experts = model.routed_experts if model.layers_with_experts else 1
    predictor = Predictor(cluster_of(point), loads.of_slowest(loads.uniform(num_experts)))
    prediction = predictor.predict(point.recipe)
    predicted = point.figure(prediction)
    ratio = point.published / predicted if point.is_rate else predicted / point.published
    return {
        "predicted": predicted,
        "error": ratio - 1,
        "seconds": prediction.seconds,
        "terms": prediction.terms,
        "memory": prediction.memory,
    }


def cluster_of(point: Point) -> Cluster:
    if point.cluster not in CLUSTER_TEXTS:
        return load_cluster(point.cluster)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(CLUSTER_TEXTS[point.cluster])
        return load_cluster(str(path))


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['point']}: {_number(row['published'])} {row['unit']}, predicted {_number(row['predicted'])}, "
        f"{row['error']:+.0%}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the points as Markdown, with the term that takes most of the predicted time."""
    lines = [
        "| point | unit | published | predicted | error | largest term | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        terms = row["terms"]
        term = max(terms, key=lambda name: terms[name])
        limit = f"{term} {terms[term] / row['seconds']:.0%}" if row["source"] not in ("GPipe", "ZeRO") else ""
        lines.append(
            f"| {row['point']} | {row['unit']} | {_number(row['published'])} | {_number(row['predicted'])} "
            f"| {row['error']:+.0%} | {limit} | {row['source']} |"
        )
    sizes = sorted(abs(math.log1p(row["error"])) for row in rows)
    lines.append(f"\nMedian factor between the two: {math.exp(sizes[len(sizes) // 2]):.2f}\n")
    lines += [f"* {name}: {SOURCES[name]}" for name in dict.fromkeys(row["source"] for row in rows)]
    return "\n".join(lines) + "\n"


def points() -> list[Point]:
    """Return all points: experts on GPUs, dense GPTs on GPUs, experts on TPUs, memory."""
    return [*_experts(), *_deepseek(), *_dense_a100(), *_dense_h100(), *_tpu(), *_gpipe(), *_zero()]


def _recipe(model: ModelConfig, split: dict[str, Any], batch: int, micro: int = 1, precision="bf16", optimizer="adamw"):
    recipe = Recipe(
        model=model,
        parallel=ParallelConfig(**split),
        optimizer=OptimizerConfig(name=optimizer),
        train=TrainConfig(global_batch=batch, micro_batch=micro, precision=precision, validation_sequences=batch),
    )
    recipe.check()
    return recipe


def _gpt(width: int, layers: int, heads: int, vocab: int, length: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=4 * width,
        sequence_length=length,
        vocab_size=vocab,
        attention=AttentionConfig(num_heads=heads),
        position=PositionConfig(encoding="learned_absolute"),
        moe=MoEConfig(num_experts=0),
    )


def _tokens_per_rank(prediction: Any) -> float:
    return prediction.tokens_per_second / prediction.recipe.parallel.world_size


def _seconds(prediction: Any) -> float:
    return prediction.seconds


def _thousand_hours(prediction: Any) -> float:
    """GPU hours for a trillion tokens, in thousands."""
    return 1e12 / _tokens_per_rank(prediction) / 3600 / 1e3


def _days(prediction: Any) -> float:
    """Days for 300 billion tokens."""
    return 300e9 / prediction.tokens_per_second / 86400


def _teraflops(prediction: Any) -> float:
    """TFLOP/s of a rank, by the trainer's count, which is Megatron-LM's: all scores of attention, no recomputation."""
    return _tokens_per_rank(prediction) * prediction.recipe.flops_per_token() / 1e12


def _teraflops_recomputed(prediction: Any) -> float:
    """TFLOP/s by equation 3 of Narayanan et al., which counts the second forward pass of recomputation."""
    model = prediction.recipe.model
    width = model.hidden_size
    of_scores = model.sequence_length / (6 * width)
    of_output = model.vocab_size / (16 * model.num_layers * width)
    flops = 96 * model.num_layers * width**2 * (1 + of_scores + of_output)
    return _tokens_per_rank(prediction) * flops / 1e12


def _experts() -> list[Point]:
    overlap = {"shard": "optimizer", "overlap_gradients": True, "overlap_parameters": True}
    small = read_recipe("mixtral-8x7b").model
    large = replace(
        small,
        num_layers=56,
        hidden_size=6144,
        ffn_hidden_size=16384,
        attention=replace(small.attention, num_heads=48),
    )
    qwen30 = read_recipe("qwen3-moe-30b-a3b").model
    qwen235 = replace(
        qwen30,
        num_layers=94,
        hidden_size=4096,
        ffn_hidden_size=1536,
        attention=replace(qwen30.attention, num_heads=64, num_query_groups=4),
    )
    stages = (2, *(3,) * 30, 2)  # the embedding and the output layer count as a layer each
    splits_235 = {
        "TP2 PP8 VPP4 EP32": (
            19.7,
            {"tensor": 2, "pipeline": 8, "virtual_pipeline": 4, "expert": 32, "stage_layers": stages, **overlap},
        ),
        "TP2 PP32 EP8 (VPP3 in the publication)": (
            24.2,
            {"tensor": 2, "pipeline": 32, "expert": 8, "stage_layers": stages, **overlap},
        ),
        "TP4 PP8 VPP4 EP8": (
            29.0,
            {
                "tensor": 4,
                "pipeline": 8,
                "virtual_pipeline": 4,
                "expert": 8,
                "data": 4,
                "stage_layers": stages,
                **overlap,
            },
        ),
    }
    found = [
        Point(
            "Mixtral 8x7B, 64 H100, PP4 VPP8 EP8",
            "h100-64",
            _recipe(small, {"pipeline": 4, "virtual_pipeline": 8, "expert": 8, "data": 2, **overlap}, 256),
            468,
            "TFLOP/s per GPU",
            _teraflops,
            "Megatron-LM",
            is_rate=True,
        ),
        Point(
            "Mixtral 8x22B, 128 H100, TP2 PP8 VPP7 EP8",
            "h100-128",
            _recipe(
                large,
                {"tensor": 2, "pipeline": 8, "virtual_pipeline": 7, "expert": 8, "data": 2, **overlap},
                256,
            ),
            465,
            "TFLOP/s per GPU",
            _teraflops,
            "Model Zoo",
            is_rate=True,
        ),
        Point(
            "Qwen3-30B-A3B, 8 H100, EP8 ZeRO-3, recomputed",
            "h100-8",
            _recipe(qwen30, {"expert": 8, "shard": "parameters", "recompute": "full"}, 512, 4),
            12040,
            "tokens/s per GPU",
            _tokens_per_rank,
            "AutoModel",
            is_rate=True,
        ),
    ]
    for name, (seconds, split) in splits_235.items():
        source = "Model Zoo"
        recipe = _recipe(qwen235, split, 2048)
        found.append(
            Point(f"Qwen3-235B-A22B, 256 H100, {name}", "h100-256", recipe, seconds, "s per step", _seconds, source)
        )
    sharded = {"tensor": 2, "expert": 8, "data": 32, "shard": "parameters", "recompute": "full"}
    found.append(
        Point(
            "Qwen3-235B-A22B, 256 H100, TP2 EP8 ZeRO-3, recomputed",
            "h100-256",
            _recipe(qwen235, sharded, 2048, 4),
            17.6,
            "s per step",
            _seconds,
            "Model Zoo",
        )
    )
    return found


def _deepseek() -> list[Point]:
    lite = read_recipe("deepseek-v2-lite").model
    second = replace(
        lite,
        num_layers=60,
        hidden_size=5120,
        ffn_hidden_size=1536,
        dense_ffn_hidden_size=12288,
        attention=replace(lite.attention, num_heads=128, q_lora_rank=1536),
        moe=replace(lite.moe, num_experts=160, layers=tuple(range(2, 61))),
    )
    third = replace(
        second,
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=2048,
        dense_ffn_hidden_size=18432,
        vocab_size=129280,
        moe=replace(lite.moe, num_experts=256, num_shared_experts=1, top_k=8, layers=tuple(range(4, 62))),
    )
    zero_bubble = {"pipeline": 16, "schedule": "zero_bubble", "shard": "optimizer", "overlap_gradients": True}
    hours = "thousand GPU hours per trillion tokens"
    return [
        Point(
            "DeepSeek-V2, H800, PP16 zero bubble, EP8 on 1,024 GPUs",
            "h800",
            _recipe(second, {**zero_bubble, "expert": 8, "data": 8, "stage_layers": ((4,) * 12 + (3,) * 4)}, 9216),
            172.8,
            hours,
            _thousand_hours,
            "DeepSeek-V2",
        ),
        Point(
            "DeepSeek-V3, 2,048 H800, PP16 zero bubble, EP64",
            "h800",
            _recipe(third, {**zero_bubble, "expert": 64, "data": 2, "stage_layers": ((4,) * 13 + (3,) * 3)}, 15360),
            180,
            hours,
            _thousand_hours,
            "DeepSeek-V3",
        ),
        Point(
            "DeepSeek-V3, 256 H100, PP4 VPP8 EP64, recomputed",
            "h100-256",
            _recipe(
                third,
                {
                    "pipeline": 4,
                    "virtual_pipeline": 8,
                    "expert": 64,
                    "shard": "optimizer",
                    "overlap_gradients": True,
                    "recompute": "full",
                    "stage_layers": ((2,) * 29 + (1,) * 3),
                },
                512,
            ),
            1002,
            "tokens/s per GPU",
            _tokens_per_rank,
            "AutoModel",
            is_rate=True,
        ),
    ]


def _dense_a100() -> list[Point]:
    common = {"sequence": False, "recompute": "full"}
    weak_scaling = [
        # parameters, width, layers, heads, TP, PP, ranks, batch, TFLOP/s
        ("1.7B", 2304, 24, 24, 1, 1, 32, 512, 137),
        ("7.5B", 4096, 36, 32, 4, 1, 128, 512, 142),
        ("18.4B", 6144, 40, 48, 8, 1, 256, 1024, 135),
        ("76.1B", 10240, 60, 80, 8, 4, 1024, 1792, 140),
        ("145.6B", 12288, 80, 96, 8, 8, 1536, 2304, 148),
        ("1008B", 25600, 128, 160, 8, 64, 3072, 3072, 163),
    ]
    found = []
    for size, width, layers, heads, tensor, pipeline, ranks, batch, teraflops in weak_scaling:
        split = {**common, "pipeline": pipeline, "tensor": tensor, "data": ranks // (tensor * pipeline)}
        if tensor == 1:
            split.pop("sequence")
        found.append(
            Point(
                f"GPT {size}, {ranks} A100, TP{tensor} PP{pipeline}, recomputed",
                f"a100-{ranks}",
                _recipe(_gpt(width, layers, heads, 51200, 2048), split, batch, precision="fp16"),
                teraflops,
                "TFLOP/s per GPU",
                _teraflops_recomputed,
                "Narayanan",
                is_rate=True,
            )
        )
    compared = [
        ("GPT-3 175B", 12288, 96, 96, 12, 384, 1536, 84),
        ("GPT-3 175B", 12288, 96, 96, 12, 768, 1536, 43),
        ("GPT-3 175B", 12288, 96, 96, 12, 1536, 1536, 23),
        ("GPT 530B", 20480, 105, 128, 35, 560, 2240, 156),
        ("GPT 530B", 20480, 105, 128, 35, 2240, 2240, 42),
    ]
    for name, width, layers, heads, pipeline, ranks, batch, days in compared:
        split = {**common, "pipeline": pipeline, "tensor": 8, "data": ranks // (8 * pipeline)}
        found.append(
            Point(
                f"{name}, {ranks} A100, TP8 PP{pipeline}, recomputed",
                f"a100-{ranks}",
                _recipe(_gpt(width, layers, heads, 51200, 2048), split, batch, precision="fp16"),
                days,
                "days for 300 billion tokens",
                _days,
                "Narayanan",
            )
        )
    return found


def _dense_h100() -> list[Point]:
    weak_scaling = [
        ("1.7B", 2048, 24, 16, 1, 1, 48, 192, 408.8),
        ("7.1B", 4096, 30, 32, 2, 1, 96, 192, 465.9),
        ("16B", 6144, 32, 48, 4, 1, 192, 192, 489.1),
        ("177B", 12288, 96, 96, 8, 6, 2304, 1152, 432.8),
        ("462B", 18432, 112, 144, 8, 16, 6144, 3072, 459.9),
    ]
    found = []
    for size, width, layers, heads, tensor, pipeline, ranks, batch, teraflops in weak_scaling:
        model = replace(_gpt(width, layers, heads, 131072, 4096), tie_embeddings=False)
        split = {
            "tensor": tensor,
            "pipeline": pipeline,
            "data": 48,
            "shard": "optimizer",
            "overlap_gradients": True,
            "overlap_parameters": True,
        }
        found.append(
            Point(
                f"GPT {size}, {ranks} H100, TP{tensor} PP{pipeline}",
                f"h100-{ranks}",
                _recipe(model, split, batch),
                teraflops,
                "TFLOP/s per GPU",
                _teraflops,
                "Megatron-LM",
                is_rate=True,
            )
        )
    return found


def _tpu() -> list[Point]:
    gshard = read_recipe("gshard-600b").model
    switch = read_recipe("switch-base").model
    found = []
    for layers, experts, tokens, steps in (
        (36, 2048, 4, 0.72),
        (12, 2048, 4, 2.15),
        (36, 128, 1, 0.67),
        (12, 128, 1, 2.16),
    ):
        model = replace(
            gshard,
            num_layers=layers // 2,
            num_decoder_layers=layers // 2,
            moe=replace(gshard.moe, num_experts=experts),
        )
        recompute = "full" if layers == 36 else "none"
        split = {"expert": experts, "recompute": recompute}
        batch = 1024 * tokens
        recipe = _recipe(model, split, batch, batch // experts, optimizer="adafactor")
        found.append(
            Point(
                f"GShard MoE({experts}E, {layers}L), {experts} TPU v3 cores",
                "tpu-v3",
                recipe,
                1 / steps,
                "s per step",
                _seconds,
                "GShard",
            )
        )
    large = read_recipe("switch-large").model
    trained = {
        "T5-Base": (replace(switch, moe=MoEConfig(num_experts=0)), {"data": 32}, 1600),
        "T5-Large": (replace(large, moe=MoEConfig(num_experts=0)), {"data": 32}, 470),
        "Switch-Base, capacity factor 1.0": (
            replace(switch, moe=replace(switch.moe, capacity_factor=1.0)),
            {"expert": 32},
            1000,
        ),
        "Switch-Base, capacity factor 2.0": (
            replace(switch, moe=replace(switch.moe, capacity_factor=2.0)),
            {"expert": 32},
            860,
        ),
    }
    for name, (model, split, examples) in trained.items():
        found.append(
            Point(
                f"{name}, 32 TPU v3 cores",
                "tpu-v3",
                _recipe(model, split, 2048, 32, optimizer="adafactor"),
                examples,
                "examples/s",
                lambda prediction: prediction.recipe.train.global_batch / prediction.seconds,
                "Switch",
                is_rate=True,
            )
        )
    return found


def _states(prediction: Any) -> float:
    """Bytes of weights, gradients and the optimizer."""
    return sum(prediction.memory[name] for name in ("weights", "gradients", "optimizer"))


def _gpipe() -> list[Point]:
    found = []
    for stages, states, activations in ((8, 59.5, 50.9), (32, 235.1, 199.9), (128, 937.9, 796.1)):
        layers = 13 * stages - 1
        model = _gpt(2048, layers, 32, 32000, 1024)
        split = {
            "pipeline": stages,
            "schedule": "gpipe",
            "recompute": "full",
            "stage_layers": (12, *(13,) * (stages - 1)),
        }
        recipe = _recipe(model, split, 32, precision="fp32", optimizer="sgd")
        figures = {
            "parameters": (states, _states),
            "activations": (activations, lambda p: p.memory["activations"] + p.memory["transient"]),
        }
        for name, (total, figure) in figures.items():
            found.append(
                Point(
                    f"GPipe, Transformer of {layers} layers on {stages} TPU v3 cores: {name}",
                    "tpu-v3",
                    recipe,
                    total / stages,
                    "GiB per core",
                    lambda prediction, figure=figure: figure(prediction) / GIB,
                    "GPipe",
                )
            )
    return found


def _zero() -> list[Point]:
    model = _gpt(4096, 36, 32, 51200, 2048)
    stages = {"none": 120, "optimizer": 31.4, "gradients": 16.6, "parameters": 1.9}
    return [
        Point(
            f"ZeRO, 7.5B parameters on 64 GPUs, shard={shard}: states",
            "a100-64",
            _recipe(model, {"data": 64, "shard": shard}, 64),
            size,
            "GB per GPU",
            lambda prediction: _states(prediction) / 1e9,
            "ZeRO",
        )
        for shard, size in stages.items()
    ]
