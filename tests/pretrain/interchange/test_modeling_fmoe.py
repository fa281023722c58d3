"""The model class of the family fmoe in transformers: caches of any version, and arguments that it refuses."""

import importlib.util
import json

import pytest
import torch

from fmoe.errors import UserError
from pretrain.interchange.cli import export_main
from pretrain.interchange.families.own import update_code
from pretrain.interchange.folder import CONFIG

transformers = pytest.importorskip("transformers")
from pretrain.interchange.modeling_fmoe import CACHE, FMoEConfig, FMoEForCausalLM  # noqa: E402

SIZES = {"num_layers": 2, "hidden_size": 32, "attention.num_heads": 4, "ffn_hidden_size": 24, "sequence_length": 32}
SIZES |= {
    "vocab_size": 48,
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "init_std": 0.2,
    "moe.gate": "naive",
    "position.encoding": "rope",
}
XL = {"position.encoding": "transformer_xl", "position.memory_length": 3, "tie_embeddings": False}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
NAMES = ("cache", "past_key_values")
CODE = "modeling_fmoe.py"


def build(**values):
    torch.manual_seed(0)
    return FMoEForCausalLM(FMoEConfig(model={**SIZES, "moe.eval_capacity_factor": None, **values})).eval()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def relative():
    return build(**XL)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 48, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_either_name_of_the_cache_is_accepted(model, tokens, name):
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        first = model(tokens[:, :5])
        last = model(tokens[:, 5:], **{name: first[CACHE]})
    assert CACHE in first and len(set(NAMES) & set(first.keys())) == 1
    assert torch.allclose(torch.cat([first.logits, last.logits], 1), whole, atol=1e-5)
    cache = transformers.DynamicCache(config=model.config)
    expected = model.generate(tokens, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(tokens, **GREEDY), expected)
    assert torch.equal(model.generate(tokens, **{name: cache}, **GREEDY), expected)
    assert cache.get_seq_length() == tokens.shape[1] + GREEDY["max_new_tokens"] - 1


def test_both_names_of_the_cache_are_refused(model, tokens):
    both = {name: transformers.DynamicCache() for name in NAMES}
    for call in (model, model.generate):
        with pytest.raises(UserError, match="cache and past_key_values"):
            call(tokens, **both)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 3}])
def test_generation_equals_that_without_a_cache(model, tokens, options):
    prompt = tokens[:1]
    beams = {"num_beams": options.get("num_beams", 1)}
    settings = {**GREEDY, "eos_token_id": 0}  # transformers before 5.20 looks up a prompt only with an end token
    expected = model.generate(prompt, use_cache=False, **beams, **settings)
    if "prefill_chunk_size" in options:  # transformers 5.0 makes no cache for it
        options = {**options, "cache": transformers.DynamicCache(config=model.config)}
    assert torch.equal(model.generate(prompt, **options, **settings), expected)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 3}])
def test_generation_in_segments_is_refused_with_memory(relative, tokens, options):
    """Positions of one segment see each other, and only ``memory_length`` positions before the segment."""
    assert relative.generate(tokens, **GREEDY).shape == (2, 14)
    with pytest.raises(UserError, match=r"position\.memory_length=3"):
        relative.generate(tokens[:1], **options, **GREEDY)


class Windowed(transformers.PretrainedConfig):
    num_hidden_layers, num_attention_heads, hidden_size, sliding_window = 2, 4, 32, 3
    layer_types = ["sliding_attention"] * 2


def test_caches_that_lose_tokens_are_refused(model, tokens):
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    encoder = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    for cache in (static, encoder, ((tokens, tokens),)):
        for name in NAMES:
            with pytest.raises(UserError, match=type(cache).__name__):
                model(tokens, **{name: cache})
    with pytest.raises(UserError, match="StaticCache"):
        model.generate(tokens, cache_implementation="static", **GREEDY)
    with pytest.raises(UserError, match="3 of 9 tokens"):
        model.generate(tokens, cache=transformers.DynamicCache(config=Windowed()), **GREEDY)


@pytest.mark.parametrize("name", ["attn_mask", "token_type_ids", "output_router_logits", "num_items_in_batch"])
def test_unknown_arguments_are_refused(model, tokens, name):
    with pytest.raises(TypeError, match=name):
        model(tokens, **{name: torch.ones_like(tokens)})
    with pytest.raises((TypeError, ValueError), match=name):
        model.generate(tokens, **{name: torch.ones_like(tokens)}, **GREEDY)


def test_arguments_without_effect_have_their_defaults(model, relative, tokens):
    assert isinstance(model(tokens, return_dict=False, output_attentions=False), tuple)
    with pytest.raises(UserError, match="output_attentions"):
        model(tokens, output_attentions=True)
    restarted = torch.arange(8) % 4
    with pytest.raises(UserError, match="position_ids"):
        model(tokens, position_ids=restarted[None])
    later = torch.arange(8)[None] + 3
    assert not torch.equal(build(position="learned_absolute")(tokens, position_ids=later).logits, model(tokens).logits)
    with pytest.raises(UserError, match=r"position_ids .* position\.encoding=transformer_xl"):
        relative(tokens, position_ids=later)
    for inputs in ({}, {"input_ids": tokens, "inputs_embeds": torch.zeros(2, 8, 32)}):
        with pytest.raises(UserError, match="input_ids and inputs_embeds"):
            model(**inputs)


def test_the_configuration_decides_about_hidden_states(model, tokens, monkeypatch):
    assert model(tokens).hidden_states is None
    monkeypatch.setattr(model.config, "output_hidden_states", True)
    assert len(model(tokens).hidden_states) == 3


def test_unknown_options_of_the_configuration_are_refused(model, tmp_path):
    for values, message in (
        ({"modle": {}}, "modle"),
        ({"moe.top_k": 3}, "top_k=3"),
        ({"num_hidden_layers": 7}, "num_hidden_layers=7 .* 4"),
    ):
        with pytest.raises(UserError, match=message):
            FMoEConfig(**values)
    model.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path, output_hidden_states=True).config.output_hidden_states
    with pytest.raises(UserError, match=r"num_hidden_layers=1 .* 2"):
        load(tmp_path, num_hidden_layers=1)


def test_a_resized_vocabulary_is_saved(tmp_path):
    resized = build()
    resized.resize_token_embeddings(50)
    assert FMoEForCausalLM(resized.config).output_layer.weight.shape == (50, 32)
    resized.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.output_layer.weight, resized.output_layer.weight)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate (the extra interop)")
@pytest.mark.parametrize("factor", [None, 0.75])
def test_trainer_evaluates_and_predicts(tokens, tmp_path, factor):
    dropping = build(eval_capacity_factor=factor)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=1, report_to=[], use_cpu=True
    )
    trainer = transformers.Trainer(model=dropping, args=arguments, eval_dataset=data)
    with torch.no_grad():
        results = [dropping(row[None], labels=row[None], use_cache=False) for row in tokens]
    loss = sum(result.loss.item() for result in results) / len(results)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    predicted = trainer.predict(data).predictions
    assert torch.allclose(torch.from_numpy(predicted), torch.cat([r.logits for r in results]), atol=1e-5)


def test_only_an_export_with_code_is_updated(model, tmp_path, capsys):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for change, message in (
        ({"auto_map": None}, "auto_map=none"),
        ({"auto_map": {"AutoConfig": "other/repo--modeling_fmoe.FMoEConfig"}}, "other/repo"),
        ({"model": config["model"] | {"moe.gate": "mine"}}, "moe.gate=mine"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps(config | change))
        (tmp_path / CODE).write_text("old")
        with pytest.raises(UserError, match=message):
            update_code(tmp_path)
        assert (tmp_path / CODE).read_text() == "old"
    for arguments in (["--update-code", str(tmp_path), "--no-drops"], [str(tmp_path)]):
        with pytest.raises(SystemExit):
            export_main(arguments)
        assert "error" in capsys.readouterr().err
