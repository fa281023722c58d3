"""A loop with Hugging Face's Accelerate trains experts that are spread over the processes.

    pip install transformers accelerate
    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py     # 4 of the 8 experts on each process

The losses are the same on one process and on two.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F

import fmoe
from fmoe import parallel

STEPS, BATCH, LENGTH, VOCABULARY = 40, 16, 16, 32
MICRO_BATCHES = 2


def make_model(**options) -> torch.nn.Module:
    set_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    fmoe.fmoefy(encoder, num_experts=8, top_k=2, seed=0, noise=0.1, **options)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), encoder, torch.nn.Linear(32, VOCABULARY))


def make_data() -> torch.Tensor:
    """Return sentences of two alternating words, and the same with one word left out (word 0)."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, VOCABULARY, (STEPS * BATCH, 2), generator=generator).repeat(1, LENGTH // 2)
    return torch.stack([words.scatter(1, torch.randint(LENGTH, (len(words), 1), generator=generator), 0), words], 1)


def main() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    groups = parallel.init(ep=accelerator.num_processes)
    model = make_model(moe_group=groups.moe_group).to(accelerator.device)
    # torch's DDP, in which prepare() would wrap the model, takes experts of different processes for replicas.
    model = parallel.DistributedDataParallel(model, groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    micro_batch = BATCH // MICRO_BATCHES // accelerator.num_processes
    loader = torch.utils.data.DataLoader(make_data(), batch_size=micro_batch)
    optimizer, loader = accelerator.prepare(optimizer, loader)

    fmoe.set_loss_scale(1 / MICRO_BATCHES)  # accelerator.backward divides the loss by the same number
    losses: list[float] = []
    total = torch.zeros((), device=accelerator.device)
    for data in loader:
        with accelerator.accumulate(model):
            tokens, words = data.unbind(1)
            loss = F.cross_entropy(model(tokens).transpose(1, 2), words)
            accelerator.backward(loss)
            total += loss.detach() / MICRO_BATCHES
            if accelerator.sync_gradients:
                parallel.clip_grad_norm_(model.parameters(), 1.0, groups=groups)  # counts every expert once
                losses.append(accelerator.reduce(total, "mean").item())
                total.zero_()
                if len(losses) % 10 == 1:
                    report = next(iter(fmoe.metrics(model, reset=True).values()))  # of this process's tokens
                    accelerator.print(f"step {len(losses):3d}  load_cv {report.load_cv:.2f}  loss {losses[-1]:.3f}")
            optimizer.step()
            optimizer.zero_grad()
    fmoe.set_loss_scale(1.0)
    return losses


if __name__ == "__main__":
    main()
