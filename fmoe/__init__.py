"""fmoe: Mixture-of-Experts layers for PyTorch, from one CPU to a cluster. Only torch is required."""

from fmoe.convert import fmoefy, register_family
from fmoe.errors import MissingPackageError, UserError
from fmoe.exchange import register_exchange
from fmoe.experts import register_expert
from fmoe.gates import attach_end_step, end_step, register_gate
from fmoe.kernels.rows import DispatchPlan
from fmoe.losses import collect_losses, set_loss_scale
from fmoe.metrics import metrics
from fmoe.moe import MoE
from fmoe.routing import Routing, RoutingGroups, RoutingStats
from fmoe.soft import MMoE, SoftMoE

# isort: split
# Last, because it adds FastMoE's import paths to the modules above.
from fmoe.fastmoe import DistributedGroupedDataParallel, FMoE, FMoELinear, FMoETransformerMLP

__version__ = "0.1.0"

register_adapter = register_family  # the old name, kept for existing code

__all__ = [
    "DispatchPlan",
    "DistributedGroupedDataParallel",
    "FMoE",
    "FMoELinear",
    "FMoETransformerMLP",
    "MMoE",
    "MissingPackageError",
    "MoE",
    "Routing",
    "RoutingGroups",
    "RoutingStats",
    "SoftMoE",
    "UserError",
    "attach_end_step",
    "collect_losses",
    "end_step",
    "fmoefy",
    "metrics",
    "register_adapter",
    "register_exchange",
    "register_expert",
    "register_family",
    "register_gate",
    "set_loss_scale",
]
