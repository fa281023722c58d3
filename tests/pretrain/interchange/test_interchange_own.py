"""The family fmoe: every option of a GPT, loaded, trained and generated from by transformers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import assert_close, relative_error
from forks import only
from forks import values as results_of
from huggingface_folders import engine_logits, random_run, saved_at, weights

sys.path.append(str(Path(__file__).parents[2] / "conformance"))
import exports

from fmoe.errors import UserError
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig, load_recipe
from pretrain.config.load import shipped_recipes
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.cli import export_main
from pretrain.interchange.families import family_for, why_own
from pretrain.interchange.folder import CONFIG, GENERATION_CONFIG

LIMIT = exports.LIMIT
PROMPT, NEW = 6, 8
BASE = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=24,
    sequence_length=exports.LENGTH,
    vocab_size=exports.VOCAB,
    init_std=0.2,
    attention=AttentionConfig(num_heads=4),
    moe=MoEConfig(num_experts=4, top_k=2, gate="naive", eval_capacity_factor=None),
)
YARN = {
    "position.rope_scaling": "yarn",
    "position.rope_factor": 2.0,
    "position.rope_original_length": 8,
    "position.rope_mscale_all_dim": 0.5,
}
LATENT = {
    "attention.kv_lora_rank": 10,
    "attention.qk_head_dim": 8,
    "attention.qk_rope_head_dim": 4,
    "attention.v_head_dim": 6,
}
XL = {"position.encoding": "transformer_xl", "activation": "relu", "tie_embeddings": False}
MODELS = {
    "learned positions, sigmoid in groups, shared experts, dense layer": {
        "position.encoding": "learned_absolute",
        "attention.qk_norm": True,
        "attention.num_query_groups": 2,
        "moe.gate": "sigmoid",
        "moe.gate_options": {"expert_groups": 2, "kept_groups": 1},
        "moe.routed_scale": 2.5,
        "moe.num_shared_experts": 2,
        "moe.layers": (2,),
        "dense_ffn_hidden_size": 40,
        "tie_embeddings": False,
        "moe.eval_capacity_factor": 0.75,
    },
    "latent attention, yarn, compressed queries, gshard, finer experts, further tokens": {
        **LATENT,
        **YARN,
        "attention.q_lora_rank": 14,
        "norm": "rms",
        "activation": "silu",
        "gated": True,
        "moe.gate": "gshard",
        "moe.granularity": 2,
        "moe.top_k": 1,
        "mtp_layers": 1,
        "moe.eval_capacity_factor": 0.5,
        "moe.group_size": 5,
    },
    "experts with biases, other experts than the dense layer": {
        "moe.expert": "geglu",
        "moe.expert_options": {"bias": True},
        "moe.num_shared_experts": 1,
        "activation": "relu",
        "attention.head_dim": 12,
        "moe.gate_options": {"bias": True},
        "moe.every": 2,
        "gated": True,
        "position.rope_theta": 500.0,
        "moe.capacity_factor": None,
    },
    "latent attention, plain queries, layer norm": {**LATENT, "moe.gate": "noisy"},
    "norms of all heads, biases, half a rotation by yarn, gated shared experts, factors": {
        "norm": "rms",
        "attention.qk_norm": True,
        "attention.qk_norm_over": "all",
        "attention.num_query_groups": 2,
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "output_bias": True,
        "position.rotary_fraction": 0.5,
        **YARN,
        "moe.num_shared_experts": 2,
        "moe.shared_ffn_hidden_size": 20,
        "moe.shared_expert_gate": True,
        "attention.scale": 0.2,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_divisor": 2.0,
    },
    "windows, sinks and biases": {
        "attention.num_query_groups": 2,
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.sinks": True,
        "attention.sliding_window": 4,
        "attention.sliding_layers": (1,),
        "attention.sliding_stride": 3,
        "moe.gate": "naive",
        "moe.gate_options": {"bias": True},
        "moe.expert_options": {"bias": True},
        "activation": "swiglu_oai",
        "gated": True,
        "moe.every": 2,
    },
    "dense": {"moe.num_experts": 0, "moe.top_k": 1, "attention.qk_norm": True, "norm": "rms", "vocab_size": 400},
    "dense, windows, sinks and biases": {
        "moe.num_experts": 0,
        "moe.top_k": 1,
        "attention.output_bias": True,
        "attention.sinks": True,
        "attention.sliding_window": 4,
        "attention.sliding_layers": (2,),
        "activation": "swiglu_oai",
        "gated": True,
    },
    "sparsemixer, untied with biases": {
        "moe.gate": "sparsemixer",
        "moe.gate_options": {"margin": 0.5},
        "attention.output_bias": True,
        "output_bias": True,
        "tie_embeddings": False,
    },
    "Transformer-XL": {
        **XL,
        "position.memory_length": 4,
        "attention.num_query_groups": 2,
        "attention.head_dim": 6,
        "attention.qk_norm": True,
        "moe.every": 2,
        "moe.eval_capacity_factor": 0.75,
    },
    "Transformer-XL, dense": {**XL, "position.memory_length": 8, "moe.num_experts": 0, "moe.top_k": 1, "norm": "rms"},
    "Transformer-XL, without memory": {
        **XL,
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.scale": 0.3,
        "moe.capacity_factor": None,
    },
    "expert choice": {"moe.gate": "expert_choice", "moe.capacity_factor": 2.0, "moe.eval_capacity_factor": 2.0},
    **{
        gate: {"moe.gate": gate, "moe.top_k": 1} for gate in ("switch", "swipe", "base", "sinkhorn", "topology", "zero")
    },
}
RECIPES = {
    name: Recipe(
        model=BASE.with_values(values),
        train=TrainConfig(global_batch=1, micro_batch=1, seed=11, precision="fp32"),
    )
    for name, values in MODELS.items()
}


def made(runs):
    """Our logits and greedy tokens of random runs, which are saved; for a process of `forks`."""
    from fmoe.gates import ExpertChoiceRouter, Router
    from pretrain.inference.decoding import GPTDecoder, MemoryDecoder, generate
    from pretrain.inference.sampling import Sampling

    found = []
    for recipe, path in runs:
        batch = exports.batch_of(recipe)
        engine = random_run(path, recipe)
        (model,) = engine.chunks
        logits = engine_logits(engine, batch)
        gates = [module for module in model.modules() if isinstance(module, Router)]
        if any(isinstance(gate, ExpertChoiceRouter) for gate in gates):
            found.append((logits, None))
            continue
        for gate in gates:  # as `load_model(..., drops=False)`
            gate.eval_capacity_factor = None
        greedy = []
        for prompt in batch["tokens"][:2, :PROMPT].tolist():
            # As `fmoe generate` chooses.
            if memory := recipe.model.position.memory_length:
                decoder = MemoryDecoder(model, memory)
            else:
                decoder = GPTDecoder(model, exports.LENGTH, keeps=recipe.model.position.encoding != "transformer_xl")
            steps = generate(
                decoder, prompt, Sampling(temperature=0), max_tokens=NEW, end=-1, vocab_size=recipe.model.vocab_size
            )
            greedy.append([token for (token,) in steps])
        found.append((logits, torch.tensor(greedy)))
    return found


@pytest.fixture(scope="module")
def exported(forks, tmp_path_factory):
    """``exported[name]``: recipe, folder of the run, folder of the export, our logits, our greedy tokens."""
    folder = tmp_path_factory.mktemp("own")
    runs = {name: (recipe, folder / str(number) / "run") for number, (name, recipe) in enumerate(RECIPES.items())}
    results = only(forks.run(1, made, list(runs.values())))
    found = {}
    for (name, (recipe, run)), (logits, greedy) in zip(runs.items(), results, strict=True):
        out = run.with_name("out")
        export_checkpoint(run, out, "fmoe", tokenizer="none")
        found[name] = recipe, run, out, logits, greedy
    return found


def load(folder, **options):
    """The model of a folder, by the module that is installed."""
    import transformers

    import pretrain.interchange.modeling_fmoe  # noqa: F401 - registers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


DROPS = "learned positions, sigmoid in groups, shared experts, dense layer"
FINER = "latent attention, yarn, compressed queries, gshard, finer experts, further tokens"
BIASES = "experts with biases, other experts than the dense layer"
MEMORY, DENSE_MEMORY, NO_MEMORY = "Transformer-XL", "Transformer-XL, dense", "Transformer-XL, without memory"


@pytest.mark.by_default(DROPS, FINER, BIASES, MEMORY, "dense", "expert choice")
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(exported, tmp_path, name):
    recipe, _, out, logits, greedy = exported[name]
    model = load(out)
    assert model.__class__.__module__ == "pretrain.interchange.modeling_fmoe"
    tokens = exports.batch_of(recipe)["tokens"]
    with torch.no_grad():
        assert_close(model(tokens).logits, logits, LIMIT, "logits")
    if greedy is None:
        with pytest.raises(UserError, match="gate=expert_choice"):
            model.generate(tokens[:, :PROMPT], max_new_tokens=1)
    else:
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        found = model.generate(tokens[:2, :PROMPT], **options)[:, PROMPT:]
        assert torch.equal(found, greedy)
        options["use_cache"] = False
        if memory := recipe.model.position.memory_length:
            with pytest.raises(UserError, match=f"use_cache=False .* position.memory_length={memory}"):
                model.generate(tokens[:2, :PROMPT], **options)
        else:
            assert torch.equal(model.generate(tokens[:2, :PROMPT], **options)[:, PROMPT:], greedy)

    back = import_folder(out, tmp_path / "back")
    defaults = {"mtp_layers": 0, "mtp_loss": ModelConfig.mtp_loss}
    assert back.recipe.model == recipe.model.with_values(defaults) and back.family.name == "fmoe"
    export_checkpoint(tmp_path / "back", tmp_path / "again", "fmoe", tokenizer="none")
    assert exports.same_bits(out, tmp_path / "again")
    assert json.loads((out / CONFIG).read_text()) == json.loads((tmp_path / "again" / CONFIG).read_text())
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "modeling_fmoe.py").read_bytes() == (out / "modeling_fmoe.py").read_bytes()
    import_folder(tmp_path / "saved", tmp_path / "third")
    export_checkpoint(tmp_path / "third", tmp_path / "fourth", "fmoe", tokenizer="none")
    assert exports.same_bits(out, tmp_path / "fourth")


def test_an_export_tells_what_it_needs_and_lacks(exported, tmp_path, capsys):
    recipe, run, *_ = exported[FINER]
    assert export_main([str(run), str(tmp_path / "out"), "--tokenizer", "none"]) == 0
    said = capsys.readouterr().out
    assert "FMoEForCausalLM" in said and "trust_remote_code" in said and "model.mtp_layers=1" in said
    assert why_own(recipe.model) in said
    assert "mtp" not in " ".join(weights(tmp_path / "out"))


SPLITS = {
    "EP2": (DROPS, ParallelConfig(expert=2)),
    "TP2": (FINER, ParallelConfig(tensor=2)),
    "PP2, dense Transformer-XL": (DENSE_MEMORY, ParallelConfig(pipeline=2)),
}


@pytest.mark.by_default("TP2")
@pytest.mark.parametrize("split", SPLITS)
def test_a_checkpoint_of_any_split_is_exported_alike(exported, forks, tmp_path, split):
    name, parallel = SPLITS[split]
    _, run, out, *_ = exported[name]
    results_of(forks.run(2, saved_at, run, tmp_path / "saved", parallel, "fp32"))
    export_checkpoint(tmp_path / "saved", tmp_path / "out", "fmoe", tokenizer="none")
    assert exports.same_bits(tmp_path / "out", out)
    assert (tmp_path / "out" / CONFIG).read_text() == (out / CONFIG).read_text()


@pytest.mark.parametrize("name", [DROPS, MEMORY])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_neither_seen_nor_routed(exported, side, name):
    """A sequence has the same logits alone and next to a longer one, with experts that drop tokens."""
    recipe, _, out, *_ = exported[name]
    model = load(out)
    tokens, length = exports.batch_of(recipe)["tokens"][:2], exports.LENGTH - 5
    mask = torch.ones_like(tokens)
    kept = slice(5, None) if side == "left" else slice(0, length)
    mask[1] = 0
    mask[1, kept] = 1
    with torch.no_grad():
        both = model(tokens, attention_mask=mask).logits
        alone = model(tokens[1:, kept]).logits
        whole = model(tokens[:1]).logits
    assert torch.isfinite(both).all()
    assert_close(both[1:, kept], alone, LIMIT, "padded")
    assert_close(both[:1], whole, LIMIT, "not padded")


@pytest.mark.parametrize("name", [DROPS, MEMORY])
def test_generation_of_padded_prompts(exported, name):
    recipe, _, out, _, greedy = exported[name]
    model = load(out)
    prompts = exports.batch_of(recipe)["tokens"][:2, :PROMPT]
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.int64), prompts], 1)
    mask = (torch.arange(PROMPT + 2) >= 2).long().expand(2, -1)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, PROMPT + 2 :], greedy)


def streamed(recipe, path, lengths):
    """Our logits of a text in segments, each of which sees the memory of those before it; for a process of `forks`."""
    from megatron_patch.transformer_xl import StreamMemory

    tokens = exports.batch_of(recipe)["tokens"]
    (model,) = random_run(path, recipe).chunks
    model.eval()
    memory = StreamMemory(model, recipe.model.position.memory_length, streams=1)
    found = []
    with torch.no_grad():
        for segment in tokens.split(lengths, dim=1):
            memory.enter(0)
            positions = torch.arange(segment.shape[1]).expand_as(segment)
            found.append(model(segment, positions, None))
            memory.leave()
    return torch.cat(found, dim=1)


def test_a_forward_pass_with_a_cache_is_a_segment_with_memory(exported, forks, tmp_path):
    """Segments shorter and longer than the memory, of 8 positions."""
    recipe, _, out, whole, _ = exported[DENSE_MEMORY]
    lengths = [3, 2, 9, 1, 1]
    expected = only(forks.run(1, streamed, recipe, tmp_path / "run", lengths))
    model, cache, found = load(out), None, []
    with torch.no_grad():
        for segment in exports.batch_of(recipe)["tokens"].split(lengths, dim=1):
            done = model(segment, past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            found.append(done.logits)
    found = torch.cat(found, dim=1)
    assert_close(found, expected, LIMIT, "logits")
    assert relative_error(found[:, -2:], whole[:, -2:]) > 1e-2  # which see the whole text

    model.train()
    with pytest.raises(UserError, match=r"training with a cache .* position\.memory_length=8"):
        model(segment, past_key_values=cache)
    gap = torch.ones(4, 4)
    gap[2, 1] = 0
    with pytest.raises(UserError, match=r"padding between tokens.* position\.encoding=transformer_xl"):
        model(torch.zeros(4, 4, dtype=torch.int64), attention_mask=gap)


def test_a_cache_is_refused_where_later_tokens_matter(exported):
    model = load(exported[DROPS][2])
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert model(tokens).past_key_values is None
    with pytest.raises(UserError, match=r"eval_capacity_factor=0\.75"):
        model(tokens, use_cache=True)
    with pytest.raises(UserError, match=r"position 16 .* 15"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(UserError, match="attention_mask has shape"):
        model(tokens, attention_mask=torch.ones(1, 3))
    assert load(exported["dense"][2])(tokens).past_key_values.get_seq_length() == 4


@pytest.mark.by_default(BIASES)
@pytest.mark.parametrize("name", [BIASES, NO_MEMORY])
def test_training_has_the_balance_loss_and_learns(exported, name):
    model = load(exported[name][2])
    tokens = exports.batch_of(exported[name][0])["tokens"]
    targets = tokens.clone()
    targets[:, :3] = -100
    plain = model(tokens, labels=targets)
    by_hand = torch.nn.functional.cross_entropy(plain.logits[:, 2:-1].flatten(0, 1), tokens[:, 3:].flatten())
    assert_close(plain.loss, by_hand, 1e-6, "loss")
    assert plain.aux_loss is None
    model.train()
    first = model(tokens, labels=targets)
    assert_close(first.loss - first.aux_loss, by_hand, 1e-6, "loss without the balance losses")
    assert first.aux_loss > 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(tokens, labels=targets).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert loss < 0.5 * first.loss


def test_generation_leaves_out_rows_without_a_token(exported, tiny_corpus, tmp_path):
    export_checkpoint(exported["dense"][1], tmp_path / "out", tokenizer=str(tiny_corpus.tokenizer))
    settings = json.loads((tmp_path / "out" / GENERATION_CONFIG).read_text())
    assert settings["suppress_tokens"] == list(range(384, 400))


GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def loaded(folder):
    """Token ids, modules imported for them, and greedy text, by the code in the folder; for a process of `forks`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = str(folder.parent / "modules")
    ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)("a b c").input_ids
    of_tokenizer = [name for name in sys.modules if "modeling_fmoe" in name]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return ids, of_tokenizer, model.generate(torch.tensor([ids]), **GREEDY)


def test_the_code_of_an_old_export_is_updated(forks, tmp_path, capsys):
    """The tokenizer loads without this code."""
    import tokenizers

    from pretrain.interchange.modeling_fmoe import FMoEConfig, FMoEForCausalLM

    model = FMoEForCausalLM(
        FMoEConfig(model={"num_layers": 2, "hidden_size": 32, "attention.num_heads": 4, "vocab_size": 48})
    )
    out = tmp_path / "out"
    model.eval().save_pretrained(out)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 4, "b": 3, "c": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    code = out / "modeling_fmoe.py"
    current = code.read_bytes()
    code.write_text("raise RuntimeError('old')\n")
    names = sorted(path.name for path in out.iterdir())
    assert export_main(["--update-code", str(out)]) == 0
    assert str(code) in capsys.readouterr().out
    assert code.read_bytes() == current and sorted(path.name for path in out.iterdir()) == names
    ids, of_tokenizer, text = only(forks.run(1, loaded, out))
    assert (ids, of_tokenizer) == ([4, 3, 5], [])
    assert torch.equal(text, model.generate(torch.tensor([ids]), use_cache=False, **GREEDY))


def test_new_models_have_weights_as_training_draws_them():
    from pretrain.interchange.modeling_fmoe import FMoEConfig, FMoEForCausalLM

    values = {"hidden_size": 64, "attention.num_heads": 4, "num_layers": 2, "vocab_size": 128, "init_std": 0.05}
    model = FMoEForCausalLM(FMoEConfig(model=values))
    relative = FMoEForCausalLM(FMoEConfig(model={**values, "position.encoding": "transformer_xl"}))
    biases = [value for name, value in relative.named_parameters() if ".biases." in name]
    assert torch.cat(biases).std().item() == pytest.approx(0.05, rel=0.2) and len(biases) == 4
    stds = {name: value.std().item() for name, value in model.named_parameters() if value.dim() > 1}
    for name, std in stds.items():
        is_output = name.endswith(("linear_proj.weight", "weight_out"))
        assert std == pytest.approx(0.05 / (2 if is_output else 1), rel=0.1), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with pytest.raises(UserError, match=r"moe\.top_k=9"):
        FMoEConfig(model={"moe.top_k": 9})


def test_sixteen_bits(exported, tmp_path, forks):
    """The expert biases of the sigmoid gate stay in float32."""
    recipe = RECIPES[DROPS]
    recipe = replace(recipe, train=replace(recipe.train, precision="bf16"))
    only(forks.run(1, exports.our_logits, [(recipe, tmp_path / "run")]))
    export_checkpoint(tmp_path / "run", tmp_path / "out", tokenizer="none")
    stored = {name: value.dtype for name, value in weights(tmp_path / "out").items()}
    assert {name for name, dtype in stored.items() if dtype != torch.bfloat16} == {
        "decoder.layers.1.mlp.gate.expert_bias_E"
    }
    model = load(tmp_path / "out")
    assert {name: value.dtype for name, value in model.state_dict().items()} == stored
    assert import_folder(tmp_path / "out", tmp_path / "back").recipe.train.precision == "bf16"
    export_checkpoint(tmp_path / "back", tmp_path / "again", tokenizer="none")
    assert exports.same_bits(tmp_path / "out", tmp_path / "again")


def test_what_is_refused(exported, tmp_path):
    for values, message in (
        ({"moe.gate": "mine"}, "moe.gate=mine .* run.imports"),
        ({"moe.expert": "mine"}, "moe.expert=mine .* run.imports"),
        ({"kind": "bert"}, "model.kind=bert"),
    ):
        with pytest.raises(UserError, match=message):
            family_for(BASE.with_values(values), "fmoe")
    source = exported["dense"][2]
    for change, message in (
        ({"model": None}, "model=none must be an object"),
        ({"model": {"moe.gate": "mine"}}, "moe.gate=mine"),
        ({"model": {"attention.num_heads": 0}}, "attention.num_heads=0"),
        (
            {"model": {"moe.num_experts": 4, "moe.gate_options": {"expert_groups": "x"}}},
            "expert_options is invalid",
        ),
        (
            {"model": {"moe.num_experts": 4, "moe.expert_options": {"dropout": "x"}}},
            "expert_options is invalid",
        ),
        ({"model": {"attention.kv_lora_rank": 4}}, "attention.kv_lora_rank=4"),
        ({"vocab_size": 65}, "word_embeddings.weight has shape"),
        ({"quantization_config": {}}, "quantization_config"),
    ):
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((source / CONFIG).read_text())
        change = {"model": config["model"] | change["model"]} if change.get("model") else change
        (folder / CONFIG).write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=message) as raised:
            import_folder(folder, tmp_path / "run")
        assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


def test_without_drops_a_family_of_transformers_holds_it(forks, tmp_path):
    """`--no-drops`: the weights are those of the checkpoint, the logits those without a capacity."""
    values = {"norm": "rms", "activation": "silu", "gated": True}
    recipes = [
        replace(RECIPES["zero"], model=BASE.with_values({**values, "moe.eval_capacity_factor": f}))
        for f in (0.75, None)
    ]
    runs = [tmp_path / "drops", tmp_path / "none"]
    dropping, expected = only(forks.run(1, exports.our_logits, list(zip(recipes, runs, strict=True))))
    assert export_checkpoint(runs[0], tmp_path / "own", tokenizer="none").family.name == "fmoe"
    assert export_main([str(runs[0]), str(tmp_path / "out"), "--no-drops", "--tokenizer", "none"]) == 0
    (found,) = only(forks.run(1, exports.their_logits, [(recipes[0], tmp_path / "out")]))
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["model_type"] == "mixtral"
    assert relative_error(found, expected) < LIMIT < 1e-2 < relative_error(dropping, expected)


SHIPPED = {name: load_recipe(name).model for name in shipped_recipes()}
GPT = [name for name, model in SHIPPED.items() if model.kind == "gpt"]


@pytest.mark.slow
def test_every_gpt_recipe_is_exported(forks, tmp_path):
    """By the code in the folder, which is not registered in the process that loads it."""
    found = exports.table(forks, {name: load_recipe(name) for name in GPT}, tmp_path)
    families = {"mixtral-8x7b": "mixtral", "qwen3-moe-30b-a3b": "qwen3_moe", "quickstart": "mixtral", "gpt-96": "fmoe"}
    assert {name: found[name]["family"] for name in families} == families
    for name, values in found.items():
        assert values["distance"] <= LIMIT and values["back"], (name, values)
