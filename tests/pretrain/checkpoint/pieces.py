"""Pieces that tests save."""

from pretrain.checkpoint import Piece


def whole(name, tensor):
    """Return a whole tensor as one piece."""
    shape = tuple(tensor.shape)
    return Piece(name, shape, (0,) * len(shape), shape, tensor)
