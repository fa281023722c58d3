"""Fine-tune a model of Hugging Face on conversations: import, prepare, train, export. CPU, a minute.

    python examples/finetune.py [CONVERSATIONS.jsonl [FOLDER]]

The model is a small Qwen3-MoE with random weights; for a real one, replace `make_model` by its folder. The
conversations are by default questions about Python and the first sentences of its documentation.
"""

import builtins
import contextlib
import inspect
import json
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig

from fmoe.cli import main
from pretrain.tracking import read_metrics

VOCAB = 1024
LENGTH = 128
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def questions() -> list[dict]:
    """Rows with the key ``messages``, from the docstrings of Python's own classes."""
    rows = []
    for kind in vars(builtins).values():
        for name, member in inspect.getmembers(kind) if inspect.isclass(kind) else ():
            text = inspect.getdoc(member)
            if text and not name.startswith("_"):
                question = {"role": "user", "content": f"What does {kind.__name__}.{name} do?"}
                rows.append({"messages": [question, {"role": "assistant", "content": text.partition("\n\n")[0]}]})
    return rows


def make_model(folder: Path, rows: list[dict]) -> None:
    """Write a small model and its tokenizer, as they are published."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([message["content"] for row in rows for message in row["messages"]], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML).save_pretrained(
        folder
    )
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def fmoe(*words: object) -> None:
    """Run a command, as ``fmoe WORDS`` in a shell; its output goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        code = main([str(word) for word in words])
    if code:
        sys.exit(code)


def run(rows: list[dict], folder: Path) -> None:
    """Fine-tune in ``folder``, and print losses and an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[20:]), ("validation", rows[:20])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    make_model(folder / "published", rows)
    fmoe("import", folder / "published", folder / "base")
    for name in ("train", "validation"):
        fmoe(
            *("data", "prepare", folder / f"{name}.jsonl", "--chat", "--out", folder / name),
            *("--tokenizer", folder / "base/tokenizer/tokenizer.json", "--workers", "1"),
        )
    fmoe(
        *("train", folder / "base/config.toml", "--run.folder", folder / "tuned", "--data.chat"),
        *("--data.train", folder / "train", "--data.validation", folder / "validation"),
        *("--train.steps", 30, "--train.global-batch", 16, "--train.validation-every", 10, "--optimizer.lr", "1e-2"),
        *("--train.validation-sequences", 8, "--tracking.no-wandb"),
    )
    fmoe("export", folder / "tuned", folder / "out")
    for row in read_metrics(folder / "tuned" / "metrics.jsonl"):
        if "val/loss" in row:
            print(f"step {row['step']:3}  loss of answers {row['val/loss']:.4f}")

    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    question = rows[0]["messages"][:1]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    print(f"{question[0]['content']!r} -> {tokenizer.decode(answer, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    given = sys.argv[1:]
    conversations = [json.loads(line) for line in Path(given[0]).read_text().splitlines()] if given else questions()
    with tempfile.TemporaryDirectory() as temporary:
        run(conversations, Path(given[1] if len(given) > 1 else temporary))
