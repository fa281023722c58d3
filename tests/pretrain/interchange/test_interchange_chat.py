"""Tokenizers in the forms of published models: what AutoTokenizer and generate make of them, import and export keep."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
from huggingface_folders import save_random
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Model

from fmoe.cli import main
from fmoe.errors import UserError
from pretrain.config import DataConfig, Recipe, load_recipe
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.inputs import open_inputs
from pretrain.data.opening import open_trained_tokenizer
from pretrain.data.prepare import prepare
from pretrain.data.tokenizers import load_tokenizer
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.tokenizer import _has_same_end, check_tokenizer, files_for
from pretrain.trainer import Trainer

VOCAB = 400
TEXT = "def f(x): return x ** 2  # a square, of 12 or 345\nI'm sure they'll say it's 10:45!\n" * 20
DEEPSEEK = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|eot_id|>{% endfor %}"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*special: str, bos: str = "", splits: str = "") -> bytes:
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splits:
        cut = pre_tokenizers.Split(Regex(splits), "isolated")
        model.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 20,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(special),
        show_progress=False,
    )
    model.train_from_iterator([TEXT], trainer)
    if bos:
        model.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, model.token_to_id(bos))]
        )
    return model.to_str().encode()


def piece_model() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_writer=model,
        vocab_size=VOCAB - 40,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


# By name: files of the tokenizer, other values of config.json, BOS, end of document.
FORMS = {
    "llama 3": (
        lambda: {
            "tokenizer.json": byte_level(*LLAMA3, bos=LLAMA3[0]),
            "tokenizer_config.json": {"bos_token": LLAMA3[0], "eos_token": LLAMA3[2], "chat_template": TEMPLATE},
            "generation_config.json": {"eos_token_id": [1, 2], "bos_token_id": 0, "do_sample": True, "top_p": 0.9},
        },
        {"bos_token_id": 0, "eos_token_id": [1, 2]},
        LLAMA3[0],
        LLAMA3[2],
    ),
    "deepseek": (
        lambda: {
            "tokenizer.json": byte_level(*DEEPSEEK),
            "tokenizer_config.json": {
                "tokenizer_class": "LlamaTokenizerFast",
                "add_bos_token": True,
                "bos_token": {"__type": "AddedToken", "content": DEEPSEEK[0], "normalized": True},
                "eos_token": {"__type": "AddedToken", "content": DEEPSEEK[1], "normalized": True},
                "chat_template": TEMPLATE,
            },
        },
        {"bos_token_id": 0, "eos_token_id": 1},
        DEEPSEEK[0],
        DEEPSEEK[1],
    ),
    "qwen 2": (
        lambda: {
            "tokenizer.json": byte_level(splits=QWEN2),
            "tokenizer_config.json": {
                "tokenizer_class": "Qwen2Tokenizer",
                "add_bos_token": False,
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "added_tokens_decoder": {
                    str(len(json.loads(byte_level(splits=QWEN2))["model"]["vocab"]) + i): {
                        "content": name,
                        "special": True,
                        **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False),
                    }
                    for i, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
                },
            },
            "chat_template.jinja": TEMPLATE.encode(),
            "generation_config.json": {"eos_token_id": [3, 2], "pad_token_id": 2, "temperature": 0.7, "top_k": 20},
        },
        {"eos_token_id": 3},
        None,
        "<|im_end|>",
    ),
    "llama 2": (
        lambda: {
            "tokenizer.model": piece_model(),
            "tokenizer_config.json": {
                "tokenizer_class": "LlamaTokenizer",
                "add_bos_token": True,
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": TEMPLATE,
            },
        },
        {"bos_token_id": 1, "eos_token_id": 2},
        "<s>",
        "</s>",
    ),
    "gpt-2": (
        lambda: {
            "tokenizer.json": byte_level("<|endoftext|>"),
            "tokenizer_config.json": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        },
        {"bos_token_id": 0, "eos_token_id": 0},
        None,
        "<|endoftext|>",
    ),
}


def written(folder: Path, files: dict, case: str = "mixtral", **config: object) -> Path:
    """The folder of a model with random weights and these files."""
    save_random(folder, case, vocab_size=VOCAB)
    (folder / "generation_config.json").unlink()
    values = json.loads((folder / "config.json").read_bytes())
    values = {key: value for key, value in values.items() if not key.endswith("_token_id")} | config
    for name, content in {"config.json": values, **files}.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def imported(folder: Path, form: str = "llama 3") -> Path:
    """The folder of a model with a form's tokenizer, imported as the run beside it."""
    files, config, *_ = FORMS[form]
    source = written(folder / "theirs", files(), **config)
    import_folder(source, folder / "run")
    return source


def write_tokenizer(folder: Path, files: dict) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder / "tokenizer.json"


def auto(folder: Path):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def read(path: Path) -> dict:
    return json.loads(path.read_bytes())


@pytest.mark.parametrize("form", FORMS)
def test_import_and_export_keep_the_tokens(tmp_path, form):
    files, config, bos, end = FORMS[form]
    source = written(tmp_path / "theirs", files(), **config)
    recipe = import_folder(source, tmp_path / "run").recipe
    ours = load_tokenizer(recipe.data.tokenizer)
    assert recipe.data.bos == (bos is not None)
    assert ours.end_of_document == ours.ids[end] and (bos is None or ours.bos == ours.ids[bos])
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    theirs = auto(tmp_path / "out")
    before = [] if bos is None else [ours.ids[bos]]
    for text in (TEXT, "x", " It's 12345 o'clock.\n\n\tI'M SURE", "naïve 日本 🙂"):
        assert theirs(text)["input_ids"] == before + ours.encode(text), "BOS once"
    assert theirs.eos_token_id == ours.end_of_document
    assert theirs.get_vocab() == ours.ids | theirs.get_added_vocab()
    if "chat_template" in str(files()):
        message = [{"role": "user", "content": "x"}]
        wanted, found = (each.apply_chat_template(message, tokenize=False) for each in (auto(source), theirs))
        assert found == wanted
    exported = read(tmp_path / "out" / "config.json")
    assert {key: exported[key] for key in config} == config
    generation = read(tmp_path / "out" / "generation_config.json")
    kept = files().get("generation_config.json", {})
    assert {key: generation[key] for key in kept} == kept
    assert generation["eos_token_id"] == kept.get("eos_token_id", config["eos_token_id"])


def test_a_model_trained_without_bos_is_exported_without(tmp_path):
    """As a run from before ``data.bos``, with a tokenizer that adds BOS."""
    imported(tmp_path)
    ours = load_tokenizer(tmp_path / "run" / "tokenizer" / "tokenizer.json")
    for bos in (False, True):
        folder = tmp_path / str(bos)
        folder.mkdir()
        for name, data in files_for(ours, 32, bos=bos, model_type="mixtral").items():
            (folder / name).write_bytes(data)
        theirs = auto(folder)
        assert theirs(TEXT)["input_ids"] == [ours.bos] * bos + ours.encode(TEXT)
        assert theirs("a<|eot_id|>")["input_ids"][-1] == 2, "a chat's tokens are found in its text"
        assert theirs.chat_template == TEMPLATE and theirs.bos_token_id == 0


def test_a_moved_tokenizer_needs_its_declarations(tmp_path, capsys):
    imported(tmp_path)
    moved = tmp_path / "tokenizer.json"
    moved.write_bytes((tmp_path / "run" / "tokenizer" / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match=r"end with token 2, .* with token 1: .*tokenizer_config\.json"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", tokenizer=str(moved))
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--tokenizer", str(moved)]) == 2
    assert "end with token 2" in capsys.readouterr().err


def test_without_transformers(tmp_path, monkeypatch):
    """Nothing is compared, and the export's tokenizer still adds BOS as the model needs it."""
    monkeypatch.setattr("pretrain.interchange.tokenizer._load_auto", lambda files, model_type: None)
    for form, is_copied in (("llama 3", True), ("deepseek", False), ("gpt-2", True)):
        source = imported(tmp_path / form, form)
        export_checkpoint(tmp_path / form / "run", tmp_path / form / "out")
        settings, theirs = (read(each / "tokenizer_config.json") for each in (tmp_path / form / "out", source))
        assert (settings == theirs) == is_copied


def test_greedy_text_is_that_of_transformers(tmp_path, capsys):
    import transformers

    source = imported(tmp_path)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    main(["generate", str(tmp_path / "run"), "--prompt", "def f", "--max-tokens", "6", "--temperature", "0", "--json"])
    ours = json.loads(capsys.readouterr().out)
    for folder in (source, tmp_path / "out"):
        prompt = auto(folder)("def f", return_tensors="pt")
        assert prompt["input_ids"][0].tolist() == ours["prompt_tokens"]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        found = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert found.tolist() == ours["samples"][0]["tokens"]
    (tmp_path / "text.txt").write_text("def f(x): return")
    main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "text.txt"), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    ids = torch.tensor([[*auto(source)("def f(x): return")["input_ids"], 2]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert found["tokens"] == ids.shape[1] - 1 and found["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_training_follows_the_tokenizer(forks, tmp_path, capsys):
    """As the command's output says: prepare a corpus with BOS, train on it, export."""
    files, config, *_ = FORMS["llama 3"]
    source, run, corpus = written(tmp_path / "theirs", files(), **config), tmp_path / "run", tmp_path / "corpus"
    main(["import", str(source), str(run)])
    (said,) = [line for line in capsys.readouterr().out.split("\n") if "fmoe data prepare" in line]
    assert said.split()[-1] == "--bos"
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (TEXT, "", TEXT[:50])))
    prepare = ["data", "prepare", str(tmp_path / "text.jsonl"), "--tokenizer", str(run / "tokenizer/tokenizer.json")]
    main([*prepare, "--out", str(corpus), "--bos"])
    main([*prepare, "--out", str(tmp_path / "without")])
    tokens = [IndexedCorpus(corpus).document(i) for i in range(2)]
    assert all((t[0], t[-1]) == (0, 2) and not (t[1:-1] < 3).any() for t in tokens)
    train = [str(run / "config.toml"), "--run.folder", str(tmp_path / "new"), "--train.steps", "2"]
    train += ["--train.global-batch", "2", "--train.micro-batch", "2", "--data.train", str(corpus)]
    recipe = load_recipe(str(run / "config.toml"))
    data = replace(recipe.data, train=(str(tmp_path / "without"),))
    with pytest.raises(UserError, match=r"data\.bos=true .*--bos"):
        open_inputs(replace(recipe, data=data))
    with pytest.raises(UserError, match=r"data\.bos=false, .*--bos"):
        open_inputs(replace(recipe, data=replace(data, train=(str(corpus),), bos=False)))
    (end,) = forks.command("pretrain", *train)
    assert end.code == 0, end.err
    export_checkpoint(tmp_path / "new", tmp_path / "out")
    generation = read(tmp_path / "out" / "generation_config.json")
    assert {key: generation[key] for key in files()["generation_config.json"]} == files()["generation_config.json"]
    assert load_recipe(str(tmp_path / "new" / "config.toml")).data.bos


def test_settings_of_a_model_without_a_tokenizer_are_kept(tmp_path):
    settings = {"eos_token_id": [5, 7], "temperature": 0.6, "suppress_tokens": [9], "bos_token_id": 4}
    source = written(tmp_path / "theirs", {"generation_config.json": settings}, eos_token_id=[5, 7], pad_token_id=3)
    import_folder(source, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert read(tmp_path / "out" / "generation_config.json") == {"pad_token_id": 3, **settings}
    config = read(tmp_path / "out" / "config.json")
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == ([5, 7], 3, None)


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        ("qwen3_moe", {"tokenizer_class": "Qwen2Tokenizer"}, "Qwen2Tokenizer.*tokenizes"),
        ("deepseek_v3", {"auto_map": {"AutoTokenizer": ["other.Other", None]}}, "cannot read"),
    ],
    ids=["other tokens", "other class"],
)
def test_a_difference_from_auto_tokenizer_is_a_warning(tmp_path, caplog, case, settings, says):
    files = {
        "tokenizer.json": byte_level("<|endoftext|>"),
        "tokenizer_config.json": {**settings, "eos_token": "<|endoftext|>"},
    }
    source = written(tmp_path / "theirs", files, case)
    import_folder(source, tmp_path / "run")
    (line,) = [record.getMessage() for record in caplog.records if "AutoTokenizer" in record.getMessage()]
    assert re.search(rf"{says}.*tokenizer\.json, and an export of a GPT converts", line), line
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    ours = load_tokenizer(source / "tokenizer.json")
    assert auto(tmp_path / "out")(TEXT)["input_ids"] == ours.encode(TEXT)


def test_another_end_in_auto_tokenizer_is_a_warning(tmp_path, caplog):
    """As a folder whose eos is only in special_tokens_map.json, which added_tokens_decoder switches off."""
    names = ("<|endoftext|>", "</s>")
    files = {
        "tokenizer.json": byte_level(*names),
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": {}},
    }
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "one", files))
    theirs = SimpleNamespace(eos_token_id=1, get_added_vocab=dict)
    assert tokenizer.end_of_document == 0 and not _has_same_end(theirs, tokenizer)
    files["special_tokens_map.json"] = {"eos_token": names[1]}
    files["tokenizer_config.json"] = {"eos_token": names[0], "add_bos_token": True, "bos_token": names[1]}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "two", files))
    tokenizer.end_documents_with(0)
    folder = tmp_path / "out"
    write_tokenizer(folder, files_for(tokenizer, 32, model_type="mixtral"))
    assert auto(folder).eos_token_id == 0, "the export states the model's end"
    tokenizer.end_documents_with(1)
    check_tokenizer(tokenizer, "mixtral", VOCAB)
    assert not caplog.records
    tokenizer.end_documents_with(0)
    check_tokenizer(tokenizer, "mixtral", VOCAB)
    assert "ends documents with token 1, but tokenizer.json with 0" in caplog.text


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_padding_without_an_id_is_left_out(tmp_path, caplog, file):
    files = {"tokenizer.json": byte_level("<|endoftext|>"), "tokenizer_config.json": {"eos_token": "<|endoftext|>"}}
    files[file] = {**files.get(file, {}), "pad_token": "[PAD]", "mask_token": "<mask>"}
    import_folder(written(tmp_path / "theirs", files), tmp_path / "run")
    for key in ("pad_token='[PAD]'", "mask_token='<mask>'"):
        assert any(file in line and key in line for line in caplog.messages), caplog.messages
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    theirs = auto(tmp_path / "out")
    assert theirs.pad_token is None and theirs.mask_token is None
    assert "[PAD]" not in theirs.get_vocab()


@pytest.mark.parametrize(("past", "is_accepted"), [(0, True), (VOCAB, False), (-1, False)])
def test_added_tokens_of_a_sentencepiece_model(tmp_path, past, is_accepted):
    """As fine-tuned models of Llama 2: an added token for padding."""
    files, config, *_ = FORMS["llama 2"]
    files = files()
    size = sentencepiece.SentencePieceProcessor(model_proto=files["tokenizer.model"]).vocab_size()
    files["tokenizer_config.json"]["pad_token"] = "[PAD]"
    files["added_tokens.json"] = {"[PAD]": size + past}
    source = written(tmp_path / "theirs", files, **config)
    if not is_accepted:
        with pytest.raises(UserError, match=r"\[PAD\]"):
            import_folder(source, tmp_path / "run")
        return
    import_folder(source, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert auto(tmp_path / "out").pad_token_id == size


IDS = {
    "eos_token_id": [1, 2],
    "bos_token_id": 0,
    "suppress_tokens": [9],
    "bad_words_ids": [[3]],
    "forced_bos_token_id": 4,
}


@pytest.mark.parametrize("given", ["none", "other", "own"])
def test_ids_of_another_tokenizer_are_not_kept(tmp_path, given):
    files, config, *_ = FORMS["llama 3"]
    source = written(tmp_path / "theirs", {**files(), "generation_config.json": {**IDS, "top_p": 0.9}}, **config)
    other = tmp_path / "mine.json"
    other.write_bytes(byte_level("<pad>", "<eod>"))
    path = {"none": "none", "other": str(other), "own": str(source / "tokenizer.json")}[given]
    import_folder(source, tmp_path / "run", tokenizer=path)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    generation, values = (read(tmp_path / "out" / name) for name in ("generation_config.json", "config.json"))
    assert generation["top_p"] == 0.9
    assert ("bad_words_ids" in generation, "forced_bos_token_id" in generation) == (given == "own",) * 2
    assert values["eos_token_id"] == {"none": None, "other": 1, "own": [1, 2]}[given]
    assert generation.get("eos_token_id") == values["eos_token_id"]
    assert 9 not in generation.get("suppress_tokens", ()) or given == "own"


def test_a_warm_start_with_another_tokenizer_keeps_no_ids(monkeypatch):
    published = {"config": {"eos_token_id": 2}, "generation_config": {**IDS, "top_p": 0.9}}
    monkeypatch.setattr("pretrain.trainer.state.load_weights", lambda engine, checkpoint: None)
    for known, kept in ((None, False), ("x", False), ("mine", True)):
        trainer = Trainer.__new__(Trainer)
        trainer.engine, trainer.inputs = None, SimpleNamespace(tokenizer_fingerprint="mine")
        trainer.warm_start(SimpleNamespace(state={"published": published, "data": {"tokenizer": known}}))
        assert trainer._published == (published if kept else {"generation_config": {"top_p": 0.9}})


@pytest.mark.parametrize("has_corpus", [False, True])
def test_an_older_checkpoint_keeps_its_end(tmp_path, caplog, has_corpus):
    """Of a run from before declared tokens, which ended documents by name."""
    files, *_ = FORMS["llama 3"]
    path = write_tokenizer(tmp_path / "tokenizer", files())
    tokenizer = load_tokenizer(path)
    recipe = Recipe(data=DataConfig(tokenizer=str(path), train=(str(tmp_path / "corpus"),)))
    if has_corpus:
        (tmp_path / "text.txt").write_text(TEXT)
        prepare([tmp_path / "text.txt"], path, tmp_path / "corpus", num_workers=1)
        described = read(tmp_path / "corpus.json")
        described["tokenizer"]["end_of_document"] = 1
        (tmp_path / "corpus.json").write_text(json.dumps(described))
    data = {"tokenizer": tokenizer.fingerprint}
    assert open_trained_tokenizer(recipe, None, data).end_of_document == (1 if has_corpus else 2)
    told = [line for line in caplog.messages if all(name in line for name in LLAMA3[1:])]
    assert len(told) == (not has_corpus) and ("tokenizer_config.json" in told[0] if told else True)
    assert open_trained_tokenizer(recipe, None, {**data, "end_of_document": 2}).end_of_document == 2


def two_in_front() -> bytes:
    """A tokenizer that puts two tokens in front of a text, as those of GLM-4's chat models."""
    model = Model.from_buffer(byte_level("<|endoftext|>", "[gMASK]", "<sop>"))
    model.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", 1), ("<sop>", 2)]
    )
    return model.to_str().encode()


def with_new_token(**settings) -> dict:
    return {
        "tokenizer.json": byte_level("<|endoftext|>"),
        "tokenizer_config.json": {"eos_token": "<|endoftext|>", **settings},
    }


REFUSED = {
    "several tokens in front": (lambda: {"tokenizer.json": two_in_front()}, r"tokenizer\.json .*data\.bos"),
    "BOS without an id": (lambda: with_new_token(bos_token="[NEW]"), r"tokenizer_config\.json.*'\[NEW\]'"),
    "another token without an id": (
        lambda: with_new_token(additional_special_tokens=["[NEW]"]),
        r"tokenizer_config\.json.*'\[NEW\]'",
    ),
    "files of GPT-2": (lambda: {"vocab.json": b"x", "merges.txt": b"x"}, r"vocab\.json, merges\.txt"),
    "a damaged file": (lambda: {"tokenizer.json": b"{}"}, r"not a tokenizer\.json .*--tokenizer"),
    "a file of T5": (lambda: {"spiece.model": b"x"}, r"spiece\.model"),
    "a file of Kimi": (lambda: {"tiktoken.model": b"x"}, r"tiktoken\.model"),
    "a file of BERT": (lambda: {"vocab.txt": b"x"}, r"vocab\.txt"),
    "a file of Mistral": (lambda: {"tekken.json": b"x"}, r"tekken\.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokenizers_that_are_refused(tmp_path, case):
    files, message = REFUSED[case]
    source = written(tmp_path / "theirs", files())
    with pytest.raises(UserError, match=message):
        import_folder(source, tmp_path / "run")
    assert import_folder(source, tmp_path / "run", tokenizer="none").tokenizer is None
