"""Description of a family of Hugging Face models: its tensors, its keys of config.json, and the recipes it supports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.config.model import full_name
from pretrain.interchange.folder import HuggingFaceFolder
from pretrain.interchange.tensors import Entry, Place, places

Config = Mapping[str, Any]  # config.json
Values = dict[str, Any]  # values by key of the model, or of config.json

# Keys of the model that a family need not mention, because they do not change the logits of a trained model. The last
# three do in some models, whose families convert them.
ONLY_TRAINING = frozenset(
    (
        "dropout",
        "init",
        "init_std",
        "moe.capacity_factor",
        "moe.group_size",
        "moe.balance_loss",
        "moe.balance_scope",
        "moe.z_loss",
        "moe.loss_weights",
        "moe.bias_step",
        "mtp_loss",
        "dense_ffn_hidden_size",
        "num_decoder_layers",
        "position.rope_theta",
    )
)


@dataclass(frozen=True)
class KeyPair:
    """A key of config.json that corresponds to a key of the recipe's model.

    Attributes:
        theirs, ours: names in config.json and in `ModelConfig.values`.
        kind: type of the value: int (at least 1), float or bool.
        other: second name in config.json, read if ``theirs`` is missing. If both exist, their values must be equal.
        alias: another name that transformers accepts. Import does not use it if ``theirs`` is missing. If both
            exist, their values must be equal.
        default: value that transformers assumes for a missing key; None if the key is required.
        value: function that returns the exported value; None to export the value of ``ours``.
    """

    theirs: str
    ours: str
    kind: type
    default: Any = None
    value: Callable[[ModelConfig], Any] | None = None
    other: str | None = None
    alias: str | None = None

    def of(self, model: ModelConfig) -> Any:
        """Return the value that an export writes."""
        return model.value(self.ours) if self.value is None else self.value(model)


@dataclass(frozen=True)
class Demand:
    """A condition on a recipe's model that export to a family requires.

    Attributes:
        ours: the key of the model that the error names.
        holds: function that returns whether a model fulfils the condition.
        why: the allowed values, in words for the error.
    """

    ours: str
    holds: Callable[[ModelConfig], bool]
    why: str


@dataclass(frozen=True)
class Only:
    """A condition on a key of config.json that import requires: its value must be one of ``values``.

    None in ``values`` stands for null and for a missing key.
    """

    theirs: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """A format of config.json and tensors, usually one ``model_type`` of transformers.

    A key of the model must have its default value unless it is in `keys`, `fixed`, `demands`, `varies` or
    `ONLY_TRAINING`.

    Attributes:
        name: the value of ``--format``. It is also the ``model_type``, unless `constants` has another.
        architecture: name of the model's class in transformers.
        tables: for each supported layout of the tensors, its `Entry` objects. Import reads any layout; export writes
            the first.
        keys: keys of config.json that correspond to a key of the model.
        fixed: keys of the model with a single supported value, which export requires and import sets.
        demands: other conditions of export.
        varies: further keys of the model that `read` and `write` convert.
        constants: keys of config.json with the same value in every export.
        only: keys of config.json and their supported values, which import requires.
        read: function from config.json to the keys of the model that no `KeyPair` converts; may raise UserError.
        write: function from a model to the keys of config.json that no `KeyPair` converts.
        ignored: suffixes of tensor names. Import skips such tensors of a folder.
        places: function that returns the tensors of a model, for a family without `tables`.
        files: function that returns further files of an export, by name.
        notes: function that returns lines for the user about the export of a model.
        left_out: prefix of tensor names. Export skips such tensors of a checkpoint. Empty to skip no tensor.
        copies: the original tensor's name, by the name of a copy that a folder may have.
        adapt: function that returns a folder's config.json in the form that the other attributes expect.
    """

    name: str
    architecture: str
    tables: tuple[tuple[Entry, ...], ...]
    keys: tuple[KeyPair, ...]
    fixed: Mapping[str, Any]
    demands: tuple[Demand, ...] = ()
    varies: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[Only, ...] = ()
    read: Callable[[Config], Values] = lambda config: {}
    write: Callable[[ModelConfig], Values] = lambda model: {}
    ignored: tuple[str, ...] = ()
    places: Callable[[ModelConfig], Iterable[Place]] | None = None
    files: Callable[[], Mapping[str, bytes]] = dict
    notes: Callable[[ModelConfig], tuple[str, ...]] = lambda model: ()
    left_out: str = ""
    copies: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    adapt: Callable[[Config, HuggingFaceFolder], Config] = lambda config, folder: config

    def tensors(self, model: ModelConfig) -> list[Place]:
        """Return all tensors of a model, in the layout that export writes."""
        return list(places(self.tables[0], model) if self.places is None else self.places(model))

    def forms(self, model: ModelConfig) -> list[list[Place]]:
        """Return all tensors of a model, once for each layout that import reads."""
        return [list(places(table, model)) for table in self.tables] if self.places is None else [self.tensors(model)]

    def misfits(self, model: ModelConfig) -> list[tuple[str, str]]:
        """Return (key, allowed values) for each key of the model whose value the family does not support."""
        allowed: dict[str, str] = {}
        mentioned = {demand.ours for demand in self.demands} | {key.ours for key in self.keys}
        free = (mentioned | ONLY_TRAINING).union(self.varies) - self.fixed.keys()
        for key, default in ModelConfig().values().items():
            value = self.fixed.get(key, default)
            if key not in free and model.value(key) != value:
                allowed[key] = f"{full_name(key)}={toml(value)}"
        for demand in self.demands:
            if not demand.holds(model):
                allowed.setdefault(demand.ours, demand.why)
        return list(allowed.items())


def without(table: Iterable[Any], *names: str) -> tuple[Any, ...]:
    """Return the rows of a table of `KeyPair`, `Demand` or `Only`, except those of some keys of either format."""
    rows = list(table)
    for name in names:
        left_out = [row for row in rows if name in (getattr(row, "ours", None), getattr(row, "theirs", None))]
        assert left_out, name
        rows = [row for row in rows if row not in left_out]
    return tuple(rows)


def read_int(config: Config, key: str, default: int | None = None, least: int = 1) -> int:
    """Return an integer of config.json; ``default`` for a missing key.

    Raises:
        UserError: the value is not an integer of at least ``least``, or is missing and has no ``default``.
    """
    value = config.get(key, default)
    if type(value) is not int or value < least:
        raise UserError(f"{key}={toml(value)} must be an integer of at least {least}")
    return value


def read_bool(config: Config, key: str, default: bool) -> bool:
    """Return a boolean of config.json; ``default`` for a missing key.

    Raises:
        UserError: the value is not a boolean.
    """
    value = config.get(key, default)
    if type(value) is not bool:
        raise UserError(f"{key}={toml(value)} must be true or false")
    return value


def toml(value: Any) -> str:
    """Format a value for a message, in at most 80 characters. None is ``none``, and a bool is ``true`` or ``false``."""
    text = str(list(value) if isinstance(value, tuple) else value)
    if value is None or isinstance(value, bool):
        text = text.lower()
    return text if len(text) <= 80 else text[:77] + "..."


PLAIN_HEADS = Demand(
    "attention.head_dim",
    lambda m: m.head_width * m.attention.num_heads == m.hidden_size,
    "attention.head_dim=none, which stands for hidden_size / num_heads",
)


def _dense_only(key: str) -> Demand:
    default = ModelConfig().value(key)
    return Demand(key, lambda m: not m.moe.num_experts or m.value(key) == default, f"{full_name(key)}={toml(default)}")


# These keys have no effect in a model without experts, so families of such models allow any value.
DENSE_ONLY = (
    _dense_only("moe.layers"),
    _dense_only("moe.every"),
    _dense_only("moe.top_k"),
    _dense_only("moe.expert"),
    _dense_only("moe.expert_options"),
    _dense_only("moe.granularity"),
    _dense_only("moe.gate"),
    _dense_only("moe.gate_options"),
    _dense_only("moe.score"),
    _dense_only("moe.normalize"),
    _dense_only("moe.routed_scale"),
    _dense_only("moe.eval_capacity_factor"),
    _dense_only("moe.jitter"),
)
