"""Pieces that tests save."""

from pretrain.checkpoint import TensorPiece


def whole(name, tensor):
    """Return a whole tensor as one piece."""
    shape = tuple(tensor.shape)
    return TensorPiece(name, shape, (0,) * len(shape), shape, tensor)
