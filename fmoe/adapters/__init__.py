"""Which parts of a model are feed-forward blocks: one adapter a family.

An adapter is ``module -> list[Block]``: it looks at one module and returns the blocks that this module itself holds.
`register_adapter` adds one; it is asked before those that are there already.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fmoe.adapters.bert import bert
from fmoe.adapters.block import Block, LinearMap, linear_map
from fmoe.adapters.glu import glu
from fmoe.adapters.mlp import mlp
from fmoe.adapters.sequential import sequential
from fmoe.adapters.torch_layer import torch_layer
from fmoe.adapters.trace import Refusal

Adapter = Callable[[nn.Module], list[Block]]

ADAPTERS: dict[str, Adapter] = {}


def register_adapter(name: str, adapter: Adapter) -> None:
    """Makes `fmoe.fmoefy` ask ``adapter`` about every module, before the adapters registered earlier.

    Args:
        name: in messages; a name that is taken is replaced.
        adapter: returns the `Block` of each feed-forward block that the module holds itself; an empty list for none.
    """
    ADAPTERS.pop(name, None)
    ADAPTERS[name] = adapter


for _name, _adapter in (
    ("mlp", mlp),
    ("glu", glu),
    ("bert", bert),
    ("torch layer", torch_layer),
    ("sequential", sequential),
):
    register_adapter(_name, _adapter)


class Found(NamedTuple):
    """A block, its name in the model, the adapter that found it."""

    name: str
    adapter: str
    block: Block


def find_blocks(model: nn.Module) -> list[Found]:
    """The feed-forward blocks of ``model`` in the order of their modules; a module used twice counts once.

    Each module goes to the first adapter that finds something in it; inside of a block nothing more is looked for.
    """
    return look_for_blocks(model)[0]


@torch.inference_mode(False)  # derivatives are compared too
def look_for_blocks(model: nn.Module) -> tuple[list[Found], dict[str, str]]:
    """`find_blocks`, and by name the modules that look like a block but are not taken, with the reason."""
    names = {module: name for name, module in model.named_modules()}
    found, refused, taken = [], {}, set()
    for module in names:
        if module in taken:
            continue
        refusals = []
        for adapter in reversed(ADAPTERS):
            results = ADAPTERS[adapter](module)
            refusals = [result for result in results if isinstance(result, Refusal)] or refusals
            blocks = [result for result in results if not isinstance(result, Refusal)]
            for block in blocks:
                name = ".".join(part for part in (names.get(block.module, ""), block.place) if part)
                found.append(Found(name, adapter, block))
                taken.update(block.module.modules() if block.install is None else [block.module])
            if blocks:
                refusals = [result for result in results if isinstance(result, Refusal)]
                break
        refused |= {names[module] or type(module).__name__: refusal.reason for refusal in refusals[:1]}
    return found, refused


__all__ = ["ADAPTERS", "Adapter", "Block", "Found", "LinearMap", "find_blocks", "linear_map", "register_adapter"]
