"""Softmax over classes that are divided among ranks, with margins and sampled classes.

Shape letters: T samples of this rank, N samples of all ranks, C classes of this rank that take part, D width, W ranks.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fmoe import random
from fmoe.errors import UserError
from fmoe.parallel.tables import ShardedRows, exchange_counts, invalid_index
from fmoe.shards import TokenShards


class ShardedClassifier(ShardedRows):
    """Cross entropy over the cosines of features and class centers, which are divided among the ranks of a group.

    The logit of class c is ``scale * cos(theta_c)``; that of the label is ``scale * (cos(theta + angle) - cosine)``:
    ``angle=0.5`` is ArcFace (arXiv 1801.07698), ``cosine=0.35`` is CosFace (arXiv 1801.09414). Beyond
    ``theta = pi - angle``, where the cosine would rise again, ``cos(theta) - angle * sin(angle)`` replaces
    ``cos(theta + angle)``.

    In training, with ``sample < 1``, the softmax is over the labels of all ranks and a random share of the other
    classes (Partial FC, arXiv 2203.15565). The random classes depend on ``seed`` and the position in training
    (`fmoe.random.set_position`), not on the number of ranks.

    Args:
        num_classes, dim: shape of the matrix of class centers.
        group, options: as in `ShardedRows`.
        scale: factor of the cosines, at least 0.
        angle: margin that is added to the label's angle, in [0, pi / 2].
        cosine: margin that is subtracted from the label's cosine, in [0, 2].
        sample: probability of a class without samples to take part in a step, in [0, 1].

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        group: dist.ProcessGroup,
        *,
        scale: float = 64.0,
        angle: float = 0.0,
        cosine: float = 0.0,
        sample: float = 1.0,
        **options: Any,
    ):
        limits = (
            ("scale", scale, math.inf),
            ("angle", angle, math.pi / 2),
            ("cosine", cosine, 2.0),
            ("sample", sample, 1.0),
        )
        for name, value, limit in limits:
            if not 0 <= value <= limit:
                raise UserError(f"{name}={value} must be from 0 to {limit}")
        super().__init__(num_classes, dim, group, **options)
        self.scale = scale
        self.angle = angle
        self.cosine = cosine
        self.sample = sample

    def forward(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """Return the loss of each sample of this rank, [T], in at least float32.

        All ranks must call it, and run the backward pass if one does; their T may differ.

        Raises:
            UserError: the shape of ``x_TD`` or ``labels_T`` is wrong, or a label is out of range.
            PeerError: that of another rank is.
        """
        error = invalid_index("labels", labels_T, self.num_rows)
        shape = (labels_T.numel(), self.weight.shape[1])
        if labels_T.dim() != 1:
            error = UserError(f"labels have shape {tuple(labels_T.shape)}; they must have one dimension")
        elif x_TD.shape != shape:
            error = UserError(f"the input has shape {tuple(x_TD.shape)}; it must be {shape}")
        counts = labels_T.new_full((self.group.size(),), labels_T.numel(), dtype=torch.int64)
        shards = TokenShards(self.group, tuple(exchange_counts(self.group, counts, error)[1]))
        label_N = shards.all_gather(labels_T.long()) - self.first_row
        samples = ((label_N >= 0) & (label_N < len(self.weight))).nonzero()[:, 0]  # those with labels on this rank
        classes_C = self._classes(label_N[samples])
        columns = torch.searchsorted(classes_C, label_N[samples])
        if torch.is_grad_enabled() and x_TD.is_floating_point() and not x_TD.requires_grad:
            x_TD = x_TD.detach().requires_grad_()  # other ranks' may need gradients, which they reduce with this one
        with torch.autocast(x_TD.device.type, enabled=False):
            rows_CD = self.take(classes_C)
            centers_CD = F.normalize(rows_CD.to(torch.promote_types(rows_CD.dtype, torch.float32)), dim=-1)
            cosines_NC = F.normalize(shards.gather(x_TD).to(centers_CD.dtype), dim=-1) @ centers_CD.t()
            cosine = cosines_NC[samples, columns]
            sine = (1 - cosine.square()).clamp_min(1e-12).sqrt()  # its slope at 1 is finite
            moved = cosine * math.cos(self.angle) - sine * math.sin(self.angle)
            beyond = cosine - self.angle * math.sin(self.angle)
            margins = torch.where(cosine > -math.cos(self.angle), moved, beyond) - self.cosine
            logits_NC = cosines_NC.index_put((samples, columns), margins) * self.scale
            labels_N = logits_NC.new_zeros(len(label_N)).index_put((samples,), margins * self.scale)
            parts_12N = torch.stack([logits_NC.logsumexp(-1), labels_N])[None]
            parts_W2N = TokenShards.of_equal_parts(1, self.group).gather(parts_12N)
            sums_WT, labels_WT = parts_W2N[:, :, slice(*shards.bounds)].unbind(1)
            return sums_WT.logsumexp(0) - labels_WT.sum(0)

    def _classes(self, labels: Tensor) -> Tensor:
        """Return the local indices of the classes that take part, in ascending order."""
        takes_part = torch.ones(len(self.weight), dtype=torch.bool, device=labels.device)
        if self.sample < 1 and self.training:
            key = random.derive(random.noise_key(self.seed), "classes", labels.device)
            takes_part = random.uniform(key[None], len(self.weight), self.first_row)[0] < self.sample
            takes_part[labels] = True
        return takes_part.nonzero()[:, 0]
