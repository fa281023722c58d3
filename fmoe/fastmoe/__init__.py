"""FastMoE 1.1's API on `fmoe.MoE`, under FastMoE's import paths; docs/migration.md lists the differences."""

import sys
from types import ModuleType

import fmoe.gates
from fmoe.fastmoe import (
    balance,
    distributed,
    faster_gate,
    fastermoe,
    functions,
    gates,
    layers,
    linear,
    megatron,
    transformer,
)
from fmoe.fastmoe.distributed import DistributedGroupedDataParallel
from fmoe.fastmoe.layers import FMoE
from fmoe.fastmoe.linear import FMoELinear
from fmoe.fastmoe.transformer import FMoETransformerMLP

_PATHS: dict[str, ModuleType] = {
    "layers": layers,
    "linear": linear,
    "functions": functions,
    "utils": functions,
    "balance": balance,
    "transformer": transformer,
    "distributed": distributed,
    "megatron": megatron,
    "megatron.layers": megatron,
    "megatron.balance": megatron,
    "megatron.utils": megatron,
    "fastermoe": fastermoe,
    "fastermoe.config": fastermoe,
    "fastermoe.schedule": fastermoe,
    "fastermoe.shadow_policy": fastermoe,
    **{f"gates.{name}_gate": gates for name in ("base", "dc", "gshard", "naive", "noisy", "swipe", "switch", "zero")},
    "gates.faster_gate": faster_gate,
    "gates.utils": gates,
}
_GATES = ("BaseGate", "DCGate", "GShardGate", "NaiveGate", "NoisyGate", "SwipeGate", "SwitchGate", "ZeroGate")

for _path, _module in _PATHS.items():
    sys.modules[f"fmoe.{_path}"] = _module
    _parent, _, _name = f"fmoe.{_path}".rpartition(".")
    setattr(sys.modules[_parent], _name, _module)
for _name in _GATES:
    setattr(fmoe.gates, _name, getattr(gates, _name))
setattr(fmoe.gates, faster_gate.FasterGate.__name__, faster_gate.FasterGate)

__all__ = ["DistributedGroupedDataParallel", "FMoE", "FMoELinear", "FMoETransformerMLP"]
