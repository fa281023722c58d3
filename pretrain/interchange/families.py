"""Families of Hugging Face models: how recipes map to their config.json, and which recipes fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange import tensors
from pretrain.interchange.tensors import Entry


@dataclass(frozen=True)
class Key:
    """A key of config.json that corresponds to one of ``[model]``.

    Attributes:
        theirs, ours: names in config.json and in ``[model]``.
        kind: int, float or bool.
        other: alternative name in config.json.
        default: value that transformers assumes for a missing key; None if the key is required.
        value: computes the exported value where ours may be None; by default, the value of ours is exported.
    """

    theirs: str
    ours: str
    kind: type
    default: Any = None
    value: Callable[[ModelConfig], Any] | None = None
    other: str | None = None

    def of(self, model: ModelConfig) -> Any:
        """Return the key's value in config.json."""
        return getattr(model, self.ours) if self.value is None else self.value(model)


@dataclass(frozen=True)
class Demand:
    """A condition that a recipe must meet for a family to represent its model.

    Attributes:
        ours: the key named in the error.
        holds: tests the condition.
        why: the allowed values, for the error.
    """

    ours: str
    holds: Callable[[ModelConfig], bool]
    why: str


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of transformers.

    Attributes:
        name: the ``model_type`` and value of ``--format``.
        architecture: transformers' class for causal language models.
        table: its tensors, in the form that export writes.
        tables: all forms of its tensors that import reads.
        keys: keys of config.json in addition to the common ones, `KEYS`.
        demands: conditions in addition to the common ones.
        constants: keys of config.json with the same value in every export.
        read: returns values of ``[model]`` without a `Key`, from config.json.
        write: returns keys of config.json without a `Key`.
        has_window: tests whether a config.json limits attention to a sliding window.
    """

    name: str
    architecture: str
    table: tuple[Entry, ...]
    tables: tuple[tuple[Entry, ...], ...]
    keys: tuple[Key, ...]
    demands: tuple[Demand, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    has_window: Callable[[Mapping[str, Any]], bool] = lambda config: config.get("sliding_window") is not None


def weights_sum_to_one(model: ModelConfig) -> bool:
    """Return whether the weights of a token's experts sum to one in evaluation."""
    if model.gate == "switch":
        return False
    return model.normalize is not False


def drops_in_evaluation(model: ModelConfig) -> bool:
    """Return whether an expert may be full in evaluation: the capacity factor is below num_experts / top_k."""
    factor = model.eval_capacity_factor
    return factor is not None and factor * model.top_k < model.num_experts


# In the order in which they are checked.
_DEMANDS = (
    Demand("kind", lambda m: m.kind == "gpt", "gpt"),
    Demand("num_experts", lambda m: m.num_experts > 0, "a model with experts"),
    Demand("mtp_layers", lambda m: not m.mtp_layers, "0"),
    Demand("norm", lambda m: m.norm == "rms", "rms"),
    Demand("position", lambda m: m.position == "rope", "rope"),
    Demand("kv_lora_rank", lambda m: m.kv_lora_rank is None, "none"),
    Demand("activation", lambda m: m.activation == "silu", "silu, with model.gated=true"),
    Demand("gated", lambda m: m.gated, "true"),
    Demand("gate", lambda m: m.gate in ("naive", "switch"), "naive, or switch without jitter: top-k of a softmax"),
    Demand("jitter", lambda m: m.gate != "switch" or not m.jitter, "0 with model.gate=switch, or model.gate=naive"),
    Demand("score", lambda m: m.score in (None, "softmax"), "softmax"),
    Demand("routed_scale", lambda m: m.routed_scale == 1, "1"),
    Demand("gate_options", lambda m: not m.gate_options, "none of them"),
    Demand("expert", lambda m: m.expert == "ffn", "ffn"),
    Demand("expert_options", lambda m: not m.expert_options.keys() - {"dropout"}, "none of them but dropout"),
    Demand("granularity", lambda m: m.granularity == 1, "1, with the sizes of the finer experts"),
    Demand("num_shared_experts", lambda m: m.num_shared_experts == 0, "0"),
    Demand(
        "eval_capacity_factor",
        lambda m: not drops_in_evaluation(m),
        "none, or at least model.num_experts / model.top_k, which drop no token",
    ),
)

KEYS = (
    Key("vocab_size", "vocab_size", int),
    Key("hidden_size", "hidden_size", int),
    Key("num_hidden_layers", "num_layers", int),
    Key("num_attention_heads", "num_heads", int),
    Key("max_position_embeddings", "sequence_length", int),
    Key("num_experts_per_tok", "top_k", int),
    Key("num_key_value_heads", "num_query_groups", int, value=lambda m: m.query_groups),
    Key("initializer_range", "init_std", float, 0.02),
    Key("router_aux_loss_coef", "balance_loss", float, 0.001),
    Key("tie_word_embeddings", "tie_embeddings", bool, False),
)

_EVERY_LAYER = "experts in every layer (qwen3_moe allows dense layers, and needs model.qk_norm=true)"


def _are_all_with_experts(model: ModelConfig) -> bool:
    return len(model.layers_with_experts) == model.num_layers


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    table=tensors.MIXTRAL,
    tables=(tensors.MIXTRAL, tensors.MIXTRAL_STACKED),
    keys=(
        Key("num_local_experts", "num_experts", int),
        Key("intermediate_size", "ffn_hidden_size", int),
        Key("rms_norm_eps", "norm_eps", float, 1e-5),
        Key("rope_theta", "rope_theta", float, 1e6),
    ),
    demands=(
        Demand("qk_norm", lambda m: not m.qk_norm, "false"),
        Demand("moe_layers", lambda m: not m.moe_layers or _are_all_with_experts(m), _EVERY_LAYER),
        Demand("moe_every", lambda m: _are_all_with_experts(m), _EVERY_LAYER),
        Demand("gate", lambda m: m.gate == "naive", "naive, whose weights sum to one"),
        Demand("normalize", weights_sum_to_one, "true: weights that sum to one"),
    ),
    constants={"router_jitter_noise": 0.0, "sliding_window": None},
    read=lambda config: {"normalize": True},
)


def _dense_layers(model: ModelConfig) -> dict[str, Any]:
    dense = [number for number in model.layer_numbers if number not in model.layers_with_experts]
    every = [number for number in model.layer_numbers if number % model.moe_every]
    is_regular = dense == every
    return {
        "decoder_sparse_step": model.moe_every if is_regular else 1,
        "mlp_only_layers": [] if is_regular else [number - 1 for number in dense],
        "intermediate_size": model.dense_width,
        "norm_topk_prob": weights_sum_to_one(model),
    }


def _qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    if type(step) is not int or step < 1:
        raise UserError(f"decoder_sparse_step={step!r} must be a positive integer")
    if not isinstance(dense, list) or any(type(n) is not int or n not in layers for n in dense):
        raise UserError(f"mlp_only_layers={dense!r} must be a list of layers from 0 to {len(layers) - 1}")
    if type(normalize := config.get("norm_topk_prob", False)) is not bool:
        raise UserError(f"norm_topk_prob={normalize!r} must be true or false")
    with_experts = [n + 1 for n in layers if n not in dense and (n + 1) % step == 0]
    if not with_experts:
        raise UserError(f"no layer has experts with decoder_sparse_step={step} and mlp_only_layers={dense}")
    values: dict[str, Any] = {"qk_norm": True, "normalize": normalize}
    if dense:
        values["moe_layers"] = tuple(with_experts)
    else:
        values["moe_every"] = step
    if len(with_experts) < len(layers):
        width = config.get("intermediate_size")
        if type(width) is not int or width < 1:
            raise UserError(f"intermediate_size={width!r} must be a positive integer")
        values["dense_ffn_hidden_size"] = width
    return values


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    table=tensors.QWEN3_MOE,
    tables=(tensors.QWEN3_MOE, tensors.QWEN3_MOE_STACKED),
    keys=(
        Key("num_experts", "num_experts", int, other="num_local_experts"),
        Key("moe_intermediate_size", "ffn_hidden_size", int),
        Key("rms_norm_eps", "norm_eps", float, 1e-6),
        Key("rope_theta", "rope_theta", float, 1e4),
    ),
    demands=(Demand("qk_norm", lambda m: m.qk_norm, "true"),),
    constants={"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    read=_qwen3_moe,
    write=_dense_layers,
    has_window=lambda config: bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None,
)

FAMILIES = {family.name: family for family in (MIXTRAL, QWEN3_MOE)}


def family_for(model: ModelConfig, name: str = "auto") -> Family:
    """Return the family to export a model as; "auto" picks one that fits.

    Raises:
        UserError: no family fits; the message names the key and its allowed values.
    """
    if name == "auto":
        name = "qwen3_moe" if model.qk_norm else "mixtral"
    if name not in FAMILIES:
        raise UserError(f"--format {name} is invalid: use auto, {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    for demand in (*_DEMANDS, *family.demands):
        if not demand.holds(model):
            raise UserError(
                f"model.{demand.ours}={toml(getattr(model, demand.ours))} is not supported by {name}: use {demand.why}"
            )
    return family


def toml(value: Any) -> str:
    """Spell a value as TOML for a message, shortened."""
    text = str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
