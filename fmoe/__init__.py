"""fmoe: Mixture-of-Experts layers for PyTorch, from one CPU to a cluster. Only torch is required.

The names of this package are imported at their first use. Commands that need no torch, such as ``fmoe data``, thus
start without it.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

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
    "parallelize",
    "register_adapter",
    "register_exchange",
    "register_expert",
    "register_family",
    "register_gate",
    "set_loss_scale",
]

if TYPE_CHECKING:
    from fmoe.auxiliary import collect_losses, set_loss_scale
    from fmoe.convert import fmoefy, register_family
    from fmoe.convert import register_family as register_adapter  # the old name, kept for existing code
    from fmoe.errors import MissingPackageError, UserError
    from fmoe.exchange import register_exchange
    from fmoe.experts import register_expert
    from fmoe.fastmoe import DistributedGroupedDataParallel, FMoE, FMoELinear, FMoETransformerMLP
    from fmoe.gates import attach_end_step, end_step, register_gate
    from fmoe.kernels.rows import DispatchPlan
    from fmoe.metrics import metrics
    from fmoe.moe import MoE
    from fmoe.parallel.parallelize import parallelize
    from fmoe.routing import Routing, RoutingGroups, RoutingStats
    from fmoe.soft import MMoE, SoftMoE
else:
    _HOMES = {
        "auxiliary": ("collect_losses", "set_loss_scale"),
        "convert": ("fmoefy", "register_family"),
        "errors": ("MissingPackageError", "UserError"),
        "exchange": ("register_exchange",),
        "experts": ("register_expert",),
        "fastmoe": ("DistributedGroupedDataParallel", "FMoE", "FMoELinear", "FMoETransformerMLP"),
        "gates": ("attach_end_step", "end_step", "register_gate"),
        "kernels.rows": ("DispatchPlan",),
        "metrics": ("metrics",),
        "moe": ("MoE",),
        "parallel.parallelize": ("parallelize",),
        "routing": ("Routing", "RoutingGroups", "RoutingStats"),
        "soft": ("MMoE", "SoftMoE"),
    }

    def __getattr__(name: str) -> Any:
        if name == "register_adapter":
            return __getattr__("register_family")
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = getattr(importlib.import_module(f"fmoe.{home}"), name)
                return globals()[name]
        try:
            if not name.startswith("_"):
                return importlib.import_module(f"fmoe.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"fmoe.{name}":
                raise
        raise AttributeError(f"module 'fmoe' has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    class _Package(ModuleType):
        """This package, where ``metrics`` is the function, not the module, which the import system would set."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "metrics" or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package


# Import paths of FastMoE's API, which `fmoe.fastmoe` sets.
_FASTMOE_PATHS = frozenset(
    [
        "fmoe.balance",
        "fmoe.distributed",
        "fmoe.functions",
        "fmoe.layers",
        "fmoe.linear",
        "fmoe.transformer",
        "fmoe.utils",
        "fmoe.fastermoe",
        "fmoe.fastermoe.config",
        "fmoe.fastermoe.schedule",
        "fmoe.fastermoe.shadow_policy",
        "fmoe.gates.base_gate",
        "fmoe.gates.dc_gate",
        "fmoe.gates.faster_gate",
        "fmoe.gates.gshard_gate",
        "fmoe.gates.naive_gate",
        "fmoe.gates.noisy_gate",
        "fmoe.gates.swipe_gate",
        "fmoe.gates.switch_gate",
        "fmoe.gates.utils",
        "fmoe.gates.zero_gate",
        "fmoe.megatron",
        "fmoe.megatron.balance",
        "fmoe.megatron.layers",
        "fmoe.megatron.utils",
    ]
)


class _FastMoE:
    """Finder and loader of FastMoE's import paths, for an import before `fmoe.fastmoe` is imported."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls) if name in _FASTMOE_PATHS else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let the import system create a module, whose place the module of `fmoe.fastmoe` takes."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        importlib.import_module("fmoe.fastmoe")


if not any(getattr(finder, "__qualname__", "") == "_FastMoE" for finder in sys.meta_path):  # a reload has it already
    sys.meta_path.append(_FastMoE)
