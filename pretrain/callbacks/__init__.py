"""Callbacks of the trainer. The training loop calls them in order, and each has its own state.

`register_callback` adds a callback.
"""

from pretrain.callbacks.base import Callback, build_callbacks, register_callback
from pretrain.callbacks.checkpointing import Checkpointing
from pretrain.callbacks.collapse import CollapseWarning
from pretrain.callbacks.events import Events
from pretrain.callbacks.guards import StepGuard
from pretrain.callbacks.phases import Phases
from pretrain.callbacks.plan import PlanCheck
from pretrain.callbacks.profiling import Profiling
from pretrain.callbacks.stopping import Stopping
from pretrain.callbacks.tasks import TaskEvaluation
from pretrain.callbacks.tracking import Tracking
from pretrain.callbacks.trust import TrustRatios
from pretrain.callbacks.validation import Validation
from pretrain.callbacks.watchdog import Watchdog

__all__ = [
    "Callback",
    "Checkpointing",
    "CollapseWarning",
    "Events",
    "Phases",
    "PlanCheck",
    "Profiling",
    "StepGuard",
    "Stopping",
    "TaskEvaluation",
    "Tracking",
    "TrustRatios",
    "Validation",
    "Watchdog",
    "build_callbacks",
    "register_callback",
]
