"""FastMoE's gates: ``gate(d_model, num_expert, world_size, top_k)``, which return ``(index, score)`` and keep a loss.

One file a gate, under the names that FastMoE gives them: ``fmoe.gates.naive_gate`` and so on are these modules. They
behave as its release 1.1 documents them, but for what was broken there (docs/migration.md). For new work take the
routers of `fmoe.gates`.

Shape letters, here and in the files: T tokens, D width, K choices, E experts of all workers, L of one, W workers.
"""

import sys

from fmoe.compat.gates import (
    base_gate,
    dc_gate,
    faster_gate,
    gshard_gate,
    naive_gate,
    noisy_gate,
    swipe_gate,
    switch_gate,
    utils,
    zero_gate,
)
from fmoe.compat.gates.base_gate import BaseGate
from fmoe.compat.gates.dc_gate import DCGate
from fmoe.compat.gates.faster_gate import FasterGate
from fmoe.compat.gates.gshard_gate import GShardGate
from fmoe.compat.gates.naive_gate import NaiveGate
from fmoe.compat.gates.noisy_gate import NoisyGate
from fmoe.compat.gates.swipe_gate import SwipeGate
from fmoe.compat.gates.switch_gate import SwitchGate
from fmoe.compat.gates.zero_gate import ZeroGate

__all__ = [
    "BaseGate",
    "DCGate",
    "FasterGate",
    "GShardGate",
    "NaiveGate",
    "NoisyGate",
    "SwipeGate",
    "SwitchGate",
    "ZeroGate",
    "base_gate",
    "dc_gate",
    "faster_gate",
    "gshard_gate",
    "naive_gate",
    "noisy_gate",
    "swipe_gate",
    "switch_gate",
    "utils",
    "zero_gate",
]

# `from fmoe.gates.naive_gate import NaiveGate` finds the module here, once `fmoe.gates` is imported.
sys.modules.update({f"fmoe.gates.{name}": globals()[name] for name in __all__ if name[0].islower()})
