"""MoE layers of fmoe in Megatron-core models, and a runtime for machines without a GPU.

Without a GPU, call ``megatron_patch.cpu.install()`` before using megatron-core. From version 0.18 on, megatron-core
needs Triton. If Triton is not installed, import this package before megatron-core.
"""

import logging
import warnings

from megatron_patch import versions

# Several modules of megatron-core warn about Apex when they are imported. Apex is optional.
warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")  # megatron-core imports it
# torch.utils.cpp_extension, which megatron-core imports, warns about a CUDA toolkit on a machine without a GPU.
_toolkit = logging.getLogger("torch.utils.cpp_extension")
_toolkit.addFilter(lambda record: "No CUDA runtime is found" not in record.getMessage())
# Megatron-core calls collectives by names that torch 2.13 has replaced: each rank would print two warnings for each.
warnings.filterwarnings("ignore", message=".*(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated")
# From version 0.19 on, its DDP asks callers for a layout, which it computes itself.
_log = logging.getLogger("megatron.core.distributed.distributed_data_parallel")
_log.addFilter(lambda record: "full_param_layout" not in record.getMessage())
versions.check()
with versions.without_triton():
    import megatron.core  # noqa: F401

from megatron_patch.layer import MegatronMoE  # noqa: E402
from megatron_patch.models import fmoe_layer_spec, fmoefy  # noqa: E402
from megatron_patch.moe_layer import convert_moe_layers, fmoe_state_dict  # noqa: E402

MegatronFMoE = MegatronMoE  # the name until 0.1

__all__ = ["MegatronFMoE", "MegatronMoE", "convert_moe_layers", "fmoe_layer_spec", "fmoe_state_dict", "fmoefy"]
