"""Training of a model of `fmoe.parallelize` by Hugging Face's Trainer."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.parallel.checkpoint import load_optimizer_state_dict, load_state_dict, optimizer_state_dict, state_dict
from fmoe.parallel.gradients import clip_grad_norm_
from fmoe.parallel.pretrained import save_hf

_OPTIMIZER = "optimizer"
_SCHEDULER = "scheduler.pt"


class TrainerMixin:
    """Gradient norm and checkpoints of Trainer, and of its subclasses such as TRL's SFTTrainer, for split models.

    Use it as ``class MyTrainer(TrainerMixin, Trainer): pass``, with a model of `fmoe.parallelize` and
    ``shard="full"``. Trainer's own norm leaves out the experts of other ranks, and so do its checkpoints. Those of this
    class load with any number of ranks and any ``ep``, and ``from_pretrained`` loads them too.
    """

    # Of Trainer.
    accelerator: Any
    args: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any
    state: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.clip_grad_norm_ = self._clip

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # otherwise, Trainer does not call Accelerate's method

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if norm_type != 2:
            raise UserError(f"norm_type={norm_type:g} must be 2")
        return clip_grad_norm_(parameters, max_norm, groups=self.model.groups)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model with `save_hf`. Collective."""
        save_hf(self.model, output_dir or self.args.output_dir, self.model.groups)

    def _optimizer_state(self) -> dict[str, Any]:
        return optimizer_state_dict(self.model, self.optimizer.optimizer, self.model.groups)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._optimizer_state(), checkpoint_id=Path(output_dir, _OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        import torch.distributed.checkpoint as dcp

        if checkpoint is None:
            return
        state = self._optimizer_state()
        dcp.load(state, checkpoint_id=Path(checkpoint, _OPTIMIZER))
        load_optimizer_state_dict(self.model, self.optimizer.optimizer, state, self.model.groups)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        import torch.distributed.checkpoint as dcp

        tied = getattr(self.model, "all_tied_weights_keys", {})
        state = state_dict(self.model, self.model.groups)
        stored = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in tied}
        dcp.load(stored, storage_reader=dcp.HuggingFaceStorageReader(resume_from_checkpoint))
        copies = {name: stored[source] for name, source in tied.items() if name in state}
        load_state_dict(self.model, state | stored | copies, self.model.groups)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)
