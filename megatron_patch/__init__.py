"""The Megatron-core adapter: FMoE layers in GPT models, and a runtime for machines without a GPU.

``cpu.install()`` comes first where there is no GPU; it does nothing where there is one.
"""

from megatron_patch.layer import MegatronFMoE
from megatron_patch.patch import fmoe_layer_spec, fmoefy

__all__ = ["MegatronFMoE", "fmoe_layer_spec", "fmoefy"]
