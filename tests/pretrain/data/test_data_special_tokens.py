"""Special tokens: no text is encoded as one, and those that the files beside a tokenizer declare are used."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from fmoe.errors import UserError
from pretrain.data.tokenizers import Tokenizer, load_tokenizer

DEEPSEEK = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>")

TEXT = "def f(x): return x ** 2  # a square, of 12 or 345\n" * 20
AROUND = ("{}", " {}", "a{}b", "{0}{0}", "\n{}\n", "x {} y")


def byte_level(special: list[str], *, is_special: bool = True) -> dict:
    """The content of a tokenizer.json with byte-level BPE, whose first ids are those of ``special``."""
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=special,
    )
    model.train_from_iterator([TEXT], trainer)
    content = json.loads(model.to_str())
    for token in content["added_tokens"]:
        token["special"] = is_special
    return content


def saved(folder: Path, content: dict, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def merged(content: dict, name: str) -> dict:
    """The content with an ordinary piece ``name``, merged from characters; text is split only at spaces."""
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    for end in range(2, len(name) + 1):
        vocabulary[name[:end]] = max(vocabulary.values()) + 1
        merges.insert(end - 2, [name[: end - 1], name[end - 1]])
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return content


def check_text_is_text(tokenizer: Tokenizer, names: list[str]) -> None:
    for name in names:
        for around in AROUND:
            text = around.format(name)
            ids = tokenizer.encode(text)
            assert not tokenizer.special_ids.intersection(ids), (text, ids)
            assert tokenizer.decode(ids).strip() == text.strip()


ROLES = ["<eod>", "<pad>", "<cls>", "<sep>", "<mask>", "<extra_id_0>", "<extra_id_1>", "<bos>", "<|endoftext|>", "</s>"]


def test_tokens_with_a_role_are_special_even_if_not_marked(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, byte_level(ROLES, is_special=False)))
    check_text_is_text(tokenizer, ROLES)
    assert (tokenizer.end_of_document, tokenizer.pad, tokenizer.bos) == (0, 1, 7)
    assert [tokenizer.role(name) for name in ("cls", "sep", "mask")] == [2, 3, 4]
    assert tokenizer.sentinels == (5, 6)
    assert tokenizer.decode(range(len(ROLES))) == ""


def test_other_added_tokens_stay_text(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, byte_level(["<eod>", "<tool>"], is_special=False)))
    assert tokenizer.encode("a<tool>")[-1] == 1 and tokenizer.decode([1]) == "<tool>"


@pytest.mark.parametrize("name", ["</s>", "<extra_id_0>", "<mask>"])
def test_an_ordinary_piece_has_no_role(tmp_path, name):
    tokenizer = load_tokenizer(saved(tmp_path, merged(byte_level(["<|im_end|>"]), name), eos_token="<|im_end|>"))
    ids = tokenizer.encode(name)
    assert len(ids) == 1 and ids[0] not in tokenizer.special_ids and tokenizer.decode(ids) == name
    assert tokenizer.end_of_document == 0 and tokenizer.sentinels == ()
    with pytest.raises(UserError, match="no piece for mask"):
        tokenizer.role("mask")


def test_an_ordinary_piece_ends_no_document(tmp_path):
    with pytest.raises(UserError, match=r"no piece that ends documents.*tokenizer_config\.json"):
        load_tokenizer(saved(tmp_path, merged(byte_level([]), "</s>")))


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_piece_that_is_declared_to_be_special_is_no_text(tmp_path, is_marked):
    content = merged(byte_level([]), "</s>")
    number = content["model"]["vocab"]["</s>"]
    if is_marked:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"] = [{"id": number, "content": "</s>", "special": True, **flags}]
    tokenizer = load_tokenizer(saved(tmp_path, content, eos_token={"__type": "AddedToken", "content": "</s>"}))
    assert tokenizer.end_of_document == number
    check_text_is_text(tokenizer, ["</s>"])
    plain = load_tokenizer(saved(tmp_path / "plain", byte_level(["</s>"])))
    assert len(tokenizer.encode(TEXT)) <= len(plain.encode(TEXT)), "only the name is cut"


def test_a_unigram_model_reads_names_as_text(tmp_path):
    """As T5's and XLM-R's: the vocabulary holds the special tokens with the score 0."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(c, -4.0) for c in "<>/sabxyextra_id0"] + [("<extra_id_0>", 0.0)]
    model = Model(models.Unigram(pieces, unk_id=2))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "</s>", "<unk>", "<extra_id_0>")])
    tokenizer = load_tokenizer(saved(tmp_path, json.loads(model.to_str())))
    assert tokenizer.end_of_document == 1 and len(tokenizer.sentinels) == 1
    for name in ("</s>", "<extra_id_0>"):
        for around in AROUND[:5]:
            ids = tokenizer.encode(around.format(name))
            assert not {1, *tokenizer.sentinels}.intersection(ids), around
    assert tokenizer.decode(tokenizer.encode("a </s> b")) == "a </s> b"


def piece_model(**options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT.split("\n"), "</s>!" * 3]),
        model_writer=model,
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_user_defined_symbols_with_a_role_are_no_text(tmp_path, normalization):
    names = ["<mask>", "<cls>", "<sep>", "<extra_id_0>", "<eod>", "<tool>"]
    data = piece_model(user_defined_symbols=names, normalization_rule_name=normalization)
    (tmp_path / "t.model").write_bytes(data)
    tokenizer = load_tokenizer(tmp_path / "t.model")
    check_text_is_text(tokenizer, names[:-1])
    full_width = tokenizer.encode("\uff1cmask\uff1e")  # NFKC makes <mask> of it
    assert not tokenizer.special_ids.intersection(full_width)
    assert tokenizer.role("mask") == tokenizer.ids["<mask>"] and len(tokenizer.sentinels) == 1
    assert tokenizer.ids["<tool>"] in tokenizer.encode("a <tool> b"), "a symbol without a role"
    assert tokenizer.fingerprint == load_tokenizer(tmp_path / "t.model").fingerprint


@pytest.mark.parametrize("kind", ["json", "sentencepiece"])
def test_the_declared_end_of_document_comes_first(tmp_path, kind):
    names = ["<|endoftext|>", "<s>", "</s>", "<|im_end|>"]
    if kind == "json":
        path = saved(tmp_path, byte_level(names))
    else:
        path = tmp_path / "tokenizer.model"
        path.write_bytes(piece_model(user_defined_symbols=["<|im_end|>", "<|endoftext|>"]))
    by_name = load_tokenizer(path)
    assert by_name.end_of_document == by_name.ids["<|endoftext|>" if kind == "json" else "</s>"]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>", "bos_token": null}')
    assert load_tokenizer(path).end_of_document == by_name.ids["<s>"]
    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}'
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.end_of_document == tokenizer.ids["<|im_end|>"]
    assert tokenizer.pad == tokenizer.ids["<|endoftext|>"] and tokenizer.fingerprint == by_name.fingerprint
    assert tokenizer.end_by_name == by_name.end_of_document
    check_text_is_text(tokenizer, ["<|im_end|>"])
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<other>"}')
    with pytest.raises(UserError, match=r"'<other>'.*special_tokens_map\.json"):
        load_tokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>", "added_tokens_decoder": {}}')
    (tmp_path / "added_tokens.json").write_text('{"<new>": 5000}')
    tokenizer = load_tokenizer(path)
    assert tokenizer.end_of_document == by_name.ids["<s>"], "with a decoder, the settings alone count"
    assert tokenizer.vocab_size == by_name.vocab_size


@pytest.mark.parametrize("kind", ["ordinary", "added", "marked", "sentencepiece"])
def test_padding_that_text_needs_stays_text(tmp_path, kind):
    """As CLIP's, whose padding is an exclamation mark."""
    content = byte_level(["<eod>"])
    if kind in ("added", "marked"):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        number = content["model"]["vocab"]["!"]
        content["added_tokens"].append({"id": number, "content": "!", "special": kind == "marked", **flags})
    path = saved(tmp_path, content, pad_token="!")
    if kind == "sentencepiece":
        path = tmp_path / "tokenizer.model"
        path.write_bytes(piece_model())
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("a! b")) == "a! b" and tokenizer.pad is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    with pytest.raises(UserError, match=r"'!'.*eos_token"):
        load_tokenizer(path)


def test_the_names_of_deepseek(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, byte_level(list(DEEPSEEK))))
    assert (tokenizer.bos, tokenizer.end_of_document, tokenizer.adds_bos) == (0, 1, False)
    declared = {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1], "add_bos_token": True}
    tokenizer = load_tokenizer(saved(tmp_path, byte_level(list(DEEPSEEK)), **declared))
    assert (tokenizer.bos, tokenizer.end_of_document, tokenizer.adds_bos) == (0, 1, True)


def test_tokens_that_only_the_settings_declare(tmp_path):
    """As Qwen2's: the ids follow those of the vocabulary."""
    content = byte_level([])
    size = len(content["model"]["vocab"])
    added = {str(size + 1): {"content": "<|im_end|>", "special": True}, str(size): {"content": "<|endoftext|>"}}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = load_tokenizer(saved(tmp_path, content, **settings))
    assert (tokenizer.end_of_document, tokenizer.pad, tokenizer.vocab_size) == (size + 1, size, size + 2)
    check_text_is_text(tokenizer, ["<|im_end|>", "<|endoftext|>"])
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    assert load_tokenizer(tmp_path / "tokenizer.json").end_of_document == size
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 5}))
    with pytest.raises(UserError, match=rf"added_tokens\.json.*<\|im_end\|>.* id {size + 5}.* id {size}\b"):
        load_tokenizer(tmp_path / "tokenizer.json")
    added[str(size + 5)] = added.pop(str(size))
    with pytest.raises(UserError, match=rf"tokenizer_config\.json.*<\|im_end\|>.* id {size + 1}.* id {size}\b"):
        load_tokenizer(saved(tmp_path, content, **settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('{"eos_token": "<other>"}', "'<other>'.*eos_token"),
        ('{"eos_token": 7}', "eos_token=7"),
        ('{"eos_token": {"id": 7}}', "eos_token=.*content"),
        ('{"added_tokens_decoder": {"x": {"content": "<x>"}}}', "valid id.*'x'"),
        ('{"added_tokens_decoder": ["<x>"]}', "valid id"),
        ("[]", "JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_damaged_settings_are_one_error(tmp_path, settings, says):
    path = saved(tmp_path, byte_level(["<eod>"]))
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(UserError, match=rf"(?s)tokenizer_config\.json.*{says}|{says}.*tokenizer_config\.json"):
        load_tokenizer(path)


def test_a_tokenizer_by_another_name_has_no_declarations(tmp_path):
    path = saved(tmp_path, byte_level(["<eod>"]), eos_token="<other>").rename(tmp_path / "mine.json")
    assert load_tokenizer(path).end_of_document == 0


def test_unknown_characters_end_no_document(tmp_path):
    model = Model(models.WordLevel({"a": 0, "</s>": 1}, unk_token="</s>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match="unknown characters as token 1"):
        load_tokenizer(saved(tmp_path, json.loads(model.to_str())))
