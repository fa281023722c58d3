"""Recognition of a feed-forward block by running it.

The children of a module do not determine the order in which it calls them, nor what else it computes. Therefore the
module runs on random rows, and the calls of its linear maps are recorded. It then runs in training and in evaluation
mode while known values in float64 replace the outputs of these maps. The values reach from 1e-6 to 1e12, or to the
largest number of the model's dtype.

The input of the output map must then be the activation of these values, and its gradient must be the activation's
derivative. So neither the weights nor a normalization before the block can hide a clamp or another activation. The
formula is never inferred from names.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fmoe.convert.blocks import Block, LinearMap, is_plain, is_rowwise, linear_map, probe_values
from fmoe.convert.injection import Call, Injection, Rates, Trial, difference, limit, required, restored, wide_rows
from fmoe.errors import one_line
from fmoe.experts.ffn import ACTIVATIONS
from fmoe.kernels.glu import Activation


class Refusal(NamedTuple):
    """The reason why a module that looks like a block is not one, or cannot be replaced."""

    reason: str


class Pieces(NamedTuple):
    """A block that was found by running a module.

    Attributes:
        maps_in, map_out, activation, dropout: attributes of `Block`.
        first, last: modules of the input maps, and of the output map.
        between: modules called between these maps.
        after: dropouts called after the output map.
        counts: number of calls of each module in one run.
        rate: module and attribute that hold the rate of the dropout between the maps, if that dropout is called as a
            function; else None.
        trial: the run in which the block was found.
        is_whole: returns whether the maps receive the module's input unchanged, and whether the last map's output is
            the module's output.
        values, hidden: known values that replace the first input map's output, and the resulting input of the output
            map.
        is_dropped: whether the dropout between the maps is also applied to the output map's output.
    """

    maps_in: tuple[LinearMap, ...]
    map_out: LinearMap
    activation: Activation
    dropout: float
    first: tuple[nn.Module, ...]
    last: nn.Module
    between: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    counts: Counter
    rate: tuple[nn.Module, str] | None
    trial: Trial
    is_whole: Callable[[], bool]
    values: Tensor
    hidden: Tensor
    is_dropped: bool

    @property
    def block(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("maps_in", "map_out", "activation", "dropout")}


def near(owner: nn.Module) -> dict[str, nn.Module]:
    """Return children and grandchildren by name, the modules that may form a block of ``owner`` itself."""
    return {name: m for name, m in owner.named_modules() if name and name.count(".") < 2}


def looks_linear(module: nn.Module) -> tuple[int, int] | None:
    """Return the sizes (in, out) of a module that looks like a linear map; None for other modules.

    The module may be quantized, wrapped or a convolution.
    """
    kind = type(module).__name__
    for names in (("in_features", "out_features"), ("nx", "nf"), ("in_channels", "out_channels")):
        first, last = (getattr(module, name, None) for name in names)
        if (
            isinstance(first, int)
            and isinstance(last, int)
            and ("Linear" in kind or "Conv1D" in kind or isinstance(module, nn.Linear | nn.Conv1d))
        ):
            return first, last
    return None


def is_there_and_back(first: nn.Module, last: nn.Module) -> bool:
    """Return whether two modules look like linear maps D -> H and H -> D."""
    first_size = looks_linear(first)
    last_size = looks_linear(last)
    return first_size is not None and last_size is not None and _fit(first_size, last_size, 1)


def _fit(first: tuple[int, int], last: tuple[int, int], parts: int) -> bool:
    """Return whether the sizes (in, out) of two maps fit D -> ``parts`` * H and H -> D.

    A size of 0 is unknown, and fits any other.
    """
    width, height = first
    last_height, last_width = last
    return all(a == b or 0 in (a, b) for a, b in ((width, last_width), (height, parts * last_height)))


def lookalikes(owner: nn.Module) -> dict[tuple[str, str], bool]:
    """Return the pairs of linear maps, by name, that may form a block of ``owner``.

    The first map of a pair is D -> H or D -> 2 H, the second is H -> D. Pairs inside one child are left out. The value
    of a pair is True if it is likely a block, because few other linear maps have the same parent.
    """
    sizes = {name: looks_linear(m) for name, m in near(owner).items()}
    linear = {name: size for name, size in sizes.items() if size is not None}
    siblings = Counter(name.rpartition(".")[0] for name in linear)
    pairs = {}
    for a, first in linear.items():
        for b, last in linear.items():
            fits = _fit(first, last, 1) or _fit(first, last, 2)
            if not fits or a.partition(".")[0] == b.partition(".")[0]:
                continue
            holders = {name.rpartition(".")[0] for name in (a, b)}
            limit = 1
            if len(holders) == 1:
                limit = 2 if first[0] == first[1] else 3
            pairs[a, b] = max(siblings[holder] for holder in holders) <= limit
    return pairs


def read_block(owner: nn.Module, function: Callable | None = None) -> Pieces | Refusal:
    """Return the block that ``function`` computes with maps of ``owner``, or the reason why there is none.

    Args:
        function: a method of ``owner``; None for ``owner`` itself.
    """
    names = near(owner)
    pairs = [(names[a], names[b]) for a, b in lookalikes(owner)]
    modules = {module: linear_map(module) for pair in pairs for module in pair}
    maps = {module: linear for module, linear in modules.items() if linear is not None}
    weights = {tuple(m.weight.shape) for m in maps.values()}
    # [H, D] that has a matching [D, H]; [2 H, D] if one map computes gate and value.
    shapes = sorted((h, w) for h, w in weights if (w, h) in weights or (h % 2 == 0 and (w, h // 2) in weights))
    if not shapes:
        return Refusal("it has no linear maps D -> H and H -> D")
    like = next(iter(maps.values())).weight
    function = function or owner
    refusal = Refusal("its maps are not called one after the other")
    # A module may narrow its input before the block (MobileBERT).
    sizes = [looks_linear(m) for m in owner.modules()]
    widths = [w for _, w in shapes] + [size[0] for size in sizes if size is not None]
    height = min(h for h, _ in shapes)
    for width in dict.fromkeys(widths):
        for trial in _trials(owner, function, (height, width), like):
            try:
                calls, _ = trial()
            except Exception as error:  # the function takes other arguments
                reason = one_line(error, 120, with_type=True)
                refusal = Refusal(f"its forward does not run on rows alone ({reason})")
                continue
            for index, call in enumerate(calls):
                before = [i for i in range(index) if calls[i].module in maps]
                for chosen in (before[-1:], before[-2:]):
                    first = [calls[i].module for i in chosen]
                    if call.module in maps and all((m, call.module) in pairs for m in first) and first:
                        result = _read(trial, calls, chosen, index, maps)
                        if isinstance(result, Pieces):
                            return result
                        refusal = result
            break
    return refusal


def _trials(owner: nn.Module, function: Callable, shape: tuple[int, int], like: Tensor) -> Iterator[Trial]:
    """Yield trials of ``function`` with several kinds of arguments, first without stubs, then with them."""
    # The first parameter gets enough rows to hold all probe values, or images if the module holds a convolution. The
    # other parameters without a default get None, rows or sizes. Children outside of the block may require more
    # arguments, such as the masks and positions of an attention. The last trials replace these children by stubs that
    # return their input, or a tuple of it and one or two Nones.
    height, width = shape
    side = math.isqrt(max(8, math.ceil(len(probe_values(like.dtype)) / (2 * height)))) + 1
    generator = torch.Generator().manual_seed(0)
    # Two sequences: a single one would hide a function that mixes or counts sequences.
    rows = torch.randn(2, side * side, width, generator=generator, device="cpu", dtype=torch.float32)
    rows = rows.to(device=like.device, dtype=like.dtype)
    others = len(required(function)) - 1
    nones = [None] * others
    choices = [(rows, *nones)]
    if others > 0:
        choices.append((rows, *[rows] * others))
        # Inputs of different widths (LiLT).
        sizes = [looks_linear(near(owner)[name]) for name, _ in lookalikes(owner)]
        widths = {size[0] for size in sizes if size is not None}
        choices += [(rows, *[rows[..., :w]] * others) for w in sorted(widths) if w < width]
        choices.append((rows, *((side, side) if others == 2 else ((side, side),) * others)))
    if any(isinstance(m, nn.Conv2d) for m in owner.children()):
        choices.append((rows.transpose(1, 2).unflatten(2, (side, side)), *nones))
    yield from (Trial(owner, function, args, {}) for args in choices)
    holders = {name.partition(".")[0] for pair in lookalikes(owner) for name in pair}
    left_out = [m for name, m in owner.named_children() if name not in holders and next(m.children(), None) is not None]
    for nones in ([], [None], [None, None]) if left_out else ():
        stubs: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(left_out, partial(_return_input, nones=nones))
        yield from (Trial(owner, function, args, stubs) for args in choices)


def _return_input(*args: Any, nones: list[None], **kwargs: Any) -> Any:
    x = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
    return (x, *nones) if nones else x


def _read(trial: Trial, calls: list[Call], chosen: list[int], index: int, maps: dict) -> Pieces | Refusal:
    """Return the block whose input maps are the calls with indices ``chosen``; its output map is the call ``index``."""
    called = [call.module for call in calls]
    first = tuple(called[i] for i in chosen)
    last = called[index]
    names = {m: name for name, m in trial.owner.named_modules()}
    counts = Counter(called)
    label = " and ".join(names[m] for m in (*first, last))
    if any(counts[m] > 1 for m in (*first, last)):
        return Refusal(f"{label} are called several times in one forward pass")
    map_out = maps[last]
    between = tuple(m for m in called[chosen[0] + 1 : index] if m not in first)
    reason = f"there is more than a row-wise activation between {label}"
    if between:
        reason += f" ({', '.join(dict.fromkeys(type(m).__name__ for m in between))})"
    dropouts = [m for m in between if isinstance(m, nn.Dropout)]
    if len(dropouts) > 1:
        return Refusal(reason)
    if len(first) == 2 and len({maps[m].weight.shape for m in (*first, last)} - {map_out.weight.shape}) > 1:
        return Refusal(f"{label} have sizes that do not match")
    is_fused = len(first) == 1 and maps[first[0]].weight.shape[0] == 2 * map_out.weight.shape[1]
    maps_in = [maps[m] for m in first]
    if is_fused:
        biases = (None, None) if maps_in[0].bias is None else maps_in[0].bias.chunk(2)
        maps_in = list(map(LinearMap, maps_in[0].weight.chunk(2), biases))
    inject = Injection(trial, first, last, [calls[i].output.shape for i in chosen], map_out.weight, is_fused)
    try:
        hidden = inject().hidden
    except Exception:  # for example of a normalization whose weights are not float64
        return Refusal(reason)
    if not all(is_plain(m) for m in between if not {*first, last} & {*m.modules()}):
        return Refusal(reason)
    holders = [trial.owner, *(m for m in trial.owner.modules() if {*first, last} & set(m._modules.values()))]
    functions: list[Any] = [m for m in between if is_plain(m) and not isinstance(m, nn.Dropout | nn.Identity)]
    functions += [f for m in holders for f in vars(m).values() if callable(f) and not isinstance(f, type)]
    functions += ACTIVATIONS.values()  # called as a function: F.gelu(self.fc1(x))
    orders = [[0]] if len(maps_in) == 1 else [[0, 1], [1, 0]]
    fits = ((f, o) for o in orders for f in functions if inject.follows(f, o, hidden))
    activation, order = next(fits, (None, []))
    if activation is None or not is_rowwise(activation, hidden.shape[-1]):
        return Refusal(reason)
    rate = None
    dropout = dropouts[0].p if dropouts else 0.0
    if not inject.follows(activation, order, inject(training=True).hidden):
        rates = Rates()
        if dropouts or not inject.follows(activation, order, inject(training=True, rates=rates).hidden):
            return Refusal(f"a module between {label} is random in training")
        rate = _attribute_of(rates, holders, inject)
        if rate is None:
            return Refusal(f"the rate of the dropout between {label} is not a separate attribute")
        dropout = rates.inside[0]
    if not inject.keeps_slope(activation, order):
        return Refusal(f"the activation between {label} has a custom derivative")
    if not inject.is_sole_use():
        return Refusal(f"a value between {label} is also used elsewhere")
    return Pieces(
        maps_in=tuple(maps_in[i] for i in order),
        map_out=map_out,
        activation=activation,
        dropout=dropout,
        first=first,
        last=last,
        between=between,
        after=tuple(m for m in called[index + 1 :] if isinstance(m, nn.Dropout)),
        counts=counts,
        rate=rate,
        trial=trial,
        is_whole=lambda: not any(isinstance(m, nn.Dropout) for m in called[: chosen[0]]) and inject.is_whole(),
        values=inject.values(inject.parts)[0],
        hidden=hidden,
        is_dropped=index + 1 < len(calls)
        and called[index + 1] in dropouts
        and calls[index + 1].input is calls[index].output,
    )


def _attribute_of(rates: Rates, holders: list[nn.Module], inject: Injection) -> tuple[nn.Module, str] | None:
    """Return (holder, name) of the attribute that sets the dropout rate in ``rates.inside``; None if there is none."""
    # The attribute must set the rate of the only dropout between the maps, and of no other dropout.
    for holder in holders if len(rates.inside) == 1 else ():
        for name, value in list(vars(holder).items()):
            if not isinstance(value, float) or value != rates.inside[0]:
                continue
            without = Rates()
            setattr(holder, name, 0.0)
            try:
                inject(training=True, rates=without)
            finally:
                setattr(holder, name, value)
            if not without.inside and without.outside == rates.outside:
                return holder, name
    return None


class _Dense(nn.Module):
    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def keeps_output(trial: Trial, block: Block, owner: nn.Module | None = None) -> bool:
    """Return whether the output of ``trial`` stays the same, up to rounding, once ``block`` is installed.

    Args:
        owner: the module that ``block.install`` changes; None for the module of ``trial``.
    """
    rows = trial.args[0]
    after = []
    for x in (rows, wide_rows(rows)) if block.install is None else (rows,):
        if block.install is None:
            with torch.no_grad():
                after = [block(x)]  # the same in both modes
        for training in (False, True):
            before = tree_leaves(trial(training=training, rows=x, rates=Rates())[1])
            if block.install is not None:
                with restored(owner or trial.owner):
                    block.install(_Dense(block))
                    try:
                        after = tree_leaves(trial(training=training, rows=x, rates=Rates())[1])
                    except Exception:  # the module reads attributes of a map that was removed
                        return False
            if len(before) != len(after):
                return False
            if not all(difference(b, a) <= limit(a) for a, b in zip(before, after, strict=True) if torch.is_tensor(a)):
                return False
    return True
