"""Peak FLOP/s of the devices, for the model FLOPs utilization (MFU)."""

import time

import torch
import torch.distributed as dist

from megatron_patch import bf16_linear
from pretrain.models.config import DTYPES

# Dense FLOP/s of GPUs by name and precision, from the vendor's data sheets (fp32 without TF32).
_GPUS = {
    "A100": {"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12},
    "H100": {"fp16": 989e12, "bf16": 989e12, "fp32": 67e12},
    "H200": {"fp16": 989e12, "bf16": 989e12, "fp32": 67e12},
    "B200": {"fp16": 2250e12, "bf16": 2250e12, "fp32": 80e12},
}
_SECONDS = 0.15  # time in which products are measured


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the peak FLOP/s of all ranks together. Collective.

    The rates of known GPUs come from a table. For other devices, the rate is that of the fastest of many products of
    square matrices, measured on all ranks at the same time. The largest matrices have size 8,192 on a GPU and 1,024 on
    a CPU (256 for fp16).
    """
    rate = 0.0
    dtype = DTYPES[precision]
    if device.type == "cuda":
        size = 8192
        name = torch.cuda.get_device_name(device)
        rate = next((rates[precision] for gpu, rates in _GPUS.items() if gpu in name), 0.0)
    else:
        # CPUs multiply fp16 matrices some forty times slower than fp32 ones: 1,024 would take 20 seconds.
        size = 256 if precision == "fp16" else 1024
    if precision == "bf16" and bf16_linear.is_needed():
        dtype = torch.float32  # in which CPUs without bf16 instructions multiply bf16 matrices
    dist.barrier()  # ranks measure at the same time; also those with a known GPU, as the others wait for them
    if not rate:
        rate = _measure(device, dtype, size)
    total = torch.tensor([rate], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total)


def _measure(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of the fastest product.

    On a busy CPU, a large product is interrupted. Small ones, of which there are many, fit between interruptions.
    """
    best = 0.0
    end = time.perf_counter() + _SECONDS
    while best == 0 or time.perf_counter() < end:
        for width in (size // 4, size // 2, size):
            a = torch.ones(width, width, dtype=dtype, device=device)
            a[0, 0].item()  # waits for a GPU
            begin = time.perf_counter()
            (a @ a)[0, 0].item()
            best = max(best, 2 * width**3 / (time.perf_counter() - begin))
    return best
