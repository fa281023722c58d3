"""FastMoE's Megatron-LM plugin, importable without Megatron.

`fmoefy` changes megatron-core models and those of Megatron-LM 2.2 to 3.0's layout. FastMoE also replaced parts of
Megatron-LM's training loop; those names are here to say what does their work now.
"""

from fmoe.megatron.balance import generate_megatron_gate_hook, get_balance_profile, reset_gate_hook
from fmoe.megatron.layers import MegatronMLP, fmoefy
from fmoe.megatron.utils import add_fmoe_args, gone

add_balance_log = gone("add_balance_log", "fmoe.metrics(model) has load, drop rate and losses of every layer")
load_checkpoint = gone("load_checkpoint", "experts are part of megatron-core's own distributed checkpoints")
save_checkpoint = gone("save_checkpoint", "experts are part of megatron-core's own distributed checkpoints")
patch_forward_step = gone("patch_forward_step", "layers of a megatron-core model apply their losses themselves")
patch_model_provider = gone("patch_model_provider", "call fmoe.fmoefy on the model that the provider returns")
DistributedDataParallel = gone(
    "DistributedDataParallel",
    "megatron-core's own knows experts; elsewhere there is fmoe.DistributedGroupedDataParallel",
)

__all__ = [
    "DistributedDataParallel",
    "MegatronMLP",
    "add_balance_log",
    "add_fmoe_args",
    "fmoefy",
    "generate_megatron_gate_hook",
    "get_balance_profile",
    "load_checkpoint",
    "patch_forward_step",
    "patch_model_provider",
    "reset_gate_hook",
    "save_checkpoint",
]
