"""The Megatron-core adapter: FMoE layers in GPT models, and a runtime for machines without a GPU.

``cpu.install()`` comes first where there is no GPU; it does nothing where there is one.
"""

import warnings

# Said by four modules of megatron-core when they are loaded. Nothing here needs either; where they are, they are used.
warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")

from megatron_patch.layer import MegatronMoE  # noqa: E402
from megatron_patch.patch import fmoe_layer_spec, fmoefy  # noqa: E402
from megatron_patch.takeover import convert_moe_layers, fmoe_state_dict  # noqa: E402

MegatronFMoE = MegatronMoE  # the name until 0.1

__all__ = ["MegatronFMoE", "MegatronMoE", "convert_moe_layers", "fmoe_layer_spec", "fmoe_state_dict", "fmoefy"]
