"""Encoders for masked language modelling: Megatron's BERT, which normalizes the input of each block."""

from typing import Any

from pretrain.config import ModelConfig
from pretrain.interchange.family import DENSE_ONLY, Demand, Family, Key, Only
from pretrain.interchange.tensors import Entry, QueryKeyValue, Same, Transform, Where

OURS, THEIRS = "model/encoder.layers.{layer}", "bert.encoder.layer.{layer}"
WORDS, OUTPUT_BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"


def _norm(where: Where, ours: str, theirs: str, separator: str = ".") -> tuple[Entry, ...]:
    return tuple(Entry(where, f"{ours}{separator}{of}", {f"{theirs}.{of}": "D"}) for of in ("weight", "bias"))


def _linear(
    where: Where, ours: str, rows: str, columns: str, *theirs: str, transform: Transform | None = None
) -> tuple[Entry, ...]:
    return (
        Entry(where, f"{ours}.weight", {f"{name}.weight": f"{rows} {columns}" for name in theirs}, transform or Same()),
        Entry(where, f"{ours}.bias", {f"{name}.bias": rows for name in theirs}, transform or Same()),
    )


_SELF = f"{THEIRS}.attention.self"
TABLE = (
    Entry("model", "model/embedding.word_embeddings.weight", {WORDS: "V D"}),
    Entry("model", "model/embedding.position_embeddings.weight", {"bert.embeddings.position_embeddings.weight": "P D"}),
    Entry(
        "model", "model/embedding.tokentype_embeddings.weight", {"bert.embeddings.token_type_embeddings.weight": "T D"}
    ),
    *_norm("layer", f"{OURS}.self_attention.linear_qkv.layer_norm", f"{THEIRS}.attention.ln", "_"),
    *_linear(
        *("layer", f"{OURS}.self_attention.linear_qkv", "Qd", "D"),
        *(f"{_SELF}.query", f"{_SELF}.key", f"{_SELF}.value"),
        transform=QueryKeyValue(),
    ),
    *_linear("layer", f"{OURS}.self_attention.linear_proj", "D", "Qd", f"{THEIRS}.attention.output.dense"),
    *_norm("layer", f"{OURS}.mlp.linear_fc1.layer_norm", f"{THEIRS}.ln", "_"),
    *_linear("layer", f"{OURS}.mlp.linear_fc1", "F", "D", f"{THEIRS}.intermediate.dense"),
    *_linear("layer", f"{OURS}.mlp.linear_fc2", "D", "F", f"{THEIRS}.output.dense"),
    *_norm("model", "model/encoder.final_layernorm", "bert.encoder.ln"),
    *_linear("model", "model/lm_head.dense", "D", "D", "cls.predictions.transform.dense"),
    *_norm("model", "model/lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    Entry("model", "model/output_layer.bias", {OUTPUT_BIAS: "V"}),
)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_dropout_prob": model.dropout, "attention_probs_dropout_prob": model.dropout}


MEGATRON_BERT = Family(
    name="megatron-bert",
    architecture="MegatronBertForMaskedLM",
    tables=(TABLE,),
    keys=(
        Key("vocab_size", "vocab_size", int),
        Key("hidden_size", "hidden_size", int),
        Key("num_hidden_layers", "num_layers", int),
        Key("num_attention_heads", "num_heads", int),
        Key("intermediate_size", "ffn_hidden_size", int, value=lambda m: m.dense_width),
        Key("max_position_embeddings", "sequence_length", int),
        Key("type_vocab_size", "segment_types", int, 2),
        Key("layer_norm_eps", "norm_eps", float, 1e-12),
        Key("initializer_range", "init_std", float, 0.02),
    ),
    fixed={
        "kind": "bert",
        "norm": "layer",
        "position": "learned_absolute",
        "activation": "gelu",
        "gated": False,
        "linear_bias": True,
        "tie_embeddings": True,
    },
    demands=(
        Demand("num_experts", lambda m: m.num_experts == 0, "0: transformers has no BERT with experts"),
        *DENSE_ONLY,
        Demand("segment_types", lambda m: m.segment_types > 0, "at least 1"),
        Demand(
            "head_dim",
            lambda m: m.head_width * m.num_heads == m.hidden_size,
            "model.head_dim=none, which stands for hidden_size / num_heads",
        ),
    ),
    constants={"hidden_act": "gelu", "tie_word_embeddings": True, "is_decoder": False, "add_cross_attention": False},
    only=(
        Only("hidden_act", ("gelu", None)),
        Only("tie_word_embeddings", (True, None)),
        Only("chunk_size_feed_forward", (0, None)),
        Only("is_decoder", (False, None)),
        Only("add_cross_attention", (False, None)),
        Only("position_embedding_type", ("absolute", None)),
        Only("quantization_config", (None,)),
    ),
    read=lambda config: {"num_experts": 0},
    write=_write,
    copies={"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": OUTPUT_BIAS},
    # Heads of other tasks, and a buffer of older releases.
    ignored=(
        *("bert.pooler.dense.weight", "bert.pooler.dense.bias"),
        *("cls.seq_relationship.weight", "cls.seq_relationship.bias", "bert.embeddings.position_ids"),
    ),
)
