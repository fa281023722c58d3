"""Splits that cannot be are one line that names both keys; those that can be multiply to the processes of the run."""

import pytest

from fmoe.errors import UserError
from pretrain.config import ParallelConfig, load_recipe

# quickstart: 4 layers, 6 heads of 32, 16 experts of width 256, 256 tokens, vocabulary 2048; 16 sequences, micro batch
# 8.
WRONG = {
    "heads over TP": ({"tensor": 4}, ["parallel.tensor=4", "attention.num_heads=6"]),
    "vocabulary over TP": ({"tensor": 2}, ["parallel.tensor=2", "model.vocab_size=2049"], {"model.vocab-size": 2049}),
    "dense hidden width over TP": (
        {"tensor": 2},
        ["parallel.tensor=2", "model.ffn_hidden_size=767"],
        {"model.ffn-hidden-size": 767, "moe.layers": 2},
    ),
    "wide dense layers over TP": (
        {"tensor": 2},
        ["parallel.tensor=2", "model.dense_ffn_hidden_size=767"],
        {"model.dense-ffn-hidden-size": 767, "moe.layers": 2},
    ),
    "heads of keys over TP": (
        {"tensor": 2},
        ["parallel.tensor=2", "attention.num_query_groups=3"],
        {"attention.num-query-groups": 3},
    ),
    "sequence over TP": (
        {"tensor": 2},
        ["parallel.tensor=2", "model.sequence_length=255"],
        {"model.sequence-length": 255},
    ),
    "a t5's decoder over TP": (
        {"tensor": 2},
        ["parallel.tensor=2", "decoder tokens per sample=45"],
        {"model.kind": "t5", "model.sequence-length": 200},
    ),
    "a t5 over PP": ({"pipeline": 2}, ["parallel.pipeline=2", "model.kind=t5"], {"model.kind": "t5"}),
    "sequence parallelism without TP": ({"sequence": True}, ["parallel.sequence=true", "parallel.tensor > 1"]),
    "context of a t5": ({"context": 2}, ["parallel.context=2", "model.kind=gpt", "not t5"], {"model.kind": "t5"}),
    "context of a bert": ({"context": 2}, ["parallel.context=2", "model.kind=gpt", "not bert"], {"model.kind": "bert"}),
    "context over the sequence": ({"context": 3}, ["parallel.context=3", "model.sequence_length=256"]),
    "context and TP over the sequence": (
        {"tensor": 2, "context": 3},
        ["parallel.tensor x parallel.context=6", "model.sequence_length=250"],
        {"model.sequence-length": 250},
    ),
    "heads over context": ({"context": 4}, ["parallel.context=4", "attention.num_heads=6"]),
    "heads over TP and context": (
        {"tensor": 2, "context": 2},
        ["parallel.tensor x parallel.context=4", "attention.num_heads=6"],
    ),
    "context and EP apart": (
        {"context": 2, "expert": 3},
        ["parallel.context=2", "parallel.expert=3", "divide"],
        {"moe.num-experts": 15},
    ),
    "context and TP with whole sequences": (
        {"tensor": 2, "context": 3, "sequence": "false"},
        ["parallel.sequence=false", "parallel.tensor=2", "parallel.context=3"],
        {"model.sequence-length": 240},
    ),
    "deepep in fp32": ({"expert": 2, "exchange": "deepep"}, ["parallel.exchange=deepep", "not fp32"]),
    "deepep with rows in fp32": (
        {"expert": 2, "exchange": "deepep", "wire": "fp32"},
        ["parallel.exchange=deepep", "not fp32"],
        {"train.precision": "bf16"},
    ),
    "deepep of odd widths": (
        {"expert": 2, "exchange": "deepep", "wire": "bf16"},
        ["model.hidden_size=204", "multiple of 16", "parallel.exchange=deepep"],
        {"model.hidden-size": 204},
    ),
    "deepep of many choices": (
        {"expert": 2, "exchange": "deepep", "wire": "bf16"},
        ["moe.top_k=33", "at most 32", "parallel.exchange=deepep"],
        {"moe.num-experts": 64, "moe.top-k": 33, "moe.gate": "naive"},
    ),
    "layers over PP": ({"pipeline": 3}, ["parallel.pipeline=3", "model.num_layers=4"]),
    "layers over PP x VPP": (
        {"pipeline": 2, "virtual-pipeline": 4},
        ["parallel.pipeline x parallel.virtual_pipeline=8", "model.num_layers=4"],
    ),
    "VPP without PP": ({"virtual-pipeline": 2}, ["parallel.virtual_pipeline=2", "parallel.pipeline > 1"]),
    "VPP with GPipe": (
        {"pipeline": 2, "virtual-pipeline": 2, "schedule": "gpipe"},
        ["parallel.schedule=gpipe", "parallel.virtual_pipeline=2"],
    ),
    "micro batches over PP with VPP": (
        {"pipeline": 2, "virtual-pipeline": 2},
        ["train.global_batch=24", "3 micro batches", "parallel.pipeline=2", "parallel.virtual_pipeline=2"],
        {"train.global-batch": 24},
    ),
    "experts over EP": ({"expert": 3}, ["parallel.expert=3", "moe.num_experts=16"]),
    "EP without experts": ({"expert": 2}, ["parallel.expert=2", "moe.num_experts"], {"moe.num-experts": 0}),
    "TP and EP apart": (
        {"tensor": 2, "expert": 3},
        ["parallel.tensor", "=2", "parallel.expert", "=3", "divide"],
        {"moe.num-experts": 15},
    ),
    "ETP that is not TP": ({"tensor": 1, "expert-tensor": 2}, ["parallel.expert_tensor=2", "parallel.tensor=1"]),
    "ETP over the hidden width": (
        {"tensor": 2, "expert-tensor": 2},
        ["parallel.expert_tensor=2", "model.ffn_hidden_size=767"],
        {"model.ffn-hidden-size": 767},
    ),
    "ETP and shadowing": (
        {"tensor": 2, "expert-tensor": 2, "shadow": 1},
        ["parallel.shadow=1", "parallel.expert_tensor=1"],
    ),
    "batch over DP": ({"data": 3}, ["train.micro_batch x parallel.data=24", "train.global_batch=16"]),
    "batch over DP of TP and EP": (
        {"tensor": 2, "expert": 8},
        ["train.micro_batch x parallel.expert x parallel.data / (parallel.tensor=2", "=32", "train.global_batch=16"],
    ),
    "gathered parameters": ({"overlap-parameters": True}, ["parallel.overlap_parameters", "optimizer.distributed"]),
    "nothing": ({"tensor": 0}, ["parallel.tensor=0"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_splits_that_cannot_be_are_said(case):
    parallel, parts, *rest = WRONG[case]
    options = {"parallel.expert": 1} | {f"parallel.{key}": value for key, value in parallel.items()} | dict(*rest)
    options |= dict.fromkeys([key for key in options if key.endswith("overlap-parameters")], "")
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value)) if text]
    with pytest.raises(UserError) as error:
        load_recipe("quickstart", arguments)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


SIZES = {  # processes, data parallel size of the dense part
    "one": ({}, 1, 1),
    "EP x DP": ({"expert": 2, "data": 3}, 6, 6),
    "TP": ({"tensor": 2}, 2, 1),
    "experts over the tensor ranks": ({"tensor": 2, "expert": 2}, 2, 1),
    "experts over more": ({"tensor": 2, "expert": 8, "data": 2}, 16, 8),
    "experts over fewer": ({"tensor": 4, "expert": 2}, 4, 1),
    "cut experts": ({"tensor": 2, "expert_tensor": 2, "expert": 2}, 4, 2),
    "context": ({"context": 2, "data": 3}, 6, 3),
    "experts over the context ranks": ({"tensor": 2, "context": 2, "expert": 4}, 4, 1),
    "experts over more than the context ranks": ({"context": 2, "expert": 4, "data": 2}, 8, 4),
    "all": ({"tensor": 2, "pipeline": 4, "expert": 4, "data": 2}, 32, 4),
}


@pytest.mark.parametrize("case", SIZES)
def test_processes_are_the_product(case):
    keys, world_size, dense_data = SIZES[case]
    parallel = ParallelConfig(**keys)
    assert (parallel.world_size, parallel.dense_data) == (world_size, dense_data)
    for key, value in keys.items():
        assert f"parallel.{key}={value}" in parallel.world_size_name


def test_sequence_parallelism_comes_with_tensor_parallelism():
    assert not ParallelConfig().is_sequence_parallel
    assert ParallelConfig(tensor=2).is_sequence_parallel
    assert not ParallelConfig(tensor=2, sequence=False).is_sequence_parallel
