"""Encoders for masked language modelling: Megatron's BERT, which normalizes the input of each block."""

from collections.abc import Sequence

from pretrain.interchange.families.llama import SIZES
from pretrain.interchange.family import DENSE_ONLY, PLAIN_HEADS, Demand, Family, KeyPair, Only
from pretrain.interchange.tensors import Entry, QueryKeyValue, Same, Transform, Where

OURS = "model/encoder.layers.{layer}"
THEIRS = "bert.encoder.layer.{layer}"
WORDS = "bert.embeddings.word_embeddings.weight"
OUTPUT_BIAS = "cls.predictions.bias"


def _norm(where: Where, ours: str, theirs: str, separator: str = ".") -> tuple[Entry, ...]:
    return tuple(Entry(where, f"{ours}{separator}{of}", {f"{theirs}.{of}": "D"}) for of in ("weight", "bias"))


def _linear(
    where: Where,
    ours: str,
    theirs: Sequence[str],
    rows: str,
    columns: str,
    transform: Transform = Same(),  # noqa: B008 - stateless
) -> tuple[Entry, ...]:
    return (
        Entry(where, f"{ours}.weight", {f"{name}.weight": f"{rows} {columns}" for name in theirs}, transform),
        Entry(where, f"{ours}.bias", {f"{name}.bias": rows for name in theirs}, transform),
    )


_QKV = [f"{THEIRS}.attention.self.{name}" for name in ("query", "key", "value")]
TABLE = (
    Entry("model", "model/embedding.word_embeddings.weight", {WORDS: "V D"}),
    Entry("model", "model/embedding.position_embeddings.weight", {"bert.embeddings.position_embeddings.weight": "P D"}),
    Entry(
        "model", "model/embedding.tokentype_embeddings.weight", {"bert.embeddings.token_type_embeddings.weight": "T D"}
    ),
    *_norm("layer", f"{OURS}.self_attention.linear_qkv.layer_norm", f"{THEIRS}.attention.ln", "_"),
    *_linear("layer", f"{OURS}.self_attention.linear_qkv", _QKV, "Qd", "D", QueryKeyValue()),
    *_linear("layer", f"{OURS}.self_attention.linear_proj", [f"{THEIRS}.attention.output.dense"], "D", "Qd"),
    *_norm("layer", f"{OURS}.mlp.linear_fc1.layer_norm", f"{THEIRS}.ln", "_"),
    *_linear("layer", f"{OURS}.mlp.linear_fc1", [f"{THEIRS}.intermediate.dense"], "F", "D"),
    *_linear("layer", f"{OURS}.mlp.linear_fc2", [f"{THEIRS}.output.dense"], "D", "F"),
    *_norm("model", "model/encoder.final_layernorm", "bert.encoder.ln"),
    *_linear("model", "model/lm_head.dense", ["cls.predictions.transform.dense"], "D", "D"),
    *_norm("model", "model/lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    Entry("model", "model/output_layer.bias", {OUTPUT_BIAS: "V"}),
)


MEGATRON_BERT = Family(
    name="megatron-bert",
    architecture="MegatronBertForMaskedLM",
    tables=(TABLE,),
    keys=(
        *SIZES,
        KeyPair("intermediate_size", "ffn_hidden_size", int, value=lambda m: m.dense_width),
        KeyPair("max_position_embeddings", "sequence_length", int),
        KeyPair("type_vocab_size", "segment_types", int, 2),
        KeyPair("layer_norm_eps", "norm_eps", float, 1e-12),
        KeyPair("initializer_range", "init_std", float, 0.02),
    ),
    fixed={
        "kind": "bert",
        "norm": "layer",
        "position.encoding": "learned_absolute",
        "activation": "gelu",
        "gated": False,
        "linear_bias": True,
        "tie_embeddings": True,
    },
    demands=(
        Demand("moe.num_experts", lambda m: m.moe.num_experts == 0, "0: transformers has no BERT with experts"),
        *DENSE_ONLY,
        Demand("segment_types", lambda m: m.segment_types > 0, "at least 1"),
        PLAIN_HEADS,
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
    read=lambda config: {"moe.num_experts": 0},
    write=lambda model: {"hidden_dropout_prob": model.dropout, "attention_probs_dropout_prob": model.dropout},
    copies={"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": OUTPUT_BIAS},
    # Heads of other tasks, and a buffer of older releases.
    ignored=(
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
        "bert.embeddings.position_ids",
    ),
)
