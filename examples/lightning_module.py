"""A LightningModule with experts, and a callback that scales the auxiliary losses and logs the routing.

    pip install lightning
    python examples/lightning_module.py

The model is that of accelerate_loop.py, on one process.
"""

import logging

import lightning
import torch
from torch.nn import functional as F

import fmoe

BATCH, LENGTH, VOCABULARY = 8, 16, 32


class Routing(lightning.Callback):
    """Callback that scales the auxiliary losses like the training loss, and logs the routing of every layer."""

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        fmoe.set_loss_scale(1 / trainer.accumulate_grad_batches)  # Lightning divides the loss by the same number

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        fmoe.set_loss_scale(1.0)

    def on_train_batch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule, *args) -> None:
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps:
            return
        for name, report in fmoe.metrics(module, reset=True).items():
            module.log_dict({f"{name}/load_cv": report.load_cv, f"{name}/drop_rate": report.drop_rate})


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        fmoe.fmoefy(encoder, num_experts=8, top_k=2, seed=0, noise=0.1)
        self.model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), encoder, torch.nn.Linear(32, VOCABULARY))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        tokens, words = batch.unbind(1)
        loss = F.cross_entropy(self.model(tokens).transpose(1, 2), words)
        self.losses.append(loss.item())
        if index % 20 == 0:
            print(f"step {index:3d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_data(size: int) -> torch.Tensor:
    """Return sentences of two alternating words, and the same with one word left out (word 0)."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, VOCABULARY, (size, 2), generator=generator).repeat(1, LENGTH // 2)
    return torch.stack([words.scatter(1, torch.randint(LENGTH, (size, 1), generator=generator), 0), words], 1)


def main(data: torch.Tensor, **options) -> Model:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = Model()
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 10, "accelerator": "auto", **options}
    silent = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, callbacks=[Routing()], logger=False, **silent, **options)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=BATCH))
    return model


if __name__ == "__main__":
    main(make_data(81 * BATCH))
