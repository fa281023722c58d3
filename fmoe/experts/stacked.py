"""Parameters that hold several experts."""

from torch import nn

from fmoe import ownership


class Stacked(nn.Module):
    """A module each of whose own parameters has an expert a row of its first axis.

    They carry the mark ``is_stacked = True``, by which `fmoe.optim` takes one for so many tensors.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        ownership.enrol(self)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        parametrized = [getattr(part, "original", None) for part in getattr(self, "parametrizations", {}).values()]
        for parameter in (*self.parameters(recurse=False), *parametrized):
            if parameter is not None:
                parameter.is_stacked = True

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # may make new parameters, without the mark: to_empty
        self._mark_parameters()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        ownership.enrol(self)
        self._mark_parameters()  # copies of parameters have lost the mark
