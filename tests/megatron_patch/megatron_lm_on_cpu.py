"""Start a training program of Megatron-LM without a GPU. Not a test.

    torchrun --nproc-per-node 2 tests/megatron_patch/megatron_lm_on_cpu.py Megatron-LM/pretrain_gpt.py ARGUMENTS

Megatron-LM's programs ask for a GPU themselves, besides those of megatron-core's functions that `megatron_patch.cpu`
redirects. The installed megatron-core is used, not the one beside the program.
"""

import functools
import importlib.util
import os
import runpy
import sys
from types import ModuleType

import torch

from megatron_patch import cpu

KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def main():
    program = sys.argv[1]
    sys.path.append(os.environ.get("FMOE_MEGATRON_LM", os.path.dirname(program)))
    cpu.install()
    alone = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **alone)
    torch.cuda.device_count = lambda: 1  # process groups are made for GPUs only
    torch.cuda.get_rng_state = torch.get_rng_state  # kept to run a step again
    if importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = ModuleType(KERNELS)  # Triton kernels, imported for an option that is not used
        sys.modules[KERNELS].enable_batch_invariant_mode = None
    from megatron.training import initialize, training

    initialize._compile_dependencies = lambda: None  # the wheel of megatron-core has its helpers, and kernels need nvcc
    training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    sys.argv = sys.argv[1:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
