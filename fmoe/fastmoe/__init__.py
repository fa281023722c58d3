"""FastMoE's API (1.1) on `fmoe.MoE`; docs/migration.md lists the differences."""

import sys

from fmoe.fastmoe import layers

# FastMoE's import paths.
sys.modules["fmoe.layers"] = sys.modules["fmoe"].layers = layers
