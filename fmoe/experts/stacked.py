"""Parameters that hold several experts."""

from torch import nn


class Stacked(nn.Module):
    """A module each of whose own parameters has an expert a row of its first axis.

    They carry the mark ``is_stacked = True``, by which `fmoe.optim` takes one for so many tensors.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_stacked()

    def _mark_stacked(self) -> None:
        for parameter in self.parameters(recurse=False):
            parameter.is_stacked = True

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # may make new parameters, without the mark: to_empty
        self._mark_stacked()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)  # copies of parameters have lost the mark
        self._mark_stacked()
