"""fmoe: Mixture-of-Experts layers for PyTorch, from one CPU to a cluster. Needs torch alone."""

from fmoe.auxiliary import collect_losses
from fmoe.convert import fmoefy, register_family
from fmoe.dispatch import DispatchPlan
from fmoe.distributed import DistributedGroupedDataParallel
from fmoe.errors import MissingPackageError, UserError
from fmoe.experts import FMoELinear, register_expert
from fmoe.gates import attach_end_step, end_step, register_gate
from fmoe.layer import FMoE
from fmoe.losses import set_loss_scale
from fmoe.metrics import metrics
from fmoe.routing import Routing, RoutingGroups, RoutingStats
from fmoe.soft import MMoE, SoftMoE
from fmoe.transformer import FMoETransformerMLP

__version__ = "0.1.0"

__all__ = [
    "DispatchPlan",
    "DistributedGroupedDataParallel",
    "FMoE",
    "FMoELinear",
    "FMoETransformerMLP",
    "MMoE",
    "MissingPackageError",
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
    "register_expert",
    "register_family",
    "register_gate",
    "set_loss_scale",
]
