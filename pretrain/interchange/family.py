"""Families of Hugging Face models: their tensors, their keys of config.json, and the models they can represent."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.folder import HuggingFaceFolder
from pretrain.interchange.tensors import Entry, Place, places

# Keys of [model] that a family need not mention: they do not change the logits of a trained model. The last three do in
# some models, whose families convert them.
ONLY_TRAINING = frozenset(
    {"dropout", "init", "init_std", "capacity_factor", "group_size", "balance_loss", "balance_scope", "z_loss"}
    | {"loss_weights", "bias_step", "mtp_loss", "dense_ffn_hidden_size", "num_decoder_layers", "rope_theta"}
)


@dataclass(frozen=True)
class Key:
    """A key of config.json that corresponds to a key of ``[model]``.

    Attributes:
        theirs, ours: names in config.json and in ``[model]``.
        kind: int (at least 1), float or bool.
        other: name that is read if ``theirs`` is missing; if both are there, their values must be equal.
        alias: name that transformers also accepts; it is not read, but its value must be equal.
        default: value that transformers assumes for a missing key; None if the key is required.
        value: returns the exported value; by default, the value of ours is exported.
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
        return getattr(model, self.ours) if self.value is None else self.value(model)


@dataclass(frozen=True)
class Demand:
    """A condition that a recipe must meet for a family to represent its model.

    Attributes:
        ours: the key of ``[model]`` that the error names.
        holds: tests the condition.
        why: the allowed values, for the error.
    """

    ours: str
    holds: Callable[[ModelConfig], bool]
    why: str


@dataclass(frozen=True)
class Only:
    """The supported values of a key of config.json; None stands for null or a missing key."""

    theirs: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """A format of config.json and tensors, usually one ``model_type`` of transformers.

    Keys of ``[model]`` that `keys`, `fixed`, `demands` and `varies` do not mention must have their default value,
    unless they are in `ONLY_TRAINING`.

    Attributes:
        name: the value of ``--format``, and the ``model_type`` unless `constants` has another.
        architecture: transformers' class.
        tables: one table for each form of the tensors that import reads; export writes the first form.
        keys: keys of config.json that correspond to a key of ``[model]``.
        fixed: keys of ``[model]`` and their only supported value, which export requires and import sets.
        demands: other conditions of export.
        varies: further keys of ``[model]`` that `read` and `write` convert.
        constants: keys of config.json with the same value in every export.
        only: keys of config.json and their supported values, which import requires.
        read: reads from config.json the keys of ``[model]`` that no `Key` converts; may raise UserError.
        write: returns the keys of config.json that no `Key` converts.
        ignored: endings of tensor names; an import leaves out such tensors of a folder.
        places: returns the tensors of a model, for a family without `tables`.
        files: returns further files of an export by name.
        notes: returns lines about an export for the user.
        left_out: beginning of tensor names; an export leaves out such tensors of a checkpoint. Empty for none.
        copies: names of tensors that a folder may have as copies of others, each with the original's name.
        adapt: returns the config.json of a folder as the other attributes expect it.
    """

    name: str
    architecture: str
    tables: tuple[tuple[Entry, ...], ...]
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any]
    demands: tuple[Demand, ...] = ()
    varies: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[Only, ...] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    ignored: tuple[str, ...] = ()
    places: Callable[[ModelConfig], Iterable[Place]] | None = None
    files: Callable[[], Mapping[str, bytes]] = dict
    notes: Callable[[ModelConfig], tuple[str, ...]] = lambda model: ()
    left_out: str = ""
    copies: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    adapt: Callable[[Mapping[str, Any], HuggingFaceFolder], Mapping[str, Any]] = lambda config, folder: config

    def tensors(self, model: ModelConfig) -> list[Place]:
        """Return all tensors of a model in the form that export writes."""
        return list(places(self.tables[0], model) if self.places is None else self.places(model))

    def forms(self, model: ModelConfig) -> list[list[Place]]:
        """Return all tensors of a model in each form that import reads."""
        return [list(places(table, model)) for table in self.tables] if self.places is None else [self.tensors(model)]

    def misfits(self, model: ModelConfig) -> list[tuple[str, str]]:
        """Return the keys of ``[model]`` whose values the family cannot represent, each with its allowed values."""
        found: dict[str, str] = {}
        demanded = {demand.ours for demand in self.demands}
        mentioned = {*self.varies, *demanded, *ONLY_TRAINING, *(key.ours for key in self.keys)}
        for key, default in dataclasses.asdict(ModelConfig()).items():
            wanted = self.fixed.get(key, default)
            if (key in self.fixed or key not in mentioned) and getattr(model, key) != wanted:
                found[key] = toml(wanted)
        for demand in self.demands:
            if not demand.holds(model):
                found.setdefault(demand.ours, demand.why)
        return list(found.items())


def read_int(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """Return an integer of config.json; ``default`` for a missing key.

    Raises:
        UserError: the value is not an integer of at least ``least``, or is missing and has no ``default``.
    """
    value = config.get(key, default)
    if type(value) is not int or value < least:
        raise UserError(f"{key}={toml(value)} must be an integer of at least {least}")
    return value


def read_bool(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean of config.json; ``default`` for a missing key.

    Raises:
        UserError: the value is not a boolean.
    """
    value = config.get(key, default)
    if type(value) is not bool:
        raise UserError(f"{key}={toml(value)} must be true or false")
    return value


def toml(value: Any) -> str:
    """Spell a value for a message, in at most 80 characters: ``true``, ``none`` for None, else its ``str``."""
    text = str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _dense_only(key: str) -> Demand:
    default = getattr(ModelConfig(), key)
    return Demand(key, lambda m: not m.num_experts or getattr(m, key) == default, toml(default))


# Keys without effect in a model without experts: families of such models support any value of them.
DENSE_ONLY = tuple(
    _dense_only(key)
    for key in (
        *("moe_layers", "moe_every", "top_k", "expert", "expert_options", "granularity", "gate", "gate_options"),
        *("score", "normalize", "routed_scale", "eval_capacity_factor", "jitter"),
    )
)
