"""A tiny, randomly initialised model of every family that `fmoe.fmoefy` knows, with inputs and a loss."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HIDDEN, VOCABULARY = 32, 48, 61


class Case(NamedTuple):
    """``build(dropout)`` gives a model and keyword inputs, whose output has ``loss`` and ``logits``."""

    build: Callable[[float], tuple[nn.Module, dict[str, Any]]]
    num_blocks: int
    found_by: str
    gated: bool = False


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 10))


def _hugging_face(model_class: str, config_class: str, **config):
    def build(dropout: float):
        import transformers

        names = {"dropout": dropout} | _DROPOUTS.get(config_class, {})
        rates = {name: dropout for name in names if names[name] is not None}
        made = getattr(transformers, config_class)(**config, **rates)
        model = getattr(transformers, model_class)._from_config(made)
        if "Image" in model_class:
            size = config["image_size"]
            return model, {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}
        return model, {"input_ids": _tokens(), "labels": _tokens()[:, :10]}

    return build


# What each config calls its dropouts; None keeps the default.
_BERT_DROPOUTS = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "dropout": None}
_DROPOUTS = {
    "BertConfig": _BERT_DROPOUTS,
    "RobertaConfig": _BERT_DROPOUTS,
    "ViTConfig": _BERT_DROPOUTS,
    "SwinConfig": _BERT_DROPOUTS | {"drop_path_rate": 0},
    "T5Config": {"dropout_rate": 0, "dropout": None},
    "GPT2Config": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "dropout": None},
    "AlbertConfig": _BERT_DROPOUTS,
    "RobertaPreLayerNormConfig": _BERT_DROPOUTS,
    "FunnelConfig": {"hidden_dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "dropout": None},
    "BloomConfig": {"hidden_dropout": 0, "attention_dropout": 0, "dropout": None},
    "BartConfig": {"dropout": 0, "activation_dropout": 0, "attention_dropout": 0},
    "PegasusConfig": {"dropout": 0, "activation_dropout": 0, "attention_dropout": 0},
    "ConvNextConfig": {"drop_path_rate": 0, "dropout": None},
    "XLMConfig": {"dropout": 0, "attention_dropout": 0},
    **{name: {"dropout": None} for name in ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config")},
}

_COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": HIDDEN,
}
_TEXT = {**_COMMON, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_ROPE = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_inner": HIDDEN, "vocab_size": VOCABULARY, "n_positions": 32}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": HIDDEN, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
_T5 |= {"decoder_start_token_id": 0}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}
_BART = {"d_model": WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_BART |= {f"{stack}_layers": 2 for stack in ("encoder", "decoder")}
_BART |= {f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")}
_BART |= {f"{stack}_ffn_dim": HIDDEN for stack in ("encoder", "decoder")}
_FUNNEL = {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": WIDTH, "n_head": 4}
_FUNNEL |= {"d_head": 8, "d_inner": HIDDEN}
_OPT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "ffn_dim": HIDDEN}
_OPT |= {"num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": WIDTH}
_XLM = {"vocab_size": VOCABULARY, "emb_dim": WIDTH, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
_CONVNEXT = {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2, "image_size": 32, "patch_size": 4}


class Seq2Seq(nn.Module):
    """`nn.Transformer`: two encoder and two decoder layers, [S, B, D]."""

    def __init__(self, dropout: float):
        super().__init__()
        self.body = nn.Transformer(WIDTH, 4, 2, 2, HIDDEN, dropout=dropout)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, labels):
        logits = self.head(self.body(x, x.flip(0)))
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), labels))


class Sequentials(nn.Module):
    """Plain Sequentials: bare, with dropout, as parts of longer ones."""

    def __init__(self, dropout: float):
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.bare = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.longer = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(HIDDEN, WIDTH, bias=False),
            nn.Dropout(dropout),
            nn.Linear(WIDTH, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, WIDTH),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, x, labels):
        x = self.stem(x)
        logits = self.longer(x + self.bare(x))
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), labels))


def _torch_model(model_class: type[nn.Module], width: int):
    def build(dropout: float):
        return model_class(dropout), {"x": torch.randn(10, 2, width), "labels": torch.randint(5, (20,))}

    return build


_BY_VERSION = "mlp or bert"  # transformers wrote these blocks as two halves once

FAMILIES = {
    "gpt2": Case(_hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2), 3, "mlp"),
    "llama": Case(_hugging_face("LlamaForCausalLM", "LlamaConfig", **_ROPE), 3, "glu", True),
    "mistral": Case(_hugging_face("MistralForCausalLM", "MistralConfig", **_ROPE), 3, "glu", True),
    "qwen2": Case(_hugging_face("Qwen2ForCausalLM", "Qwen2Config", **_ROPE), 3, "glu", True),
    "qwen3": Case(_hugging_face("Qwen3ForCausalLM", "Qwen3Config", **_ROPE), 3, "glu", True),
    "bert": Case(_hugging_face("BertForMaskedLM", "BertConfig", **_TEXT), 3, "bert"),
    "roberta": Case(_hugging_face("RobertaForMaskedLM", "RobertaConfig", **_TEXT), 3, "bert"),
    "t5": Case(_hugging_face("T5ForConditionalGeneration", "T5Config", **_T5), 4, "mlp"),
    "t5 gated": Case(
        _hugging_face("T5ForConditionalGeneration", "T5Config", feed_forward_proj="gated-gelu", **_T5), 4, "glu", True
    ),
    "vit": Case(
        _hugging_face("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, **_COMMON), 3, _BY_VERSION
    ),
    "swin": Case(_hugging_face("SwinForImageClassification", "SwinConfig", **_SWIN), 3, _BY_VERSION),
    "albert": Case(_hugging_face("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **_TEXT), 1, "mlp"),
    "xlnet": Case(
        _hugging_face(
            "XLNetLMHeadModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=4, d_inner=HIDDEN
        ),
        2,
        "mlp",
    ),
    "funnel": Case(_hugging_face("FunnelForMaskedLM", "FunnelConfig", **_FUNNEL), 3, "mlp"),
    "bloom": Case(
        _hugging_face("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4),
        2,
        "mlp",
    ),
    "bart": Case(_hugging_face("BartForConditionalGeneration", "BartConfig", **_BART), 4, "mlp"),
    "pegasus": Case(_hugging_face("PegasusForConditionalGeneration", "PegasusConfig", **_BART), 4, "mlp"),
    "opt": Case(_hugging_face("OPTForCausalLM", "OPTConfig", **_OPT), 3, "mlp"),
    "convnext": Case(_hugging_face("ConvNextForImageClassification", "ConvNextConfig", **_CONVNEXT), 3, "mlp"),
    "xlm": Case(_hugging_face("XLMWithLMHeadModel", "XLMConfig", **_XLM), 2, "mlp"),
    "roberta prelayernorm": Case(
        _hugging_face("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", **_TEXT), 3, "mlp"
    ),
    "torch": Case(_torch_model(Seq2Seq, WIDTH), 4, "torch layer"),
    "sequential": Case(_torch_model(Sequentials, 4), 3, "sequential"),
}


def tiny(family: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    """The same model and inputs at every call."""
    torch.manual_seed(0)
    return FAMILIES[family].build(dropout)
