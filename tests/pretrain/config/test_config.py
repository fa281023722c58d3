"""Recipes: read, overridden, checked, written."""

import json
from dataclasses import asdict, replace

import pytest

from fmoe.errors import UserError
from fmoe.gates import build_gate
from pretrain.config import (
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    TrackingConfig,
    TrainConfig,
    load_recipe,
    write_recipe,
)
from pretrain.config.load import RECIPES
from pretrain.start.job import parse

YARN = {
    "rope_scaling": "yarn",
    "rope_factor": 40.0,
    "rope_original_length": 4096,
    "rope_beta_fast": 16.0,
    "rope_beta_slow": 2.0,
    "rope_truncate": False,
    "rope_mscale": 0.707,
    "rope_mscale_all_dim": 0.5,
}
LATENT = {"kv_lora_rank": 20, "q_lora_rank": 24, "qk_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}
SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_divisor": 6.0}
LOCAL = {"attention_sinks": True, "sliding_window": 5, "sliding_layers": (1, 3)}
NOT_T5 = dict.fromkeys(("qkv_bias", "attention_output_bias", "output_bias", "attention_sinks"), False)
NOT_T5 |= {"sliding_window": None, "sliding_layers": ()} | dict.fromkeys(SCALES, 1.0)


def test_every_key_comes_back_from_the_file(tmp_path):
    """No value is the default's."""
    recipe = Recipe(
        run=RunConfig(
            folder='runs/"odd" \\ näme\t\n世界',
            imports=("gates", "a/b c.py"),
            callbacks=("x",),
            callback_options={"x": {"every": 2, "näme": [1.5, "\n", None, True]}},
        ),
        model=ModelConfig(
            kind="t5",
            num_layers=3,
            num_decoder_layers=2,
            moe_every=2,
            hidden_size=48,
            num_heads=4,
            num_query_groups=4,
            head_dim=10,
            qk_norm=True,
            qk_norm_over="all",
            qkv_bias=True,
            attention_output_bias=True,
            output_bias=True,
            **LOCAL,
            **LATENT,
            ffn_hidden_size=100,
            dense_ffn_hidden_size=120,
            sequence_length=64,
            vocab_size=300,
            activation="silu",
            gated=True,
            position="learned_absolute",
            rope_theta=1e6,
            rotary_fraction=0.5,
            **YARN,
            memory_length=7,
            norm="rms",
            norm_eps=1e-6,
            attention_scale=0.5,
            embedding_scale=2.0,
            residual_scale=0.5,
            logit_divisor=4.0,
            dropout=0.1,
            tie_embeddings=False,
            tied_output_bias=False,
            output_scale=True,
            linear_bias=True,
            segment_types=2,
            mtp_layers=2,
            mtp_loss=0.1,
            init="switch",
            init_std=1e-3,
            num_experts=6,
            moe_layers=(1, 3),
            top_k=2,
            expert="swiglu",
            expert_options={"dropout": 0.1},
            granularity=4,
            num_shared_experts=1,
            shared_ffn_hidden_size=200,
            shared_expert_gate=True,
            gate="gshard",
            gate_options={"random_routing": False},
            score="softmax",
            normalize=False,
            routed_scale=2.5,
            bias_step=0.0,
            capacity_factor=None,
            eval_capacity_factor=3.0,
            jitter=0.25,
            group_size=32,
            balance_loss=1e-7,
            balance_scope="data_parallel",
            z_loss=0.0,
            loss_weights={"load": 0.5},
        ),
        data=DataConfig(
            tokenizer="none",
            train=("a", "b c"),
            weights=(0.25, 3.0),
            validation=(),
            document_mask=True,
            bos=True,
            noise_density=0.2,
            mean_span=2.0,
            prefetch=5,
        ),
        parallel=ParallelConfig(
            tensor=2,
            sequence=False,
            context=2,
            pipeline=2,
            virtual_pipeline=2,
            schedule="gpipe",
            expert=3,
            expert_tensor=2,
            data=2,
            recompute="full",
            overlap_gradients=True,
            overlap_parameters=True,
            overlap_shared_experts=True,
            exchange="hierarchical",
            chunks=2,
            max_rows=999,
            shadow=1,
            node_size=3,
            exchange_options={"cost": 1},
            wire="bf16",
        ),
        optimizer=OptimizerConfig(
            name="lamb",
            lr=1e22,
            min_lr=1e-5,
            lr_scaling="sqrt",
            base_batch=4,
            schedule="linear",
            warmup_steps=3,
            warmup_tokens=5_000,
            decay_steps=7,
            beta1=0.8,
            beta2=0.99,
            eps=1e-6,
            momentum=0.8,
            nesterov=False,
            ns_steps=6,
            muon_scale="original",
            trust_coefficient=0.02,
            max_trust=10.0,
            beta2_decay=-0.7,
            update_clip=2.0,
            weight_decay=0.0,
            clip_grad=0.5,
            distributed=True,
            cpu_offload=0.5,
            loss_scale=8.0,
            initial_loss_scale=2.0**60,
            min_loss_scale=2.0**-9,
            loss_scale_window=3,
            hysteresis=2,
        ),
        train=TrainConfig(
            steps=9,
            global_batch=36,
            ramp_batch=12,
            ramp_increment=12,
            ramp_samples=50,
            micro_batch=2,
            seed=2**40,
            precision="fp16",
            validation_every=3,
            validation_sequences=12,
            init_from="runs/x",
        ),
        checkpoint=CheckpointConfig(every=4, keep=0, keep_every=8, asynchronous=False),
        guard=GuardConfig(
            nonfinite="skip",
            max_skips=3,
            spike_sigma=6.5,
            spike_window=32,
            spike_history=16,
            collapse_window=0,
            collapse_cv=1.25,
            collapse_dead=0.5,
            collapse_uniform=1e-3,
            hang_minutes=0.5,
        ),
        tracking=TrackingConfig(
            wandb=False, tensorboard=True, trackio=True, console_every=2, trust_every=3, picture_every=0, project="none"
        ),
    )
    default = asdict(Recipe())
    for section, values in asdict(recipe).items():
        for key, value in values.items():
            assert value != default[section][key], f"{section}.{key} is not tried"
    # What a t5 cannot have, and what excludes one another.
    recipe = replace(
        recipe,
        model=replace(
            recipe.model,
            rope_theta=10000.0,
            rotary_fraction=1.0,
            **{key: getattr(ModelConfig, key) for key in YARN},
            memory_length=0,
            mtp_layers=0,
            mtp_loss=0.3,
            tied_output_bias=True,
            linear_bias=False,
            segment_types=0,
            **dict.fromkeys(LATENT),
            **NOT_T5,
        ),
        data=replace(recipe.data, document_mask=False, bos=False),
        parallel=replace(
            recipe.parallel,
            context=1,
            pipeline=1,
            virtual_pipeline=None,
            schedule="1f1b",
            expert=6,
            expert_tensor=1,
        ),
        optimizer=replace(recipe.optimizer, loss_scale=None, cpu_offload=0.0),
    )
    others = (
        Recipe(),
        Recipe(model=ModelConfig(kind="t5", tied_output_bias=False)),
        Recipe(model=ModelConfig(kind="bert", num_experts=0, linear_bias=True, segment_types=2)),
        Recipe(
            train=TrainConfig(precision="fp16"),
            optimizer=OptimizerConfig(loss_scale=2.0**-3, cpu_offload=0.25, distributed=True),
        ),
        Recipe(
            data=DataConfig(document_mask=True),
            model=ModelConfig(
                rope_theta=1e6, num_query_groups=2, qkv_bias=True, rotary_fraction=0.5, **SCALES, **LOCAL
            ),
        ),
        Recipe(model=ModelConfig(attention_output_bias=True, output_bias=True)),
        Recipe(model=ModelConfig(**LATENT, **YARN)),
        Recipe(parallel=ParallelConfig(pipeline=2, virtual_pipeline=2)),
        Recipe(parallel=ParallelConfig(tensor=2, pipeline=2, schedule="gpipe", expert_tensor=2, sequence=False)),
    )
    for number, written in enumerate((recipe, *others)):
        written.check()
        path = tmp_path / f"{number}.toml"
        write_recipe(written, path)
        assert load_recipe(str(path)) == written
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"{n}.toml" for n in range(len(others) + 1)]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_by_name(path, tmp_path):
    recipe = load_recipe(path.stem)
    write_recipe(recipe, tmp_path / "again.toml")
    assert load_recipe(str(tmp_path / "again.toml")) == recipe


def test_quickstart_is_what_the_readme_promises():
    recipe = load_recipe("quickstart")
    assert (recipe.parallel.expert, recipe.parallel.world_size, recipe.model.num_experts) == (2, 2, 16)
    assert recipe.model.layers_with_experts == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        (["--model.num-experts", "32"], "model.num_experts", 32),
        (["--model.num_experts", "32"], "model.num_experts", 32),
        (["--model.num-experts=32"], "model.num_experts", 32),
        (["--model.capacity-factor", "1.5"], "model.capacity_factor", 1.5),
        (["--model.moe-layers", "1", "3"], "model.moe_layers", (1, 3)),
        (["--model.group-size", "64"], "model.group_size", 64),
        (["--model.normalize", "False"], "model.normalize", False),
        (["--model.num-query-groups", "3"], "model.num_query_groups", 3),
        (["--model.qk-norm"], "model.qk_norm", True),
        (["--data.train", "a", "b"], "data.train", ("a", "b")),
        (["--optimizer.distributed"], "optimizer.distributed", True),
        (["--tracking.no-wandb"], "tracking.wandb", False),
        (["--tracking.no_wandb"], "tracking.wandb", False),
        (["--tracking.wandb=false"], "tracking.wandb", False),
        (["--tracking.wandb", "false"], "tracking.wandb", False),
        (["--tracking.wandb", "False"], "tracking.wandb", False),
        (["--optimizer.distributed", "true"], "optimizer.distributed", True),
        (["--optimizer.distributed=True"], "optimizer.distributed", True),
        (["--model.no-tie-embeddings"], "model.tie_embeddings", False),
        (["--model.normalize=false"], "model.normalize", False),
        (["--model.no-normalize"], "model.normalize", False),
        (["--model.normalize", "none", "--model.normalize", "true"], "model.normalize", True),
        (["--train.init-from=a=b --c"], "train.init_from", "a=b --c"),
        (["--data.tokenizer="], "data.tokenizer", ""),
        (["--model.moe-layers=3"], "model.moe_layers", (3,)),
        (["--data.weights", "0.5"], "data.weights", (0.5,)),
        (["--data.validation"], "data.validation", ()),
        (["--train.steps", "50", "--train.steps", "60"], "train.steps", 60),
        (["--train.precision", "bf16"], "train.precision", "bf16"),
        (["--optimizer.lr", "1e-4", "--optimizer.min-lr", "0"], "optimizer.lr", 1e-4),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_options_override_the_file(options, key, value):
    recipe = load_recipe("quickstart", options)
    section, name = key.split(".")
    assert getattr(getattr(recipe, section), name) == value
    base = load_recipe("quickstart")
    changed = [f"{s}.{k}" for s, values in asdict(recipe).items() for k, v in values.items() if v != asdict(base)[s][k]]
    assert set(changed) - {"optimizer.min_lr"} == {key}


@pytest.mark.parametrize("word", ["none", "None"])
def test_none_is_an_option(word):
    assert load_recipe("t5").model.capacity_factor is not None
    assert load_recipe("t5", ["--model.capacity-factor", word]).model.capacity_factor is None


@pytest.mark.parametrize(
    ("section", "key", "value", "parts"),
    [
        ("model", "num_layers", "four", ["model.num_layers='four'", "int"]),
        ("model", "num_layers", 4.0, ["model.num_layers=4.0", "int"]),
        ("model", "num_layers", True, ["model.num_layers=True", "int"]),
        ("model", "gated", 1, ["model.gated=1", "bool"]),
        ("model", "activation", "gulu", ["model.activation='gulu'", "gelu", "relu", "silu"]),
        ("model", "moe_layers", 3, ["model.moe_layers=3", "list"]),
        ("model", "moe_layers", ["a"], ["model.moe_layers='a'", "int"]),
        ("model", "capacity_factor", "much", ["model.capacity_factor='much'", "float"]),
        ("data", "train", "prefix", ["data.train='prefix'", "list"]),
        ("model", "num_layers", 0, ["model.num_layers=0"]),
        ("model", "num_layers", -1, ["model.num_layers=-1"]),
        ("model", "moe_layers", [5], ["model.moe_layers", "5", "model.num_layers=4"]),
        ("model", "num_heads", 5, ["model.num_heads=5", "model.hidden_size=192"]),
        ("model", "num_heads", 64, ["model.num_heads=64", "model.hidden_size=192", "model.position=rope"]),
        ("model", "num_query_groups", 4, ["model.num_query_groups=4", "model.num_heads=6"]),
        ("model", "num_query_groups", 0, ["model.num_query_groups=0"]),
        ("model", "head_dim", 33, ["model.head_dim=33", "model.position=rope"]),
        ("model", "rope_theta", 0.0, ["model.rope_theta=0.0"]),
        ("model", "norm_eps", float("nan"), ["model.norm_eps=nan"]),
        ("model", "norm", "batch", ["model.norm='batch'", "layer", "rms"]),
        ("model", "dense_ffn_hidden_size", 512, ["model.dense_ffn_hidden_size=512", "without experts"]),
        ("model", "num_shared_experts", -1, ["model.num_shared_experts=-1"]),
        ("model", "shared_ffn_hidden_size", 0, ["model.shared_ffn_hidden_size=0"]),
        ("model", "routed_scale", -1.0, ["model.routed_scale=-1.0"]),
        ("model", "bias_step", -1.0, ["model.bias_step=-1.0"]),
        ("model", "score", "tanh", ["model.score='tanh'", "softmax", "sigmoid"]),
        ("model", "top_k", 17, ["model.top_k=17", "model.num_experts=16"]),
        ("model", "num_experts", 0, ["parallel.expert=2", "model.num_experts"]),
        ("model", "capacity_factor", 0.0, ["model.capacity_factor=0"]),
        ("model", "capacity_factor", float("nan"), ["model.capacity_factor=nan"]),
        ("model", "jitter", 1.0, ["model.jitter=1.0"]),
        ("model", "dropout", 1.0, ["model.dropout=1.0"]),
        ("parallel", "expert", 3, ["parallel.expert=3", "model.num_experts=16"]),
        ("parallel", "data", 3, ["parallel.data", "48", "train.global_batch=16"]),
        ("train", "micro_batch", 3, ["train.micro_batch", "6", "train.global_batch=16"]),
        ("train", "validation_sequences", 17, ["train.micro_batch", "train.validation_sequences=17"]),
        ("train", "steps", 30, ["optimizer.warmup_steps=30", "train.steps=30"]),
        ("optimizer", "decay_steps", 20, ["optimizer.warmup_steps=30", "optimizer.decay_steps=20"]),
        ("optimizer", "lr", 0.0, ["optimizer.lr=0"]),
        ("optimizer", "lr", float("nan"), ["optimizer.lr=nan"]),
        ("optimizer", "min_lr", 1.0, ["optimizer.min_lr=1.0", "optimizer.lr=0.002"]),
        ("optimizer", "min_lr", float("nan"), ["optimizer.min_lr=nan"]),
        ("optimizer", "beta1", 1.0, ["optimizer.beta1=1.0"]),
        ("optimizer", "clip_grad", -1.0, ["optimizer.clip_grad=-1.0"]),
        ("optimizer", "clip_grad", float("nan"), ["optimizer.clip_grad=nan"]),
        ("data", "train", [], ["data.train"]),
        ("checkpoint", "keep", -1, ["checkpoint.keep=-1"]),
        ("train", "seed", -1, ["train.seed=-1"]),
        ("model", "segment_types", -1, ["model.segment_types=-1", "at least 0"]),
        ("guard", "spike_sigma", float("-inf"), ["guard.spike_sigma=-inf", "at least 0"]),
    ],
    ids=lambda x: repr(x) if not isinstance(x, list) else "",
)
def test_a_value_that_cannot_be_is_named_with_its_limit(tmp_path, section, key, value, parts):
    base = asdict(load_recipe("quickstart"))
    base[section][key] = value
    path = tmp_path / "wrong.toml"
    toml = {float: repr, bool: lambda v: str(v).lower()}
    lines = []
    for name, values in base.items():
        lines.append(f"[{name}]")
        for k, v in values.items():
            v = "none" if v is None else list(v) if isinstance(v, tuple) else v
            lines.append(f"{k} = {toml.get(type(v), json.dumps)(v)}")
    path.write_text("\n".join(lines))
    with pytest.raises(UserError) as error:
        load_recipe(str(path))
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"kind": "t5", "num_query_groups": 2}, ["model.num_query_groups=2", "model.kind=t5", "model.num_heads=6"]),
        ({"position": "learned_absolute", "rotary_fraction": 0.5}, ["model.rotary_fraction=0.5", "learned_absolute"]),
        ({"rotary_fraction": 0.0}, ["model.rotary_fraction=0.0", "(0, 1]"]),
        ({"rotary_fraction": 1.5}, ["model.rotary_fraction=1.5", "(0, 1]"]),
        ({"rotary_fraction": 0.1, "head_dim": 8}, ["model.rotary_fraction=0.1", "8 elements"]),
        ({"rotary_fraction": 0.5, "head_dim": 6}, ["model.rotary_fraction=0.5", "even", "6 elements"]),
        ({"position": "learned_absolute", "rope_theta": 1e6}, ["model.rope_theta=1000000.0", "learned_absolute"]),
        ({"num_experts": 0, "num_shared_experts": 1}, ["model.num_shared_experts=1", "model.num_experts"]),
        ({"shared_ffn_hidden_size": 8}, ["model.shared_ffn_hidden_size=8", "model.num_shared_experts"]),
        ({"shared_expert_gate": True}, ["model.shared_expert_gate=true", "model.num_shared_experts"]),
        ({"qk_norm_over": "all", "norm": "rms"}, ["model.qk_norm_over=all", "model.qk_norm=true"]),
        ({"qk_norm_over": "all", "qk_norm": True}, ["model.qk_norm_over=all", "model.norm=rms", "layer"]),
        ({"attention_scale": 0.0}, ["model.attention_scale=0.0"]),
        ({"attention_scale": 1.0, **LATENT}, ["model.attention_scale=1.0", "model.kv_lora_rank=20"]),
        ({"embedding_scale": -1.0}, ["model.embedding_scale=-1.0"]),
        ({"residual_scale": 0.5, "kind": "bert"}, ["model.residual_scale=0.5", "model.kind=gpt", "bert"]),
        ({"logit_divisor": 2.0, "kind": "t5"}, ["model.logit_divisor=2.0", "model.kind=gpt", "t5"]),
        ({"kind": "t5", "qkv_bias": True}, ["model.qkv_bias=true", "model.kind=t5"]),
        ({"kind": "t5", "attention_sinks": True}, ["model.attention_sinks=true", "model.kind=gpt", "t5"]),
        ({"kind": "bert", "sliding_window": 4}, ["model.sliding_window=4", "model.kind=gpt", "bert"]),
        ({"attention_sinks": True, **LATENT}, ["model.attention_sinks=true", "model.kv_lora_rank=20"]),
        ({"sliding_window": 4, "position": "transformer_xl"}, ["model.sliding_window=4", "transformer_xl"]),
        ({"sliding_layers": (1,)}, ["model.sliding_layers=(1,)", "model.sliding_window"]),
        ({"sliding_window": 0}, ["model.sliding_window=0", "at least 1"]),
        ({"sliding_window": 4, "sliding_layers": (5,)}, ["model.sliding_layers has layer 5", "model.num_layers=4"]),
        ({"sliding_window": 4, "sliding_layers": (2, 2)}, ["model.sliding_layers", "2 twice"]),
        ({"sliding_window": 4, "mtp_layers": 1}, ["model.sliding_window=4", "model.mtp_layers=1"]),
        ({"activation": "swiglu_oai"}, ["model.activation=swiglu_oai", "model.gated=true"]),
        (
            {"kind": "bert", "attention_output_bias": True},
            ["model.attention_output_bias=true", "model.kind=gpt", "bert"],
        ),
        ({"attention_output_bias": True, **LATENT}, ["model.attention_output_bias=true", "model.kv_lora_rank=20"]),
        ({"kind": "t5", "output_bias": True}, ["model.output_bias=true", "model.kind=gpt", "t5"]),
        ({"mtp_loss": 0.1}, ["model.mtp_loss=0.1", "model.mtp_layers"]),
        ({"mtp_layers": 1, "mtp_loss": 0.0}, ["model.mtp_loss=0.0", "model.mtp_layers=0"]),
        ({"mtp_layers": -1}, ["model.mtp_layers=-1"]),
        ({"mtp_layers": 1, "kind": "t5"}, ["model.mtp_layers=1", "model.kind=gpt", "t5"]),
        ({"mtp_layers": 1, "kind": "bert"}, ["model.mtp_layers=1", "model.kind=gpt", "bert"]),
        ({"mtp_layers": 8, "sequence_length": 8}, ["model.mtp_layers=8", "model.sequence_length=8"]),
        ({"mtp_layers": 1, "moe_layers": (5,)}, ["model.moe_layers", "5", "model.num_layers=4"]),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_values_of_the_model_that_exclude_each_other(values, parts):
    with pytest.raises(UserError) as error:
        Recipe(model=ModelConfig(**values)).check()
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"data": DataConfig(document_mask=True)}, ["data.document_mask=true"]),
        ({"parallel": ParallelConfig(context=2)}, ["parallel.context=2"]),
        (
            {
                "parallel": ParallelConfig(pipeline=2),
                "model": ModelConfig(mtp_layers=1, position="learned_absolute"),
            },
            ["parallel.pipeline=2", "model.position=learned_absolute"],
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_multi_token_prediction_excludes(sections, parts):
    with pytest.raises(UserError) as error:
        Recipe(**{"model": ModelConfig(mtp_layers=1)} | sections).check()
    assert all(part in str(error.value) for part in ("model.mtp_layers=1", *parts)), str(error.value)


def test_layers_of_multi_token_prediction_are_of_the_last_layers_kind():
    assert ModelConfig(mtp_layers=2).layers_with_experts == (1, 2, 3, 4, 5, 6)
    assert ModelConfig(mtp_layers=2, moe_every=4).layers_with_experts == (4, 5, 6)
    assert ModelConfig(mtp_layers=2, moe_every=3).layers_with_experts == (3,)
    assert ModelConfig(mtp_layers=2, moe_layers=(1, 4)).layers_with_experts == (1, 4, 5, 6)


@pytest.mark.parametrize(
    ("gate", "key", "value", "of"),
    [
        ("switch", "routed_scale", 2.5, "naive, sigmoid"),
        ("gshard", "normalize", False, "naive, sigmoid"),
        ("naive", "bias_step", 0.01, "sigmoid"),
        ("hash", "score", "softmax", "naive, sigmoid"),
    ],
)
def test_an_option_that_a_gate_has_not_is_said(gate, key, value, of):
    from pretrain.engine.model import gate_options

    model = ModelConfig(gate=gate, **{key: value})
    with pytest.raises(UserError) as error:
        gate_options(model)
    assert all(part in str(error.value) for part in (f"model.{key}={value}", f"model.gate={gate}", of))
    assert key not in gate_options(replace(model, **{key: getattr(ModelConfig, key)}))


def test_a_gate_gets_its_options():
    from pretrain.engine.model import gate_options

    model = ModelConfig(gate="sigmoid", bias_step=0.0, normalize=False, routed_scale=2.5, score="softmax")
    gate = build_gate("sigmoid", 8, 4, 2, **gate_options(model))
    assert (gate.bias_step, gate.normalize, gate.routed_scale, gate.score) == (0.0, False, 2.5, "softmax")
    assert "jitter" in gate_options(ModelConfig(gate="switch")) and "jitter" not in gate_options(model)


def test_a_recipe_that_cannot_be_read(tmp_path):
    for name, content, parts in (
        ("syntax", b"[model\nnum_layers = 1", ["cannot be read", "line 1"]),
        ("latin", b'[run]\nfolder = "\xe9"', ["cannot be read"]),
        ("digits", b"[train]\nsteps = " + b"9" * 5000, ["cannot be read"]),
        ("brackets", b"a = " + b"[" * 5000, ["cannot be read"]),
        ("table", b"model = 3", ["model=3", "section"]),
        ("typo", b"[modell]\nnum_layers = 3", ["unknown key modell", "did you mean model"]),
        ("no section", b"top_k = 3", ["unknown key top_k", "did you mean model.top_k?"]),
        ("no such key", b"[model]\nxyzzy = 3", ["unknown key model.xyzzy", "the sections are run, model, data"]),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            load_recipe(str(path))
        assert all(part in str(error.value) for part in parts), str(error.value)
    with pytest.raises(UserError, match=r"recipe 'quickstrat' is neither a file nor .*quickstart"):
        load_recipe("quickstrat")
    with pytest.raises(UserError, match=r"did you mean 'quickstart'"):
        load_recipe("quickstrat")


def test_a_misspelled_file_is_answered_with_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("tiny.toml", "sub/large.toml"):
        (tmp_path / name).touch()
    for name, near in (("tinyy.toml", "tiny.toml"), ("tiny", "tiny.toml"), ("sub/larg.toml", "sub/large.toml")):
        with pytest.raises(UserError) as error:
            load_recipe(name)
        assert f"did you mean '{near}'?" in str(error.value) and "mixtral" not in str(error.value)


@pytest.mark.parametrize("name", ["parallel.device", "model.backend", "run.gpus"])
def test_keys_of_other_programs_get_a_word_on_devices(name, tmp_path):
    section, key = name.split(".")
    (tmp_path / "a.toml").write_text(f'[{section}]\n{key} = "cpu"')
    for call in (
        lambda: load_recipe(str(tmp_path / "a.toml")),
        lambda: load_recipe("quickstart", [f"--{name}", "cpu"]),
        lambda: parse(["quickstart", f"--{key}", "cpu"], "fmoe train"),
    ):
        with pytest.raises(UserError, match=rf"{key}; .*CUDA_VISIBLE_DEVICES"):
            call()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--train.steps", "many"], "train.steps=many must be an integer"),
        (["--model.top-k=1.5"], "model.top_k=1.5 must be an integer"),
        (["--model.top-k", "-1"], "model.top_k=-1 is not positive"),
        (["--tracking.wandb=maybe"], "tracking.wandb=maybe must be true or false"),
        (["--model.gate-options.bias", "inf"], "model.gate_options.bias=inf is not a finite number"),
        (["--model.normalize=maybe"], "model.normalize=maybe must be true, false or none"),
        (["--tracking.no-wandb=true"], "--tracking.no-wandb=true: a negated bool takes no value"),
        (["--train.no-steps"], "--train.no-steps: train.steps is not a bool"),
        (["--train.steps", "--train.seed", "3"], "--train.steps needs a value"),
        (["--train.precision", "fp8"], "train.precision='fp8' must be one of fp32, bf16, fp16"),
        (["--model.score", "tanh"], "model.score='tanh' must be one of softmax, sigmoid or none"),
        (["--model.head-dim", "wide"], "model.head_dim=wide must be an integer or none"),
        (
            ["--model.kind", "t5", "--model.sequence-length", "2"],
            "model.sequence_length=2 is too short, or data.noise_density=0.15 too high, with data.mean_span=3.0: the "
            "inputs need at least one kept token before each removed span, and a sentinel in its place",
        ),
        (["--train.stepps", "3"], "unknown key train.stepps; did you mean train.steps? Or train.seed?"),
        (["more"], "unexpected argument 'more': options have the form --section.key value"),
        (["--optimizer.lr", "fast"], "optimizer.lr=fast must be a number"),
        (
            ["--train.steps", "20"],
            "optimizer.warmup_steps=30 must be less than train.steps=20: shorten the warmup",
        ),
    ],
)
def test_values_of_options_that_cannot_be(options, says):
    with pytest.raises(UserError) as error:
        load_recipe("quickstart", options)
    assert str(error.value) == says
