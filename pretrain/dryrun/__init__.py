"""Plan of a run without running it: its process grid, and the memory of each kind of rank.

`make_plan` builds the trainer's own engine for one rank of each kind, on the meta device. It counts the actual modules,
gradient buffers and optimizer shards. No process communicates.
"""

from pretrain.dryrun.plan import Grid, Plan, RankKind, make_plan
from pretrain.dryrun.text import as_json, describe, summary

__all__ = ["Grid", "Plan", "RankKind", "as_json", "describe", "make_plan", "summary"]
