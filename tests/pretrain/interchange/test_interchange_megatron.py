"""Checkpoints of Megatron-core's dist_checkpointing become runs of ours with the same logits."""

import argparse
import contextlib
import io
import json
import multiprocessing
import queue
import shutil
import warnings
import zlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from compare import assert_close
from forks import only, values
from huggingface_folders import our_logits, some_tokens
from tiny_families import LENGTH, VOCAB

from fmoe.cli import run
from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint
from pretrain.checkpoint.cli import main
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, Recipe, load_recipe, write_recipe
from pretrain.interchange.dcp import DcpFolder

LIMIT = 1e-5  # of logits in float32, norm-wise
EXPERTS = 4
BASE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "moe_ffn_hidden_size": 24,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
}
OURS = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=24,
    vocab_size=VOCAB,
    sequence_length=LENGTH,
    gated=True,
    activation="silu",
    norm="rms",
    tie_embeddings=False,
    attention=AttentionConfig(num_heads=4, num_query_groups=2),
    moe=MoEConfig(num_experts=EXPERTS, top_k=2, gate="naive", capacity_factor=None, eval_capacity_factor=None),
)
# Arguments of Megatron-LM, as it saves them in common.pt; not all of them.
ARGS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "num_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_expert_capacity_factor": None,
    "params_dtype": torch.float32,
    "iteration": 3,
}
# Name: (fields of Megatron's config, its arguments, our keys).
CASES = {
    "stacked layers": ({}, ARGS, {}),
    "sigmoid, every second layer, shared expert, no arguments": (
        {
            "moe_layer_freq": [0, 1],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_shared_expert_intermediate_size": 24,
            "qk_layernorm": True,
        },
        None,
        {
            "moe.every": 2,
            "dense_ffn_hidden_size": 40,
            "moe.gate": "sigmoid",
            "moe.routed_scale": 1.5,
            "moe.num_shared_experts": 1,
            "attention.qk_norm": True,
        },
    ),
    "softmax before the choice, LayerNorm, tied": (
        {
            "moe_router_pre_softmax": True,
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "activation_func": F.gelu,
            "num_query_groups": 4,
        },
        ARGS
        | {"moe_router_pre_softmax": True, "normalization": "LayerNorm", "swiglu": False}
        | {"untie_embeddings_and_output_weights": False, "group_query_attention": False},
        {
            "moe.normalize": False,
            "norm": "layer",
            "gated": False,
            "activation": "gelu",
            "tie_embeddings": True,
            "attention.num_query_groups": None,
        },
    ),
}


def recipe_of(keys):

    return Recipe(model=OURS.with_values(keys))


def saved(folder, fields, arguments, tied, tokens, tensor=1, expert=1):
    """Saves Megatron's model, at a split, and returns its logits; for processes of `forks`."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch import cpu, patches

    torch.compiler.set_stance("force_eager")  # Megatron's router has a function that is compiled, for half a minute
    cpu.install()
    patches.install()
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(11)
    config = TransformerConfig(
        **BASE | fields,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall" if expert * tensor > 1 else "allgather",
        moe_router_load_balancing_type="none",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    if "moe_layer_freq" not in fields:  # all layers equal: saved as a stack
        config.moe_layer_freq = 1
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    draw_weights(model)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        logits = model.eval()(tokens, positions, None)
    if tensor > 1:
        parts = [torch.empty_like(logits) for _ in range(tensor)]
        dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        logits = torch.cat(parts, -1)
    state = {"model": model.sharded_state_dict(), "iteration": 3, "checkpoint_version": 3.0}
    if arguments is not None:
        state["args"] = argparse.Namespace(**arguments)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    # Megatron-core 0.16 writes from forks of this process. Its own queue would be one more process, which would stay.
    multiprocessing.current_process()._config["daemon"] = False
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, str(folder))
    return logits


def draw_weights(model):
    """Of a size at which experts matter, each tensor by its global name and offset: the same at every split."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    with torch.no_grad():
        for sharded in nested_values(model.sharded_state_dict()):
            parts = [sharded]
            if isinstance(sharded, ShardedTensorFactory):
                parts = [part for part in nested_values(sharded.build()) if isinstance(part, ShardedTensor)]
            for part in parts:
                if not isinstance(part, ShardedTensor):
                    continue
                draw = torch.Generator().manual_seed(zlib.crc32(part.key.encode()))
                whole = torch.randn(part.global_shape, generator=draw) * (0.3 if ".mlp." in part.key else 0.1)
                whole = whole.abs() + 0.5 if "norm" in part.key else whole
                sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
                index = tuple(slice(o, o + n) for o, n in zip(part.global_offset, sizes, strict=True))
                part.data.copy_(whole[index].view(part.local_shape))


def importing(path, out, *argv):
    """Exit code, stdout and stderr of ``fmoe checkpoint import``, in a process without a group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    arguments = ["import", str(path), str(out), *map(str, argv)]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as error:
        code = run("fmoe checkpoint", lambda: main(arguments))
    return code, output.getvalue(), error.getvalue()


@pytest.mark.by_default("stacked layers", "sigmoid, every second layer, shared expert, no arguments")
@pytest.mark.parametrize("case", CASES)
def test_a_run_of_ours_has_the_same_logits(forks, tmp_path, case):
    fields, arguments, keys = CASES[case]
    tokens, recipe = some_tokens(), recipe_of(keys)
    write_recipe(recipe, tmp_path / "mine.toml")
    folder = tmp_path / "theirs" / "iter_0000003"
    expected = only(forks.run(1, saved, folder, fields, arguments, recipe.model.tie_embeddings, tokens))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3\n")
    out = tmp_path / "run"
    code, output, error = only(forks.run(1, importing, folder.parent, out, "--recipe", tmp_path / "mine.toml"))
    assert (code, error) == (0, "")
    assert ("no arguments of Megatron-LM" in output) == (arguments is None)
    assert load_recipe(str(out / "config.toml")).model == recipe.model
    assert_close(only(forks.run(1, our_logits, out, tokens)), expected, LIMIT, "our logits")
    open_checkpoint(out).verify()


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (1, 2), (2, 2)], ids=["TP2", "EP2", "TP2 x EP2"])
@pytest.mark.parametrize("case", list(CASES)[:2])
def test_every_split_gives_the_same_run(forks, tmp_path, case, tensor, expert):
    fields, arguments, keys = CASES[case]
    tokens, recipe = some_tokens()[:2], recipe_of(keys)
    write_recipe(recipe, tmp_path / "mine.toml")
    for name, split in (("one", (1, 1)), ("split", (tensor, expert))):
        size = max(split)
        found = values(forks.run(size, saved, tmp_path / name, fields, arguments, False, tokens, *split))
        if name == "one":
            expected = found[0]
        assert_close(found[0], expected, LIMIT, "Megatron's logits")
        argv = (tmp_path / name, tmp_path / f"{name} run", "--recipe", tmp_path / "mine.toml")
        assert only(forks.run(1, importing, *argv))[0] == 0
    one, split = (open_checkpoint(tmp_path / f"{name} run") for name in ("one", "split"))
    assert one.names() == split.names()
    for name in one.names():
        assert torch.equal(one.read(name), split.read(name)), name
    assert_close(only(forks.run(1, our_logits, tmp_path / "split run", tokens)), expected, LIMIT, "our logits")


@pytest.fixture(scope="module")
def theirs(forks, tmp_path_factory):
    """A checkpoint of the first case."""
    folder = tmp_path_factory.mktemp("megatron") / "theirs"
    fields, arguments, _ = CASES["stacked layers"]
    only(forks.run(1, saved, folder, fields, arguments, False, some_tokens()[:1]))
    return folder


def refusals(folder, out, recipes):
    """The result of each import, and whether it left anything."""
    return [(*importing(folder, out, "--recipe", recipe), out.exists()) for recipe in recipes]


WRONG = {
    "moe_router_topk=2": {"moe.top_k": 1},
    "rotary_base=10000": {"position.rope_theta": 500.0},
    "norm_epsilon=1e-05": {"norm_eps": 1e-6},
    "normalization=RMSNorm": {"norm": "layer"},
    "moe_router_pre_softmax=false": {"moe.normalize": False},
    "moe_router_score_function=softmax": {"moe.score": "sigmoid"},
    "moe_router_enable_expert_bias=false": {"moe.gate": "sigmoid", "moe.score": "softmax"},
    "moe_router_topk_scaling_factor=none": {"moe.routed_scale": 2.0},
    "untie_embeddings_and_output_weights=true": {"tie_embeddings": True},
    "qk_layernorm": {"attention.qk_norm": True},
    "has shape [96, 32]": {"vocab_size": 104},
    "has no tensor model/decoder.layers.0.mlp.shared.expert.weight_in": {"moe.num_shared_experts": 1},
}


def test_a_recipe_of_other_logits_is_refused(forks, theirs, tmp_path):
    recipes = []
    for number, keys in enumerate(WRONG.values()):
        recipes.append(tmp_path / f"{number}.toml")
        write_recipe(recipe_of(keys), recipes[-1])
    found = only(forks.run(1, refusals, theirs, tmp_path / "out", recipes))
    for (word, keys), (code, _, error, is_there) in zip(WRONG.items(), found, strict=True):
        if word == "qk_layernorm":
            word = "has no tensor model/decoder.layers.0.self_attention.q_layernorm.weight"  # no argument has it
        assert code == 2 and error.count("\n") == 1 and not is_there, error
        assert word in error, (keys, error)


def broken_json(folder):
    (folder / "metadata.json").write_text("{}")


def another_backend(folder):
    values = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(values | {"sharded_backend": "zarr"}))


def no_iteration(folder):
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


DAMAGES = {
    "no sharded_backend": broken_json,
    "sharded_backend='zarr'": another_backend,
    "iter_0000007": no_iteration,
    "__0_0.distcp is missing": lambda folder: (folder / "__0_0.distcp").unlink(),
    "has no .metadata": lambda folder: (folder / ".metadata").unlink(),
}


@pytest.mark.parametrize("word", DAMAGES)
def test_damage_is_one_line(theirs, tmp_path, word):
    shutil.copytree(theirs, tmp_path / "bad")
    DAMAGES[word](tmp_path / "bad")
    code, _, error = importing(tmp_path / "bad", tmp_path / "out", "--recipe", "quickstart")
    assert (code, error.count("\n"), word in error) == (2, 1, True), error
    assert not (tmp_path / "out").exists()


def test_arguments_as_an_object_of_the_folder(tmp_path):
    """As megatron-core saves them from 0.19 on: without common.pt."""
    from pretrain.interchange.megatron import check_arguments

    def folder_with(name, value):
        with warnings.catch_warnings(action="ignore"):
            planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
            state = {name: value, "weight": torch.ones(2)}
            dcp.save(state, checkpoint_id=tmp_path / name, planner=planner, no_dist=True)
        return DcpFolder(tmp_path / name)

    folder = folder_with("common_state/shard_0_1", [{"args": argparse.Namespace(**ARGS), "iteration": 3}])
    assert check_arguments(folder, OURS)
    with pytest.raises(UserError, match=r"common_state.*: moe_router_topk=2 differs .* moe\.top_k=1"):
        check_arguments(folder, OURS.with_values({"moe.top_k": 1}))
    data = folder.path / folder.objects["common_state/shard_0_1"].file
    data.write_bytes(data.read_bytes().replace(b"moe_router_topk", b"moe_router_topX"))
    with pytest.raises(UserError, match=f"{data.name} is damaged .* common_state"):
        check_arguments(folder, OURS)
    data.unlink()
    with pytest.raises(UserError, match=f"{data.name} is missing"):
        check_arguments(folder, OURS)
    with pytest.raises(UserError, match=r"common\.pt is missing.* common_state"):
        check_arguments(folder_with("another", [{"args": argparse.Namespace(**ARGS)}]), OURS)


@pytest.mark.parametrize(("shape", "word"), [((10**10, 2), f"has {10**10} layers"), ((10**10, 0), "is empty")])
def test_a_stacked_tensor_has_the_layers_of_the_recipe(tmp_path, shape, word):
    """Refused before anything is listed per layer."""
    from pretrain.interchange.dcp import Chunked
    from pretrain.interchange.megatron import rename

    name = "decoder.layers.input_layernorm.weight"
    folder = argparse.Namespace(path=tmp_path, tensors={name: Chunked(torch.float32, shape, ())})
    with pytest.raises(UserError, match=f"{name} {word}"):
        rename(folder, ["model/decoder.layers.0.input_layernorm.weight"])


LATENT = {"attention.kv_lora_rank": 16}
NOT_OURS = {
    "moe_expert_capacity_factor=1.25": ({"moe_expert_capacity_factor": 1.25}, {}),
    "use_rope_scaling=true": ({"use_rope_scaling": True}, {}),
    "squared_relu=true": ({"squared_relu": True}, {}),
    "quick_geglu=true": ({"quick_geglu": True}, {}),
    "window_size=[8, 0]": ({"window_size": (8, 0)}, {}),
    "window_size=none": ({"window_size": None}, {"attention.sliding_window": 9}),
    "window_size=[8, 0] ": ({"window_size": (8, 0)}, {"attention.sliding_window": 8}),
    "window_attn_skip_freq=2": ({"window_size": (8, 0), "window_attn_skip_freq": 2}, {"attention.sliding_window": 9}),
    "softmax_type=learnable": ({"softmax_type": "learnable"}, {}),
    "rotary_percent=1.0": ({}, {"position.rotary_fraction": 0.5}),
    "qk_l2_norm=true": ({"qk_l2_norm": True}, {}),
    "layernorm_zero_centered_gamma=true": ({"layernorm_zero_centered_gamma": True}, {}),
    "use_mup=true": ({"use_mup": True}, {}),
    "moe_router_score_function=sqrtsoftplus": ({"moe_router_score_function": "sqrtsoftplus"}, {}),
    "no_rope_freq=4": ({"no_rope_freq": 4}, {}),
    "apply_residual_connection_post_layernorm=true": ({"apply_residual_connection_post_layernorm": True}, {}),
    "swiglu=true": ({}, {"gated": False, "activation": "relu"}),
    "swiglu=false": ({"swiglu": False}, {"gated": False, "activation": "relu"}),
    "swiglu=false ": ({"swiglu": False}, {"gated": True, "activation": "gelu"}),
    "swiglu=false  ": ({"swiglu": False}, {"gated": False, "activation": "gelu_tanh"}),
    "swiglu=false   ": (
        {"swiglu": False, "bias_gelu_fusion": True, "add_bias_linear": True},
        {"gated": False, "activation": "gelu"},
    ),
    "rope_type=yarn": ({"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "yarn"}, LATENT),
    "rope_type=none": ({"multi_latent_attention": True, "qk_layernorm": True, "rope_type": None}, LATENT),
}
# None and False are the absence of a feature.
AS_OURS = [
    ({"rotary_percent": 0.5}, {"position.rotary_fraction": 0.5}),
    (
        {"window_size": (8, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
        {"attention.sliding_window": 9, "attention.sliding_layers": (1,), "attention.sinks": True},
    ),
    ({"window_size": False, "qk_l2_norm": None, "no_rope_freq": False, "quick_geglu": None}, {}),
    ({"swiglu": False, "bias_gelu_fusion": True, "add_bias_linear": False}, {"gated": False, "activation": "gelu"}),
    (
        {"swiglu": False, "bias_gelu_fusion": True, "add_bias_linear": True},
        {"gated": False, "activation": "gelu_tanh"},
    ),
    ({"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"}, LATENT),
]


def result_of_arguments(folder, arguments, keys):
    from pretrain.interchange.megatron import check_arguments

    torch.save({"args": argparse.Namespace(**ARGS | arguments)}, folder / "common.pt")
    return check_arguments(argparse.Namespace(path=folder, objects={}), OURS.with_values(keys))


@pytest.mark.parametrize("word", NOT_OURS)
def test_an_argument_that_changes_the_logits_is_refused(tmp_path, word):
    with pytest.raises(UserError) as error:
        result_of_arguments(tmp_path, *NOT_OURS[word])
    assert f"{word.strip()} " in str(error.value)


def test_arguments_of_a_missing_and_of_a_damaged_file(tmp_path):
    from pretrain.interchange.megatron import check_arguments

    folder = argparse.Namespace(path=tmp_path, objects={})
    with pytest.raises(UserError, match=r"common\.pt is missing"):
        check_arguments(folder, OURS)
    (tmp_path / "common.pt").write_bytes(b"PK no zip")
    with pytest.raises(UserError, match=r"common\.pt is damaged"):
        check_arguments(folder, OURS)
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    assert not check_arguments(folder, OURS)


NOT_MEGATRONS = {
    r"rope_scaling=yarn .*position\.rope_scaling=none": {
        "position.rope_scaling": "yarn",
        "position.rope_factor": 2.0,
        "position.rope_original_length": 8,
    },
    r"attention\.scale=0\.5 .*attention\.scale=none": {"attention.scale": 0.5},
    r"residual_scale=0\.5 .*model\.residual_scale=1\.0": {"residual_scale": 0.5},
}


@pytest.mark.parametrize("words", NOT_MEGATRONS)
def test_a_key_that_megatron_lacks_is_refused(tmp_path, words):
    with pytest.raises(UserError, match=words):
        result_of_arguments(tmp_path, {}, NOT_MEGATRONS[words])


@pytest.mark.parametrize("value", [[0], 10**5000], ids=["a list", "an int"])
def test_a_message_has_the_type_of_a_value_that_may_have_no_end(tmp_path, value):
    if isinstance(value, list):
        for _ in range(45):
            value = [value, value]
    with pytest.raises(UserError, match=f"num_layers=a {type(value).__name__} differs"):
        result_of_arguments(tmp_path, {"num_layers": value}, {})


@pytest.mark.parametrize(("arguments", "keys"), AS_OURS)
def test_an_argument_of_the_same_logits_is_accepted(tmp_path, arguments, keys):
    assert result_of_arguments(tmp_path, arguments, keys)
