"""Train a model that has experts with Lightning. Experts and parameters are spread over the processes.

    pip install lightning transformers
    python examples/lightning_parallel.py
    torchrun --nproc-per-node 2 examples/lightning_parallel.py     # 4 of the 8 experts on each process

The model reads bytes and is randomly initialized. The losses are the same on one process and on two.
"""

import logging
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fmoe
from fmoe import parallel

TEXT = sorted((Path(__file__).parent.parent / "docs").glob("[a-f]*.md"))
LENGTH, BATCH, STEPS = 64, 16, 40


def make_model() -> torch.nn.Module:
    """Return a Qwen3-MoE with 8 experts in each layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"head_dim": 16, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))


def make_data() -> torch.Tensor:
    """Return sequences of LENGTH bytes."""
    text = torch.tensor(list(b"".join(path.read_bytes() for path in TEXT)))
    return text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


class SplitModel(lightning.LightningModule):
    """A model whose experts all processes divide, and its losses and gradient norms."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None
        self.logs: list[tuple[float, float]] = []

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls it again before it validates
            self.model = fmoe.parallelize(make_model(), ep=torch.distributed.get_world_size(), shard="full")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.0)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.loss = self.model(input_ids=batch, labels=batch).loss
        return self.loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        # Lightning's own norm leaves out the experts of other processes.
        norm = parallel.clip_grad_norm_(self.parameters(), gradient_clip_val or torch.inf, groups=self.model.groups)
        self.logs.append((self.trainer.strategy.reduce(self.loss.detach()).item(), norm.item()))
        if self.global_rank == 0 and len(self.logs) % 10 == 1:
            print(f"step {len(self.logs):3d}  grad_norm {self.logs[-1][1]:.3f}  loss {self.logs[-1][0]:.3f}")


def main(folder: str | None = None, **options) -> SplitModel:
    """Train, and save a folder for ``from_pretrained``, which all processes name alike."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = SplitModel()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    options = {"max_steps": STEPS, "gradient_clip_val": 0.5, "accelerator": "auto", **options}
    silent = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    # It leaves the model as `configure_model` made it.
    strategy = ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1)
    options |= {"devices": processes, "strategy": strategy, "use_distributed_sampler": False}  # which would shuffle
    trainer = lightning.Trainer(logger=False, **silent, **options)
    mine = make_data()[int(os.environ.get("RANK", 0)) :: processes]
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=BATCH // processes))
    if folder is not None:
        parallel.save_hf(module.model, folder, module.model.groups)
    return module


if __name__ == "__main__":
    main()
