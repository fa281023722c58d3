"""Rules between the keys of a recipe: what a key needs or excludes, and sizes that must divide or bound each other.

The table `RULES` has the rules that concern a few keys. Functions below it check what needs arithmetic.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fmoe.errors import UserError
from pretrain.config.keys import shown
from pretrain.data.blend import whole_weights

MAX_RAMP = 100_000  # upper bound on the batch sizes of a ramp, which are kept in a list


class Rule(NamedTuple):
    """A rule between recipe keys.

    A condition is ``key=value``, ``key>number``, or a key alone: its value differs from its default or, for a
    property of a section, is true.

    Attributes:
        subject: for needs and excludes, a condition; otherwise keys joined by x, /, + and -.
        verb: needs, excludes, divides, equals, at most, less than.
        object: as ``subject``.
        why: reason or remedy for the message.
        when: conditions, joined by "and", without which the rule does not apply.
    """

    subject: str
    verb: str
    object: str
    why: str = ""
    when: str = ""


_TABLE = """
# Attention
attention.q_lora_rank, attention.qk_head_dim, attention.qk_rope_head_dim, attention.v_head_dim needs
    attention.kv_lora_rank
attention.kv_lora_rank needs attention.qk_head_dim, attention.qk_rope_head_dim, attention.v_head_dim, model.kind=gpt,
    position.encoding=rope
attention.num_query_groups, attention.head_dim, attention.scale excludes attention.kv_lora_rank: leave it out
attention.qk_norm excludes attention.kv_lora_rank: it normalizes the compressed vectors
attention.qkv_bias, attention.output_bias excludes attention.kv_lora_rank: multi-latent attention has no biases
attention.num_heads divides model.hidden_size if attention.head_dim=none and attention.kv_lora_rank=none
attention.num_query_groups divides attention.num_heads if attention.num_query_groups
attention.num_query_groups equals attention.num_heads if model.kind=t5 and attention.num_query_groups: a t5's cross
    attention does not support groups
attention.qk_norm_over needs attention.qk_norm=true, model.norm=rms
attention.qkv_bias excludes model.kind=t5: its cross attention has no bias
attention.qkv_bias excludes model.linear_bias: which includes it
attention.output_bias, attention.sinks, attention.sliding_window needs model.kind=gpt
attention.sinks, attention.sliding_window excludes attention.kv_lora_rank, position.encoding=transformer_xl
attention.sliding_window excludes model.mtp_layers: use model.mtp_layers=0
attention.sliding_layers, attention.sliding_stride needs attention.sliding_window

# Positions
position.encoding=relative needs model.kind=t5
position.encoding=transformer_xl needs model.kind=gpt
position.memory_length needs position.encoding=transformer_xl
position.rope_theta, position.rotary_fraction needs position.encoding=rope
position.rotary_fraction excludes attention.kv_lora_rank: set attention.qk_rope_head_dim instead
position.rope_factor, position.rope_original_length, position.rope_beta_fast, position.rope_beta_slow,
    position.rope_truncate, position.rope_mscale, position.rope_mscale_all_dim needs position.rope_scaling=yarn
position.rope_scaling needs model.kind=gpt, position.encoding=rope, position.rope_original_length, position.rope_theta>1
position.rope_beta_slow at most position.rope_beta_fast
position.rope_mscale needs position.rope_mscale_all_dim>0

# Kinds of models, embeddings, output
model.num_decoder_layers, model.tied_output_bias, model.output_scale needs model.kind=t5
model.linear_bias, model.segment_types needs model.kind=bert
model.linear_bias excludes moe.num_experts>0: for biases in experts, set moe.expert_options.bias
model.output_bias, model.embedding_scale, model.residual_scale, model.logit_divisor, model.mtp_layers needs
    model.kind=gpt
model.tied_output_bias needs model.tie_embeddings=true: otherwise there is no output bias
model.activation=swiglu_oai needs model.gated=true: it multiplies gates and values
model.mtp_loss needs model.mtp_layers>0
model.mtp_layers excludes position.encoding=transformer_xl: use model.mtp_layers=0
model.mtp_layers less than model.sequence_length: no token would be left to predict
model.kind=bert needs model.sequence_length>2: CLS, text and SEP
model.config needs model.kind=classifier
model.kind=classifier needs model.config, data.samples, data.tokenizer=
model.kind=classifier excludes model.hidden_size, model.ffn_hidden_size, model.dense_ffn_hidden_size, model.activation,
    model.gated, model.norm, model.norm_eps, model.dropout, model.tie_embeddings, model.init, model.init_std,
    attention.num_heads, attention.num_query_groups, attention.head_dim, attention.qk_norm, attention.qkv_bias,
    attention.scale, position.encoding, position.rope_theta, position.rotary_fraction: set the keys of model.config
model.kind=classifier excludes moe.expert, moe.expert_options, moe.granularity, moe.num_shared_experts: experts are
    those of fmoe.fmoefy, of the sizes of the blocks
model.kind=classifier excludes parallel.tensor>1, parallel.pipeline>1, parallel.context>1, parallel.shard=gradients,
    parallel.shard=parameters, parallel.recompute=selective, parallel.recompute=full: use parallel.expert and data
evaluation.tasks excludes model.kind=classifier: the harness's requests are those of a GPT
evaluation.tasks excludes data.tokenizer=: the harness's requests are text

# Experts
moe.top_k at most moe.num_experts if moe.num_experts>0
moe.granularity divides model.ffn_hidden_size if moe.num_experts>0
moe.num_shared_experts needs moe.num_experts>0
moe.shared_ffn_hidden_size, moe.shared_expert_gate needs moe.num_shared_experts>0

# Data and batches
data.document_mask, data.chat, data.bos excludes model.kind=t5, model.kind=bert: use model.kind=gpt
data.document_mask, data.chat excludes model.mtp_layers: they would predict tokens of the next document
data.samples_options needs data.samples
data.samples excludes data.weights, data.document_mask, data.bos, data.chat, position.memory_length: the source makes
    whole samples; leave it out
data.noise_density, data.mean_span excludes data.samples: the source makes whole samples; leave it out
data.document_mask, data.chat, data.weights, train.ramp_batch excludes position.memory_length: leave it out
train.ramp_batch needs train.ramp_increment
train.ramp_increment needs train.ramp_samples
train.ramp_samples needs train.ramp_batch
train.ramp_batch less than train.global_batch if train.ramp_batch
train.ramp_increment divides train.global_batch - train.ramp_batch if train.ramp_batch
train.global_batch divides train.validation_sequences if position.memory_length and data.has_validation

# The split over ranks
parallel.tensor x parallel.context divides attention.num_heads
parallel.tensor divides attention.num_query_groups if attention.num_query_groups
parallel.tensor divides attention.kv_lora_rank + attention.qk_rope_head_dim if attention.kv_lora_rank
parallel.tensor divides attention.q_lora_rank if attention.q_lora_rank
parallel.tensor divides model.vocab_size
parallel.tensor x parallel.context divides model.sequence_length if parallel.is_sequence_parallel
parallel.tensor divides position.memory_length if parallel.is_sequence_parallel
parallel.sequence=true needs parallel.tensor>1
parallel.sequence=false excludes parallel.context>1 if parallel.tensor>1 and moe.num_experts>0: use
    parallel.sequence=true
parallel.context divides model.sequence_length
parallel.context needs model.kind=gpt
parallel.context excludes attention.kv_lora_rank, position.encoding=transformer_xl, model.mtp_layers: use
    parallel.context=1
parallel.stage_layers, parallel.balance_stages needs parallel.pipeline>1
parallel.stage_layers excludes parallel.balance_stages=true: which chooses them
parallel.virtual_pipeline, parallel.balance_stages excludes model.kind=t5: leave it out
parallel.pipeline excludes parallel.overlap_gradients=true, parallel.shard=gradients, parallel.shard=parameters,
    parallel.grad_compress if position.encoding=relative: gradients of the biases are summed over stages at the end
parallel.pipeline excludes position.encoding=learned_absolute if model.mtp_layers: use position.encoding=rope
parallel.recompute=full excludes parallel.pipeline>1 if position.memory_length: a layer holds one micro batch's memory;
    use parallel.recompute=selective
parallel.recompute=full excludes position.encoding=relative: all layers of a stack share its biases; use
    parallel.recompute=selective
parallel.virtual_pipeline needs parallel.pipeline>1
parallel.schedule=gpipe, parallel.schedule=zero_bubble excludes parallel.virtual_pipeline>1: use parallel.schedule=1f1b
parallel.schedule=zero_bubble excludes parallel.recompute=selective, parallel.recompute=full: weight gradients need
    activations after the backward pass; use parallel.recompute=none
parallel.schedule=zero_bubble excludes parallel.shard=gradients, parallel.shard=parameters: which reduce gradients in
    the backward pass; use parallel.shard=optimizer
parallel.schedule=zero_bubble excludes parallel.shadow if parallel.overlap_gradients=true: weights of a shadowed expert
    are reduced before their deferred gradients of earlier micro batches; use parallel.shadow=0
parallel.expert divides moe.num_experts x moe.granularity
parallel.expert, parallel.expert_tensor needs moe.num_experts>0
parallel.expert_tensor equals parallel.tensor if parallel.expert_tensor: or 1
parallel.expert_tensor divides model.ffn_hidden_size / moe.granularity
parallel.max_rows, parallel.shadow excludes parallel.expert_tensor: use parallel.expert_tensor=1
parallel.overlap_shared_experts needs moe.num_shared_experts>0
parallel.shard_size excludes parallel.shard=none, parallel.shard=optimizer: use parallel.shard=parameters or gradients
parallel.overlap_gradients excludes parallel.shard=gradients, parallel.shard=parameters: which always overlap reductions
parallel.shadow excludes parallel.shard=gradients, parallel.shard=parameters: use parallel.shadow=0
parallel.grad_compress needs parallel.shard=none, parallel.grad_reduce=fp32, parallel.overlap_gradients=false
parallel.grad_compress excludes train.precision=fp16, parallel.shadow: use bf16, and parallel.shadow=0
parallel.grad_compress excludes parallel.tensor>1: gradients of replicated parameters are not complete before they are
    reduced over tensor parallel ranks
parallel.grad_compress excludes parallel.pipeline>1 if model.tie_embeddings=true: gradients of the tied embedding are
    not complete before they are reduced over stages
parallel.grad_compress=onebit excludes optimizer.name=lars, optimizer.name=muon, optimizer.name=adafactor,
    optimizer.name=adamw8bit, optimizer.name=sgd: use adamw or lamb
parallel.grad_compress=dgc needs optimizer.name=sgd, optimizer.momentum=0.0: momentum is that of compress_options
parallel.all_reduce needs parallel.shard=none, parallel.grad_reduce=fp32, parallel.grad_compress=none,
    parallel.sync_every=1, parallel.overlap_gradients=false
parallel.grad_compress excludes parallel.pipeline>1 if model.mtp_layers>0: gradients of the embedding are not complete
    before they are reduced over stages
parallel.grad_compress=onebit needs optimizer.clip_grad=0.0: clipped gradients would not add up to the momentum that was
    averaged
parallel.compress_options excludes parallel.grad_compress=none
parallel.sync_every needs parallel.shard=none, parallel.grad_reduce=fp32, parallel.grad_compress=none,
    parallel.overlap_gradients=false
parallel.sync_every excludes train.precision=fp16, parallel.shadow, position.memory_length: leave it out
parallel.sync_outer, parallel.sync_warmup, parallel.sync_adaptive needs parallel.sync_every>1
parallel.sync_lr, parallel.sync_momentum needs parallel.sync_outer=nesterov
parallel.sync_every divides train.validation_every if parallel.sync_adaptive=false and data.has_validation
parallel.sync_every divides checkpoint.every if parallel.sync_adaptive=false
parallel.sync_every divides evaluation.every if parallel.sync_adaptive=false and evaluation.tasks
parallel.overlap_parameters needs parallel.shard=optimizer, parallel.overlap_gradients=true

train.activations=bf16, train.activations=int8 excludes parallel.recompute=selective, parallel.recompute=full: a layer
    that is recomputed from rounded inputs may route tokens to other experts
train.activations=bf16 excludes train.precision=bf16, train.precision=fp16: activations have 16 bits already

# The optimizer and guards
optimizer.min_lr at most optimizer.lr
optimizer.lr_scaling needs optimizer.base_batch
optimizer.base_batch excludes optimizer.lr_scaling=none: it has no effect
optimizer.cpu_offload needs optimizer.name=adamw: megatron-core runs only Adam on the host
optimizer.cpu_offload excludes parallel.shard=none
optimizer.cpu_offload excludes train.precision=fp32 if parallel.shard=optimizer: megatron-core then updates views of the
    weights, which it cannot offload; use bf16 or fp16
parallel.tensor, parallel.pipeline excludes optimizer.cpu_offload if parallel.is_fully_sharded: gradients in host memory
    cannot be reduced over those ranks; use parallel.shard=optimizer
parallel.tensor excludes optimizer.name=adafactor: it factors the second moments of whole matrices
optimizer.loss_scale, optimizer.initial_loss_scale, optimizer.min_loss_scale, optimizer.loss_scale_window,
    optimizer.hysteresis needs train.precision=fp16
optimizer.initial_loss_scale, optimizer.min_loss_scale, optimizer.loss_scale_window, optimizer.hysteresis excludes
    optimizer.loss_scale: it has no effect with a fixed scale; use optimizer.loss_scale=none for a dynamic one
guard.spike_history at most guard.spike_window if guard.spike_window>0

# Tasks of lm-evaluation-harness
evaluation.every, evaluation.limit, evaluation.num_fewshot, evaluation.task_path needs evaluation.tasks
evaluation.tasks excludes model.kind=t5, model.kind=bert: the harness's requests are those of a GPT
evaluation.tasks excludes parallel.virtual_pipeline>1, parallel.context>1: leave it out, or evaluate exports
evaluation.tasks excludes parallel.is_sequence_parallel: its texts have any length; use parallel.sequence=false
"""


def _read(table: str) -> Iterator[Rule]:
    """Yield the rules of a text with one rule per line. Subjects and objects that share a rule are joined by commas."""
    pattern = re.compile(r"(.+?) (needs|excludes|divides|equals|at most|less than) (.+?)(?: if (.+?))?(?:: (.+))?")
    for line in table.replace("\n    ", " ").splitlines():
        if line and not line.startswith("#"):
            subjects, verb, objects, when, why = pattern.fullmatch(line).groups("")  # type: ignore[union-attr]
            for subject, wanted in itertools.product(subjects.split(", "), objects.split(", ")):
                yield Rule(subject, verb, wanted, why, when)


RULES = tuple(_read(_TABLE))
_RELATIONS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "divides": (lambda value, of: of % value == 0, "does not divide"),
    "equals": (operator.eq, "must equal"),
    "at most": (operator.le, "exceeds"),
    "less than": (operator.lt, "must be less than"),
}
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "x": operator.mul,
    "/": operator.floordiv,
    "+": operator.add,
    "-": operator.sub,
}


def check_rules(recipe: Any) -> None:
    """Raise UserError for the first broken rule of a `pretrain.config.recipe.Recipe` whose values are within bounds."""
    for rule in RULES:
        message = broken(rule, recipe)
        if message:
            raise UserError(message)
    for check in _CHECKS:
        for message in check(recipe):
            raise UserError(message)


def broken(rule: Rule, recipe: Any) -> str:
    """Return a message if the recipe breaks the rule; otherwise an empty string."""
    conditions = [Condition.of(text) for text in rule.when.split(" and ") if text]
    if not all(condition.holds(recipe) for condition in conditions):
        return ""
    why = f": {rule.why}" if rule.why else ""
    if rule.verb in _RELATIONS:
        relation, words = _RELATIONS[rule.verb]
        name, value = _term(recipe, rule.subject)
        of_name, of_value = _term(recipe, rule.object)
        if relation(value, of_value):
            return ""
        others = [one.shown(recipe) for one in conditions if one.key not in (*name.split(), *of_name.split())]
        ending = f" with {' and '.join(others)}" if others else ""
        return f"{name}={value} {words} {of_name}={of_value}{ending}{why}"
    subject = Condition.of(rule.subject)
    wanted = Condition.of(rule.object)
    if not subject.holds(recipe) or wanted.holds(recipe) == (rule.verb == "needs"):
        return ""
    if rule.verb == "excludes":
        others = [one.shown(recipe) for one in (wanted, *conditions)]
        return f"{subject.shown(recipe)} is not supported with {' and '.join(others)}{why}"
    was = f", not {shown(recipe.value(wanted.key))}" if wanted.sign else ""
    return f"{subject.shown(recipe)} needs {rule.object.replace('>', ' > ')}{was}{why}"


class Condition(NamedTuple):
    """A condition of a rule, see `Rule`. The sign is "", "=" or ">"."""

    key: str
    sign: str
    value: str

    @classmethod
    def of(cls, text: str) -> "Condition":
        """Read a condition from the text in a rule."""
        return cls(*re.fullmatch(r"([\w.]+)([=>]?)(.*)", text).groups())  # type: ignore[union-attr]

    def holds(self, recipe: Any) -> bool:
        """Return whether the recipe fulfils the condition."""
        value = recipe.value(self.key)
        if self.sign == ">":
            return value is not None and value > float(self.value)
        return shown(value) == self.value if self.sign else bool(value != recipe.default(self.key))

    def shown(self, recipe: Any) -> str:
        """Return the key and its value in the recipe, for messages."""
        return f"{self.key}={shown(recipe.value(self.key))}"


def _term(recipe: Any, text: str) -> tuple[str, Any]:
    """Return the name and value of keys that are joined by operators. Factors of 1 are left out of the name."""
    name, *more = text.split()
    value = recipe.value(name)
    value = 1 if value is None else value
    for sign, key in zip(more[::2], more[1::2], strict=True):
        factor = recipe.value(key)
        factor = 1 if factor is None else factor
        if sign in "x/" and factor == 1:
            continue
        name = key if sign == "x" and value == 1 else f"{name} {sign} {key}"
        value = _OPERATORS[sign](value, factor)
    return name, value


def _must_divide(name: str, value: int, of_name: str, of: int) -> Iterator[str]:
    if of % value:
        yield f"{name}={value} does not divide {of_name}={of}"


def _rotary(recipe: Any) -> Iterator[str]:
    model = recipe.model
    position = recipe.model.position
    attention = recipe.model.attention
    if position.encoding == "transformer_xl" and model.hidden_size % 2:
        yield f"model.hidden_size={model.hidden_size} must be even with position.encoding=transformer_xl"
    if position.encoding == "rope" and attention.kv_lora_rank is None and model.head_width % 2:
        name = f"model.hidden_size={model.hidden_size} / attention.num_heads={attention.num_heads}"
        name = name if attention.head_dim is None else f"attention.head_dim={attention.head_dim}"
        yield f"{name} must be even with position.encoding=rope"
    elements = int(model.head_width * position.rotary_fraction)
    if position.rotary_fraction != 1 and (elements % 2 or not elements):
        yield (
            f"position.rotary_fraction={position.rotary_fraction} must rotate an even number (2 or more) of a head's "
            f"{model.head_width} elements"
        )
    if position.rope_original_length is not None:
        low = 2 * math.pi * position.rope_beta_slow
        high = 2 * math.pi * position.rope_beta_fast * position.rope_theta
        if not low < position.rope_original_length < high:
            yield (
                f"position.rope_original_length={position.rope_original_length} must be between {low:.1f} (2 pi "
                f"position.rope_beta_slow) and {high:.1f} (2 pi position.rope_beta_fast x position.rope_theta): "
                "otherwise YaRN scales all or no wavelengths"
            )


def _layers(recipe: Any) -> Iterator[str]:
    model = recipe.model
    moe = recipe.model.moe
    last = f"model.num_layers={model.num_layers}"
    yield from _listed("attention.sliding_layers", model.attention.sliding_layers, model.num_layers, last)
    if not moe.num_experts:
        return
    number = model.num_layers + model.decoder_layers
    last += f" + model.num_decoder_layers={model.decoder_layers}" if model.kind == "t5" else ""
    yield from _listed("moe.layers", moe.layers, number, last)
    if not model.layers_with_experts:
        yield f"moe.every={moe.every} exceeds the model's {number} layers"
    if model.dense_ffn_hidden_size is not None and len(model.layers_with_experts) == len(model.layer_numbers):
        yield (
            f"model.dense_ffn_hidden_size={model.dense_ffn_hidden_size} needs layers without experts: set moe.layers "
            "or moe.every"
        )


def _listed(key: str, numbers: tuple[int, ...], last: int, last_name: str) -> Iterator[str]:
    for number in numbers:
        if numbers.count(number) > 1:
            yield f"{key}={shown(numbers)} has layer {number} twice"
        if number > last:
            yield f"{key} has layer {number}; layers are 1 to {last_name}"


def _data(recipe: Any) -> Iterator[str]:
    data = recipe.data
    parallel = recipe.parallel
    if recipe.model.kind == "t5":
        decoder_length = recipe.decoder_length  # raises for a sequence that is too short
        if parallel.is_sequence_parallel:
            yield from _must_divide("parallel.tensor", parallel.tensor, "decoder tokens per sample", decoder_length)
    if not data.weights:
        return
    if len(data.weights) != len(data.train):
        yield (
            f"data.weights has {len(data.weights)} entries, but data.train has {len(data.train)}: set one weight per "
            "corpus"
        )
    try:
        whole_weights(data.weights)
    except UserError as error:
        yield f"data.{error}"


def _split(recipe: Any) -> Iterator[str]:
    model = recipe.model
    parallel = recipe.parallel
    dense = parallel.tensor * parallel.context
    experts = parallel.expert_tensor * parallel.expert
    if dense % experts and experts % dense:
        yield (
            f"parallel.tensor x parallel.context={dense} and parallel.expert_tensor x parallel.expert={experts}: one "
            "must divide the other"
        )
    stages = parallel.pipeline * parallel.model_chunks
    depth = len(model.stack_numbers)
    name = "model.num_layers" + (" + model.num_decoder_layers" if model.kind == "t5" else "")
    if parallel.stage_layers and (len(parallel.stage_layers), sum(parallel.stage_layers)) != (stages, depth):
        yield (
            f"parallel.stage_layers={list(parallel.stage_layers)} must be {stages} numbers, of parallel.pipeline x "
            f"parallel.virtual_pipeline, that add up to {name}={depth}"
        )
    stages_name, _ = _term(recipe, "parallel.pipeline x parallel.virtual_pipeline")
    if parallel.has_equal_stages:
        yield from _must_divide(stages_name, stages, name, depth)
    elif stages > depth:
        yield f"{stages_name}={stages} exceeds {name}={depth}"
    if parallel.is_fully_sharded and 0 < recipe.optimizer.cpu_offload < 1:
        yield (
            f"optimizer.cpu_offload={recipe.optimizer.cpu_offload} must be 0 or 1 with parallel.shard={parallel.shard}"
        )
    if parallel.shard_size:
        size = parallel.shard_size
        yield from _must_divide("parallel.shard_size", size, parallel.dense_data_name, parallel.dense_data)
        same = parallel.world_size // (parallel.pipeline * experts)
        if same % parallel.copies:
            yield (
                f"parallel.shard_size={size} makes {parallel.copies} copies, which does not divide the "
                f"{same} ranks that hold the same experts"
            )
    # A T5 is built dense, then its experts are inserted.
    if len(model.layers_with_experts) < len(model.layer_numbers) or model.kind == "t5":
        name = "ffn_hidden_size" if model.dense_ffn_hidden_size is None else "dense_ffn_hidden_size"
        yield from _must_divide("parallel.tensor", parallel.tensor, f"model.{name}", model.dense_width)


def _batches(recipe: Any) -> Iterator[str]:
    parallel = recipe.parallel
    train = recipe.train
    keys = ["global_batch"]
    if train.ramp_batch is not None and train.ramp_increment is not None:
        keys += ["ramp_batch", "ramp_increment"]  # if these are multiples, so is every batch size in between
        sizes = (train.global_batch - train.ramp_batch) // train.ramp_increment
        if sizes > MAX_RAMP:
            yield (
                f"train.ramp_increment={train.ramp_increment} makes {sizes} batch sizes, which exceeds the limit of "
                f"{MAX_RAMP}: use a larger increment"
            )
    if recipe.data.validation:
        keys.append("validation_sequences")
    share = train.micro_batch * parallel.dense_data
    for key in keys:
        sequences = getattr(train, key)
        yield from _must_divide(f"train.micro_batch x {parallel.dense_data_name}", share, f"train.{key}", sequences)
        if parallel.model_chunks > 1 and sequences // share % parallel.pipeline:
            yield (
                f"train.{key}={sequences} is {sequences // share} micro batches per data parallel rank, which must be "
                f"a multiple of parallel.pipeline={parallel.pipeline} with parallel.virtual_pipeline="
                f"{parallel.virtual_pipeline}"
            )


def _deepep(recipe: Any) -> Iterator[str]:
    model = recipe.model
    parallel = recipe.parallel
    if parallel.exchange != "deepep" or parallel.expert == 1:
        return
    from fmoe.exchange.deepep import MOST_CHOICES, MULTIPLE  # imports torch, which reading a recipe does not need

    sent = parallel.wire or recipe.train.precision
    if sent != "bf16":
        yield f"parallel.exchange=deepep sends rows in bf16, not {sent}: set parallel.wire=bf16"
    if model.hidden_size % MULTIPLE:
        yield f"model.hidden_size={model.hidden_size} must be a multiple of {MULTIPLE} with parallel.exchange=deepep"
    name, choices = _term(recipe, "moe.top_k x moe.granularity")
    if choices > MOST_CHOICES:
        yield f"{name}={choices} must be at most {MOST_CHOICES} with parallel.exchange=deepep"


def _schedule(recipe: Any) -> Iterator[str]:
    optimizer = recipe.optimizer
    scale = recipe.optimizer.dynamic_scale
    if scale["min_loss_scale"] > scale["initial_loss_scale"]:
        yield (
            f"optimizer.min_loss_scale={scale['min_loss_scale']} exceeds optimizer.initial_loss_scale="
            f"{scale['initial_loss_scale']}"
        )
    if recipe.warmup_steps >= recipe.decay_steps:
        key = "train.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
        warmup = f"optimizer.warmup_steps={optimizer.warmup_steps}"
        if optimizer.warmup_tokens is not None:
            warmup = f"optimizer.warmup_tokens={optimizer.warmup_tokens} ({recipe.warmup_steps} steps)"
        yield f"{warmup} must be less than {key}={recipe.decay_steps}: shorten the warmup"


_CHECKS = (_rotary, _layers, _data, _split, _batches, _deepep, _schedule)
