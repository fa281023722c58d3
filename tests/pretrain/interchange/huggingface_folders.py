"""Tiny models of Hugging Face with random weights, in folders, and what our model makes of a checkpoint. No test."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from engines import engine_of
from safetensors.torch import load_file
from tiny_families import CASES, LENGTH, VOCAB
from torch import Tensor, nn

from pretrain.checkpoint import open_checkpoint
from pretrain.config import DataConfig, ModelConfig, ParallelConfig, Recipe, TrainConfig
from pretrain.interchange.outgoing import recipe_of
from pretrain.interchange.published import PUBLISHED

CLASSES = {
    "T5Config": "T5ForConditionalGeneration",
    "SwitchTransformersConfig": "SwitchTransformersForConditionalGeneration",
    "MegatronBertConfig": "MegatronBertForMaskedLM",
}


def save_random(folder: Path, case: str, **values) -> None:
    """The case's model, norms and biases random too, in a folder; ``values`` are further ones of its configuration."""
    import transformers

    kind, config, dtype, options = CASES[case]
    config = {**config, **values}
    is_untied = config.pop("untied", False)
    torch.manual_seed(len(case))
    config = getattr(transformers, kind)(**config)
    build = getattr(transformers, CLASSES[kind]) if kind in CLASSES else transformers.AutoModelForCausalLM.from_config
    model = build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif parameter.dim() == 1 and "sinks" not in name:
                parameter.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name:
                parameter.normal_()
    if is_untied:
        model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, config.d_model) / 5)
        model.config.scale_decoder_outputs = False
    model.to(dtype)
    for name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):  # float32 in models of 16 bits, too
            buffer.data = torch.randn_like(buffer, dtype=torch.float32) / 4
    model.save_pretrained(folder, **options)


def load_theirs(folder: Path):
    """transformers' model of a folder, in float32."""
    import transformers

    (architecture,) = transformers.AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)


def logits(folder: Path, tokens: Tensor, decoder_tokens: Tensor | None = None) -> Tensor:
    """Of transformers' model, in float32."""
    options = {} if decoder_tokens is None else {"decoder_input_ids": decoder_tokens}
    with torch.no_grad():
        return load_theirs(folder)(input_ids=tokens, **options).logits


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's files."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def our_engine(path: Path, parallel: ParallelConfig | None = None, precision: str = "fp32"):
    """An engine with a checkpoint's weights, at a split and in a precision of its own."""
    from pretrain.engine import state

    checkpoint = open_checkpoint(path)
    recipe = recipe_of(checkpoint)
    train = TrainConfig(precision=precision, global_batch=8, micro_batch=1, seed=recipe.train.seed + 1)
    recipe = replace(recipe, parallel=parallel or ParallelConfig(), train=train)
    engine = engine_of(recipe)
    state.load_weights(engine, checkpoint)
    return engine


def our_logits(path: Path, tokens: Tensor, decoder_tokens: Tensor | None = None) -> Tensor:
    """Of our model with a checkpoint's weights, in float32: [b, s, V]; for a process of `forks`."""
    return engine_logits(our_engine(path), {"tokens": tokens, "decoder_tokens": decoder_tokens})


def engine_logits(engine, batch: dict) -> Tensor:
    """Of a whole model, in evaluation."""
    from pretrain.models import kind_of

    with torch.no_grad():
        return kind_of(engine.recipe).forward(engine.chunks[0].eval(), batch)


def random_run(folder: Path, model: ModelConfig | Recipe):
    """Save a random model of ours, norms, biases and routers of its choice random too, and return its engine; for a
    process of `forks`."""
    from megatron.core import parallel_state

    from megatron_patch import cpu
    from pretrain.checkpoint import save
    from pretrain.engine import Engine, init_parallel, locations, state
    from pretrain.start.process import Processes

    cpu.install()
    recipe = model
    if isinstance(model, ModelConfig):
        recipe = Recipe(model=model, data=DataConfig(tokenizer=""), train=TrainConfig(global_batch=1, micro_batch=1))
    recipe.check()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    if not parallel_state.model_parallel_is_initialized():
        init_parallel(recipe)
    engine = Engine(recipe, processes)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in locations.named_tensors(engine.chunks):
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            elif "norm" in name or name.endswith(("bias", "bias_E", "bias_in", "bias_out", "softmax_offset")):
                tensor.uniform_(-0.3, 0.3)
            elif ".gate." in name:
                tensor.normal_(0, 0.5)
    pieces = (piece for piece in state.pieces(engine) if piece.name.startswith("model/"))
    save(folder, 1, pieces, {"recipe": recipe.values(), "weights_only": True}, state.rank_state())
    return engine


def saved_random(folder: Path, model: ModelConfig, tokens: Tensor) -> Tensor:
    """Save a random model of ours, and return its logits, in float32: [b, s, V]; for a process of `forks`."""
    return engine_logits(random_run(folder, model), {"tokens": tokens})


def saved_at(path: Path, folder: Path, parallel: ParallelConfig, precision: str) -> None:
    """Loads a checkpoint at a split and saves it there; for processes of `forks`."""
    from pretrain.checkpoint import save
    from pretrain.engine import state

    engine = our_engine(path, parallel, precision)
    run_state = {"recipe": engine.recipe.values(), "optimizer": state.optimizer_state(engine)}
    run_state["schedule"] = state.schedule_state(engine)
    run_state["data"] = {"next_sample": 0, "samples_per_epoch": 1, "corpora": []}
    run_state[PUBLISHED] = open_checkpoint(path).state.get(PUBLISHED, {})  # as `Trainer` does
    save(folder, 1, state.pieces(engine), run_state, state.rank_state())


def some_tokens() -> Tensor:
    return torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(7))


def inputs_of(case: str) -> tuple[Tensor, ...]:
    """Tokens, and for an encoder-decoder also tokens of the decoder."""
    is_pair = CASES[case][0] in ("T5Config", "SwitchTransformersConfig")
    return (some_tokens(), some_tokens()[:, :11].flip(1)) if is_pair else (some_tokens(),)
