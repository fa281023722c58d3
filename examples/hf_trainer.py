"""Train a Llama with experts on local text with Hugging Face's Trainer, on one process or several:

    pip install transformers accelerate
    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py     # every process holds all experts

The model reads bytes and is randomly initialized, so that this needs no download and ends in seconds.
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import fmoe

TEXT = sorted((Path(__file__).parent.parent / "docs").glob("[a-f]*.md"))
LENGTH = 64


class MoETrainer(Trainer):
    """Trainer that scales the auxiliary losses like the training loss, and logs the routing of every layer."""

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        scaler = self.accelerator.scaler  # of fp16
        scale = 1.0 if scaler is None else scaler.get_scale()
        fmoe.set_loss_scale(scale / self.current_gradient_accumulation_steps)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            fmoe.set_loss_scale(1.0)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        for name, layer in self.model.named_modules():
            if isinstance(layer, fmoe.MoE):
                sums = self.accelerator.reduce(layer.metrics.sums(self.args.device))  # over all processes
                report = layer.metrics.report(sums)
                layer.metrics.reset()
                if report.tokens:
                    logs |= {f"{name}/load_cv": report.load_cv, f"{name}/drop_rate": report.drop_rate}
                    logs |= {f"{name}/{loss}": value for loss, value in report.losses.items()}
        super().log(logs, *args, **kwargs)


def make_model(**options) -> torch.nn.Module:
    """Return a Llama whose feed-forward blocks become 8 experts each."""
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    return fmoe.fmoefy(model, num_experts=8, top_k=2, seed=0, noise=0.1, **options)


def make_data() -> list[dict[str, torch.Tensor]]:
    """Return sequences of LENGTH bytes."""
    text = torch.tensor(list(b"".join(path.read_bytes() for path in TEXT)))
    return [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]


def main(model: torch.nn.Module, data: list[dict[str, torch.Tensor]], **options) -> Trainer:
    settings = {"output_dir": tempfile.mkdtemp(), "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings |= {"max_steps": 40, "logging_steps": 10, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer = MoETrainer(model, TrainingArguments(**settings | options), train_dataset=data)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    for logs in trainer.state.log_history[:-1]:
        print(f"step {logs['step']:3d}  load_cv {logs['model.layers.0.mlp/load_cv']:.2f}  loss {logs['loss']:.3f}")
    return trainer


if __name__ == "__main__":
    main(make_model(), make_data())
