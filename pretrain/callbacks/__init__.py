"""Features of the trainer. The loop calls them in order; each keeps its own state."""

from pretrain.callbacks.base import Callback
from pretrain.callbacks.checkpointing import Checkpointing
from pretrain.callbacks.tracking import Tracking
from pretrain.callbacks.validation import Validation

__all__ = ["Callback", "Checkpointing", "Tracking", "Validation"]
