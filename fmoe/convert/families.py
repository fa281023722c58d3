"""Search for the feed-forward blocks and the experts of a model, by one function (a finder) per family of modules.

A finder is ``module -> list[Block | ExpertBlock | Refusal]``: it examines one module and returns the blocks that this
module holds itself. `register_family` adds a finder; the newest is called first.
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fmoe.convert.blocks import Block, addition, is_plain, linear_map, obstacle
from fmoe.convert.experts import ExpertBlock, stacked_experts, switch_experts
from fmoe.convert.injection import Trial, is_same, required, wide_rows
from fmoe.convert.trace import Pieces, Refusal, is_there_and_back, keeps_output, lookalikes, near, read_block

Finder = Callable[[nn.Module], Sequence[Block | ExpertBlock | Refusal]]


def mlp(module: nn.Module) -> list[Block | Refusal]:
    """Find blocks of two linear maps with an activation between them: GPT-2, ViT, Swin, T5, DistilBERT, GPT-NeoX, timm.

    The block is all of ``module``, or a part of it (`inline`). If it is all of ``module``, the first map may compute
    gate and value together, as in Phi-3.
    """
    return whole_module(module, 2) or inline(module)


def glu(module: nn.Module) -> list[Block | Refusal]:
    """Find gated blocks: Llama, Mistral, Qwen2, Qwen3, Gemma, the gated T5 and similar models (arXiv 2002.05202).

    They have three linear maps: gate, value, output. The map whose output enters the activation is the gate.
    """
    return whole_module(module, 3)


def whole_module(module: nn.Module, num_linear: int) -> list[Block | Refusal]:
    """Return the block of ``num_linear`` linear maps, if ``module`` computes this block and nothing else.

    All other modules inside ``module`` must have neither parameters nor buffers.
    """
    children = list(module.children())
    linear = [child for child in children if linear_map(child) is not None]
    if isinstance(module, nn.Sequential) or len(linear) != num_linear or addition(module) is not None:
        return []
    if any(True for _ in module.parameters(recurse=False)):
        return []
    if not all(is_plain(child) and addition(child) is None for child in children if child not in linear):
        return []
    if len(required(module)) != 1:
        return []
    pieces = read_block(module)
    if not isinstance(pieces, Pieces) or not pieces.is_whole():
        return []
    if len(inspect.signature(module.forward).parameters) > 1 and len(pieces.maps_in) == 1:
        return []  # callers may pass arguments that an MoE layer does not take: `inline` replaces the maps instead
    block = Block(module=module, after=pieces.after, **pieces.block)
    return [block] if keeps_output(pieces.trial, block) else []


def inline(module: nn.Module) -> list[Block | Refusal]:
    """Find blocks inside larger modules: BART, Pegasus, OPT, ALBERT, BLOOM, XLNet, Funnel, ConvNeXt.

    A block is two linear maps of ``module``, or of its children, with an activation between them that is a module or an
    attribute. The MoE layer replaces the first map; activation, dropout and second map become `nn.Identity`. A dropout
    module that is also applied to the block's output keeps its effect there.
    """
    if isinstance(module, nn.Sequential | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return []
    pairs, names = lookalikes(module), near(module)
    if not pairs or type(module).forward is nn.Module.forward:
        return []
    few = [pair for pair, has_few_beside in pairs.items() if has_few_beside]
    for name in dict.fromkeys(name for pair in few for name in pair):
        if (why := obstacle(names[name])) is not None:
            return [Refusal(f"{name} {why}")]
    removable = any(is_plain(m) and not isinstance(m, nn.Dropout) for m in names.values())
    if not few and not removable and not any(map(callable, vars(module).values())):
        return []  # for example an attention, which has nothing removable between its maps
    pieces = read_block(module)
    if isinstance(pieces, Refusal):
        return [pieces] if few else []
    slots = {m: _slots(module, m) for m in (*pieces.first, pieces.last, *pieces.between)}
    label = f"{slots[pieces.first[0]][0][1]} and {slots[pieces.last][0][1]}"
    if len(pieces.maps_in) > 1:
        return [Refusal(f"{label} are maps of a gated block, which must be a separate module")]
    if (added := next((addition(m) for m in pieces.between if addition(m) is not None), None)) is not None:
        return [Refusal(f"a module between {label} {added}")]
    activation = pieces.activation
    if isinstance(activation, nn.Module):
        of_activation = _slots(module, activation)
    else:
        of_activation = [(m, name) for m in module.modules() for name, value in vars(m).items() if value is activation]
    out = [*slots[pieces.last], *of_activation]
    if len(out) == len(slots[pieces.last]):
        return [Refusal(f"the activation between {label} is called as a function: make it a module or an attribute")]
    dropouts = [m for m in pieces.between if isinstance(m, nn.Dropout)]
    if any(pieces.counts[m] > 1 + pieces.is_dropped for m in dropouts) or pieces.counts[pieces.activation] > 1:
        return [Refusal(f"a module between {label} is also called elsewhere")]

    def install(moe: nn.Module) -> None:
        for holder, name in slots[pieces.first[0]]:
            setattr(holder, name, moe)
        for holder, name in out:
            setattr(holder, name, nn.Identity())
        for dropout in dropouts:
            # A dropout that also follows the block now runs twice there: two of the rate below equal one of rate p.
            left = nn.Dropout(1 - math.sqrt(1 - dropout.p)) if pieces.is_dropped else nn.Identity()
            for holder, name in slots[dropout]:
                setattr(holder, name, left.train(dropout.training))
        if pieces.rate is not None:
            setattr(*pieces.rate, 0.0)

    place = next(name for name, m in near(module).items() if m is pieces.first[0])
    block = Block(module=module, install=install, place=place, **pieces.block)
    if not keeps_output(pieces.trial, block):
        return [Refusal(f"its output changes if {label} and the modules between them are replaced")]
    return [block]


def _slots(owner: nn.Module, wanted: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules inside ``owner`` that have ``wanted`` as a child, each with the child's name."""
    return [(m, name) for m in owner.modules() for name, child in m._modules.items() if child is wanted]


def bert(module: nn.Module) -> list[Block | Refusal]:
    """Find blocks that are spread over two modules: BERT, RoBERTa, ELECTRA, BEiT, older ViT and Swin.

    ``module.intermediate`` has the first linear map and the activation. ``module.output.dense`` is the second map,
    followed by dropout, residual and normalization. The MoE layer replaces ``intermediate``, the second map becomes
    `nn.Identity`, and the rest is unchanged.
    """
    intermediate, output = getattr(module, "intermediate", None), getattr(module, "output", None)
    if not isinstance(intermediate, nn.Module) or not isinstance(output, nn.Module):
        return []
    children = list(intermediate.children())
    linear = [child for child in children if linear_map(child) is not None]
    last = getattr(output, "dense", None)
    if len(linear) != 1 or linear_map(last) is None or addition(intermediate) is not None:
        return []
    if not all(is_plain(child) and addition(child) is None for child in children if child is not linear[0]):
        return []
    pieces = read_block(module)
    if not isinstance(pieces, Pieces) or (pieces.first, pieces.last) != (tuple(linear), last):
        return []
    if pieces.dropout or not _is_map_and_activation(intermediate, pieces):
        return []

    def install(moe: nn.Module) -> None:
        module.intermediate, output.dense = moe, nn.Identity()

    block = Block(module=module, install=install, **pieces.block)
    return [block] if keeps_output(pieces.trial, block) else []


def _is_map_and_activation(intermediate: nn.Module, pieces: Pieces) -> bool:
    """Return whether ``intermediate`` is the first map and the activation of ``pieces``, and nothing more."""
    (first,), (block,) = pieces.first, pieces.maps_in
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 32, block.weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    rows = rows.to(block.weight)
    for x in (rows, wide_rows(rows, is_multiplied=False)):
        seen: list[Tensor] = []

        def stand_in(value: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(value.clone())
            return pieces.values.clone()

        _, result = Trial(intermediate, intermediate, (x,), {})(stand_ins={first: stand_in})
        if not is_same(seen[0], x) or not is_same(result, pieces.hidden):
            return False
    return True


def torch_layer(module: nn.Module) -> list[Block | Refusal]:
    """Find the blocks of `nn.TransformerEncoderLayer`, `nn.TransformerDecoderLayer` and `nn.TransformerEncoder`.

    The MoE layer replaces ``linear1``. `nn.Identity` replaces ``linear2``, the activation and the dropout between them.
    For evaluation, encoders and their layers have a fused path that reads the weights of both linear maps. The MoE
    layer disables this path.
    """
    if isinstance(module, nn.TransformerEncoder):
        results = [result for layer in module.layers for result in _layer(layer, module)]
        return [result for result in results if isinstance(result, Block)]  # refusals are reported for each layer
    return _layer(module, None)


def _layer(layer: nn.Module, stack: nn.TransformerEncoder | None) -> list[Block | Refusal]:
    if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return []
    for name in ("linear1", "linear2"):
        if (why := obstacle(getattr(layer, name))) is not None:
            return [Refusal(f"{name} {why}")]
    pieces = read_block(layer, layer._ff_block)
    if isinstance(pieces, Refusal):
        return [pieces]
    added = [addition(m) for m in (*pieces.between, layer.dropout) if addition(m) is not None]
    if added or not pieces.is_whole():
        return [
            Refusal(f"a module between linear1 and linear2 {added[0]}" if added else "it computes more than a block")
        ]

    holder: Any = layer

    def install(moe: nn.Module) -> None:
        holder.linear1, holder.activation, holder.dropout, holder.linear2 = moe, *(nn.Identity() for _ in range(3))
        if hasattr(holder, "activation_relu_or_gelu"):
            holder.activation_relu_or_gelu = 0
        if stack is not None:
            stack.use_nested_tensor = False

    # The layer keeps its other dropouts.
    block = Block(module=layer, install=install, sequence_first=not layer.self_attn.batch_first, **pieces.block)
    rows = pieces.trial.args[0]
    whole = Trial(layer, layer, (rows,) * len(required(layer)), {})
    if not keeps_output(whole, block, stack):
        return [Refusal("it uses linear1 and linear2 differently from torch's layer")]
    return [block]


def sequential(module: nn.Module) -> list[Block | Refusal]:
    """Find ``Linear, activation, [Dropout], Linear`` as consecutive items of an `nn.Sequential`.

    The MoE layer replaces the first item of each such run whose input and output widths are equal. The other items of
    the run become `nn.Identity`, so that all items keep their names.
    """
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return []
    if "forward" in vars(module):
        return []
    items = list(module.named_children())
    blocks, begin = [], 0
    while begin < len(items):
        length = next((n for n in (3, 4) if _has_form([item for _, item in items[begin : begin + n]], n)), None)
        if length is None:
            begin += 1
            continue
        names, parts = zip(*items[begin : begin + length], strict=True)
        begin += length
        blocks.append(_sequential_run(module, names, parts))
    return blocks


def _has_form(parts: list[nn.Module], length: int) -> bool:
    """Return whether the first ``length`` parts look like a block: linear map, activation, [dropout], linear map."""
    if len(parts) < length or (length == 4 and type(parts[2]) is not nn.Dropout):
        return False
    if any(isinstance(part, nn.Conv1d) for part in parts) or not is_there_and_back(parts[0], parts[-1]):
        return False
    activation, noise = parts[1], nn.modules.dropout._DropoutNd
    return not isinstance(activation, (nn.Identity, nn.Linear, noise)) and is_plain(activation)


def _sequential_run(module: nn.Sequential, names: tuple[str, ...], parts: tuple[nn.Module, ...]) -> Block | Refusal:
    for name, part in ((names[0], parts[0]), (names[-1], parts[-1])):
        if (why := obstacle(part)) is not None:
            return Refusal(f"{name} {why}")
    for name, part in zip(names[1:-1], parts[1:-1], strict=True):
        if (why := addition(part)) is not None:
            return Refusal(f"{name} {why}")

    def install(moe: nn.Module) -> None:
        for name in names:
            setattr(module, name, nn.Identity())
        setattr(module, names[0], moe)

    block: dict[str, Any] = {"module": module, "install": install, "place": names[0]}
    if len({(p.dtype, p.device) for part in parts for p in part.parameters()}) > 1:  # `fmoefy` raises with the name
        maps: list[Any] = [linear_map(part) for part in (parts[0], parts[-1])]
        return Block(maps_in=(maps[0],), map_out=maps[1], activation=parts[1], **block)
    run = nn.Sequential(OrderedDict(zip(names, parts, strict=True)))
    pieces = read_block(run)
    if isinstance(pieces, Refusal):
        return pieces
    if not pieces.is_whole() or not keeps_output(pieces.trial, Block(module=run, **pieces.block)):
        return Refusal(f"{names[0]} to {names[-1]} compute more than a block")
    return Block(**block, **pieces.block)


# In order of registration; the last one is called first.
FAMILIES: dict[str, Finder] = {
    "mlp": mlp,
    "glu": glu,
    "bert": bert,
    "torch layer": torch_layer,
    "sequential": sequential,
}
_DENSE = tuple(FAMILIES.values())
_EXPERTS = (stacked_experts, switch_experts)
FAMILIES |= {"stacked experts": stacked_experts, "Switch experts": switch_experts}


def register_family(name: str, find: Finder) -> None:
    """Make `fmoe.fmoefy` call ``find`` on the modules of a model, before the functions of families registered earlier.

    Args:
        name: name of the family in messages; an earlier family of the same name is replaced.
        find: function that gets a module and returns a list of its feed-forward blocks (`Block`), or of its experts
            (`ExpertBlock`). It leaves out blocks that it returns for a submodule.
    """
    FAMILIES.pop(name, None)
    FAMILIES[name] = find


class Found(NamedTuple):
    """A `Block` or `ExpertBlock`, its name in the model, and the family (`register_family`) whose finder found it."""

    name: str
    family: str
    block: Any


def find_blocks(model: nn.Module) -> list[Found]:
    """Return the feed-forward blocks of ``model`` in the order of their modules; a module used twice counts once.

    On each module, the functions of the families (`register_family`) are called, the newest first, until one returns
    blocks. The submodules of a module that is itself a block are not searched.
    """
    return search(model)[0]


def find_experts(model: nn.Module) -> list[Found]:
    """Return the experts that a model has already (`ExpertBlock`), as `find_blocks` returns its dense blocks."""
    return search(model, ExpertBlock)[0]


@torch.inference_mode(False)  # derivatives are compared too
def search(model: nn.Module, kind: type = Block) -> tuple[list[Found], dict[str, str]]:
    """Return the blocks, as `find_blocks` does; and why modules that look like blocks are refused, by module name.

    Args:
        kind: `Block`, or `ExpertBlock` for the model's own experts.
    """
    others = _EXPERTS if kind is Block else _DENSE
    finders = {name: find for name, find in reversed(FAMILIES.items()) if find not in others}
    names = {module: name for name, module in model.named_modules()}
    found: list[Found] = []
    refused: dict[str, str] = {}
    taken: set[nn.Module] = set()
    for module in names:
        if module in taken:
            continue
        refusals: list[Refusal] = []
        for family, find in finders.items():
            results = find(module)
            refusals = [result for result in results if isinstance(result, Refusal)] or refusals
            blocks: list[Any] = [result for result in results if isinstance(result, kind)]
            for block in blocks:
                name = ".".join(part for part in (names.get(block.module, ""), block.place) if part)
                found.append(Found(name, family, block))
                taken.update(block.module.modules() if block.install is None else [block.module])
            if blocks:
                refusals = [result for result in results if isinstance(result, Refusal)]
                break
        refused |= {names[module] or type(module).__name__: refusal.reason for refusal in refusals[:1]}
    return found, refused
