"""Train a model that has experts with Hugging Face's Trainer. Experts and parameters are spread over the processes.

    pip install transformers accelerate
    python examples/parallel_trainer.py
    torchrun --nproc-per-node 2 examples/parallel_trainer.py     # 4 of the 8 experts on each process

The model reads bytes and is randomly initialized, so that this needs no download and ends in seconds. The losses are
the same on one process and on two.
"""

import os
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments, set_seed

import fmoe
from fmoe import parallel

TEXT = sorted((Path(__file__).parent.parent / "docs").glob("[a-f]*.md"))
LENGTH, BATCH = 64, 16


class ParallelTrainer(parallel.TrainerMixin, Trainer):
    """Trainer of a split model. The mixin serves subclasses of Trainer, such as TRL's SFTTrainer, in the same way."""


def make_model() -> torch.nn.Module:
    """Return a Qwen3-MoE with 8 experts in each layer."""
    set_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"head_dim": 16, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))


def make_data() -> list[dict[str, torch.Tensor]]:
    """Return sequences of LENGTH bytes."""
    text = torch.tensor(list(b"".join(path.read_bytes() for path in TEXT)))
    return [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]


def main(**options) -> Trainer:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    model = fmoe.parallelize(make_model(), ep=processes, shard="full")
    settings = {"output_dir": tempfile.mkdtemp(), "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings |= {"max_steps": 40, "logging_steps": 10, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": BATCH // processes, "max_grad_norm": 0.5}
    settings |= {"use_cpu": not torch.cuda.is_available()}  # on CPUs, Accelerate divides the data only if told so
    trainer = ParallelTrainer(model, TrainingArguments(**settings | options), train_dataset=make_data())
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        for logs in trainer.state.log_history[:-1]:
            print(f"step {logs['step']:3d}  grad_norm {logs['grad_norm']:.3f}  loss {logs['loss']:.3f}")
    return trainer


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
