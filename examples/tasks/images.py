"""Images with classes for a ViT or a Swin Transformer: a plugin with the source of samples "digits".

    pip install 'fmoe[pretrain,tasks]'
    fmoe train examples/tasks/vit.toml
    fmoe train examples/tasks/swin.toml
    fmoe evaluate runs/vit runs/swin

The images are the 1,797 handwritten digits, 8 x 8 pixels, that scikit-learn contains (UCI, CC BY 4.0), or drawings of
bars with noise, which need no package: ``data.samples_options = { drawn = true }``.
"""

import hashlib

import numpy as np

from fmoe.errors import UserError, require
from pretrain.config import Recipe
from pretrain.data.custom import register_samples

HELD_OUT = 5  # every fifth image is for validation


class Digits:
    """Samples of a classifier: ``pixel_values`` [1, 8, 8], from -1 to 1, and the class.

    The entries of ``data.train`` and ``data.validation`` are the names of the splits: train, validation.
    """

    def __init__(self, recipe: Recipe, names: tuple[str, ...], drawn: bool = False):
        for name in names:
            if name not in ("train", "validation"):
                raise UserError(f"{name} is not a split: train or validation")
        images, classes = bars(1800) if drawn else digits()
        is_held_out = np.arange(len(images)) % HELD_OUT == 0
        chosen = np.isin(is_held_out, [name == "validation" for name in names])
        self.images = images[chosen]
        self.classes = classes[chosen]
        self.fingerprint = hashlib.sha256(self.images.tobytes() + self.classes.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"pixel_values": self.images[i], "labels": self.classes[i : i + 1]}


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images, float32 [images, 1, 8, 8], and classes, int64 [images]."""
    data = require("sklearn.datasets", "pretrain,tasks", "scikit-learn's digits").load_digits()
    return (data.images[:, None] / 8 - 1).astype(np.float32), data.target.astype(np.int64)


def bars(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a bright bar on noise, in one of ten places or directions, which are the classes; shapes as of `digits`."""
    draw = np.random.default_rng(0)
    images = draw.normal(size=(count, 1, 8, 8)).astype(np.float32) / 2
    classes = draw.integers(10, size=count)
    for image, number in zip(images[:, 0], classes, strict=True):
        if number < 5:
            image[number + 1] += 1
        else:
            image[:, number - 4] += 1
    return images, classes


register_samples("digits", Digits)
