"""Fine-tune a model that has experts with TRL's SFTTrainer. Experts and parameters are spread over the processes.

    pip install trl
    python examples/sft_trainer.py
    torchrun --nproc-per-node 2 examples/sft_trainer.py     # 4 of the 8 experts on each process

The model reads bytes, is randomly initialized, and learns to repeat words. The losses are the same on one process and
on two.
"""

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import fmoe
from fmoe import parallel

LENGTH, BATCH, ROWS = 24, 16, 640
WORDS = ("token", "expert", "router", "gate", "rank", "layer", "shard", "weight")


class ParallelSFTTrainer(parallel.TrainerMixin, SFTTrainer):
    """SFTTrainer of a split model."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def make_model() -> torch.nn.Module:
    """Return a Qwen3-MoE with 8 experts in each layer."""
    set_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"head_dim": 16, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=258, max_position_embeddings=LENGTH, **sizes))


def make_data() -> Dataset:
    """Return prompts and completions; only the completions are trained."""
    words = [WORDS[index] for index in torch.randint(len(WORDS), (ROWS,), generator=torch.Generator().manual_seed(0))]
    return Dataset.from_list([{"prompt": f"Repeat {word}:", "completion": f" {word}"} for word in words])


def train(kind: type[SFTTrainer], model: torch.nn.Module, **options) -> SFTTrainer:
    """Train the model with a class of trainer."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    settings = {"output_dir": tempfile.mkdtemp(), "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings |= {"max_steps": 40, "logging_steps": 10, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": BATCH // processes, "max_grad_norm": 0.5, "max_length": LENGTH}
    settings |= {"bf16": False, "gradient_checkpointing": False, "train_sampling_strategy": "sequential"}
    settings |= {"router_aux_loss_coef": 0.0}  # the auxiliary loss of a process is that of its own tokens
    settings |= {"use_cpu": not torch.cuda.is_available()}
    trainer = kind(model, SFTConfig(**settings | options), train_dataset=make_data(), processing_class=make_tokenizer())
    trainer.train()
    if trainer.is_world_process_zero():
        for logs in trainer.state.log_history[:-1]:
            print(f"step {logs['step']:3d}  grad_norm {logs['grad_norm']:.3f}  loss {logs['loss']:.3f}")
    return trainer


def main(**options) -> SFTTrainer:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return train(ParallelSFTTrainer, fmoe.parallelize(make_model(), ep=processes, shard="full"), **options)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
