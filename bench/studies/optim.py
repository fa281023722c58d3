"""``python -m bench optim``: time of a step of LAMB, LARS and Muon on parameters of Mixture-of-Experts transformers.

The reference is the same algorithm in a loop over tensors, one expert at a time. torch's multi-tensor AdamW, the third
contender, shows the cost of trust ratios and orthogonalization. Gradients exist beforehand; clipping, reductions over
ranks and rounding to 16 bits are not measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench import frame, options, report
from fmoe.errors import UserError, known_names
from fmoe.optim import Lamb, Lars, Matrices, Muon, is_stacked

LOOP = {
    "lamb": "LAMB, a loop over tensors",
    "lars": "LARS, a loop over tensors",
    "muon": "Muon, a loop over tensors",
}
OURS = {"lamb": "fmoe.optim.Lamb", "lars": "fmoe.optim.Lars", "muon": "fmoe.optim.Muon"}
ADAMW = "torch.optim.AdamW, foreach"


@dataclass(frozen=True)
class Shape:
    """A model: layers and their width, experts per layer and their hidden width, rows of the embedding."""

    layers: int
    width: int
    experts: int
    hidden: int
    vocabulary: int

    def parameters(self, device: torch.device) -> list[nn.Parameter]:
        """Return random parameters with gradients: the embedding, and per layer attention, norms, gate and experts."""
        shapes = [(self.vocabulary, self.width)]
        stacks = [(self.experts, self.hidden, self.width), (self.experts, self.width, self.hidden)]
        for _ in range(self.layers):
            shapes += [(3 * self.width, self.width), (self.width, self.width), (self.experts, self.width)]
            shapes += [(self.width,)] * 4 + stacks
        parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for parameter in parameters:
            parameter.is_stacked = parameter.dim() == 3
            is_inside = parameter.shape[0] not in (self.vocabulary, self.experts)  # neither embedding nor gate
            parameter.is_hidden = parameter.dim() == 3 or (parameter.dim() == 2 and is_inside)
            parameter.grad = torch.randn_like(parameter)
        return parameters

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}, {self.experts} experts of {self.hidden}"


SHAPES = {
    "quickstart": Shape(4, 192, 8, 768, 2048),  # the earlier model of the recipe, bench/convergence/switch.toml
    "many": Shape(8, 128, 64, 128, 2048),
    "large": Shape(4, 512, 8, 2048, 8192),
}


def main(argv: Sequence[str]) -> None:
    parser = options.parser("optim", __doc__, rounds=20, warmup=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names of shapes, separated by commas")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name in arguments.shapes.split(","):
        if name not in SHAPES:
            raise UserError(f"--shapes has {name!r}; {known_names(name, SHAPES)}")
        rows += [_measure(SHAPES[name], kind, device, arguments) for kind in OURS]
    report.write(rows, arguments.out, "optim")
    for row, kind in zip(rows, list(OURS) * len(rows), strict=False):
        print(f"{row.label}: {OURS[kind]} is {row.ratio(OURS[kind])} times as fast as the loop")


def _measure(shape: Shape, kind: str, device: torch.device, arguments) -> frame.Measurement:
    def ours() -> Callable[[], object]:
        parameters = shape.parameters(device)
        if kind == "muon":
            return Muon(parameters, lr=1e-4, matrices={p: Matrices.of(p) for p in parameters if p.is_hidden}).step
        return (Lamb if kind == "lamb" else Lars)(parameters, lr=1e-4).step

    def loop() -> Callable[[], object]:
        # A view of each expert, as for an optimizer that does not support stacks.
        tensors = []
        for parameter in shape.parameters(device):
            weights = parameter.detach()
            gradients = parameter.grad
            pairs = (
                zip(weights.unbind(), gradients.unbind(), strict=True)
                if is_stacked(parameter)
                else [(weights, gradients)]
            )
            tensors += [_Tensor(w, g, parameter.is_hidden) for w, g in pairs]
        return _LOOPS[kind](tensors)

    def adamw() -> Callable[[], object]:
        return torch.optim.AdamW(shape.parameters(device), lr=1e-4, foreach=True).step

    elements = sum(parameter.numel() for parameter in shape.parameters(device))
    return frame.measure(
        [
            frame.Contender(LOOP[kind], loop, work=elements / 1e6),
            frame.Contender(OURS[kind], ours, work=elements / 1e6),
            frame.Contender(ADAMW, adamw, work=elements / 1e6),
        ],
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        reference=LOOP[kind],
        seed=arguments.seed,
        label=f"{kind}, {shape}",
        unit="M elements",
        min_seconds=0.05,
        sync=torch.cuda.synchronize if device.type == "cuda" else None,
    )


class _Tensor:
    """One tensor, its gradient and state, and whether it is a hidden matrix."""

    def __init__(self, weight: Tensor, gradient: Tensor, is_hidden: bool):
        self.weight = weight
        self.gradient = gradient
        self.is_hidden = is_hidden
        self.step = 0
        self.first = torch.zeros_like(weight)
        self.second = torch.zeros_like(weight)


@torch.no_grad()
def _lamb_loop(tensors: list[_Tensor]) -> Callable[[], None]:
    def step() -> None:
        for t in tensors:
            t.step += 1
            t.first.lerp_(t.gradient, 0.1)
            t.second.mul_(0.999).addcmul_(t.gradient, t.gradient, value=1e-3)
            update = t.second.sqrt().div_(math.sqrt(1 - 0.999**t.step)).add_(1e-6)
            update = torch.div(t.first, update, out=update).div_(1 - 0.9**t.step)
            ratio = 1.0
            if t.weight.dim() > 1:
                update.add_(t.weight, alpha=0.01)
                norms = t.weight.norm(), update.norm()
                ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
            t.weight.add_(update.mul_(ratio), alpha=-1e-4)

    return step


@torch.no_grad()
def _lars_loop(tensors: list[_Tensor]) -> Callable[[], None]:
    def step() -> None:
        for t in tensors:
            update = t.gradient
            ratio = 1.0
            if t.weight.dim() > 1:
                update = torch.add(t.gradient, t.weight, alpha=1e-4)
                norms = t.weight.norm(), t.gradient.norm()
                fraction = 1e-3 * norms[0] / (norms[1] + 1e-4 * norms[0])
                ratio = torch.where((norms[0] > 0) & (norms[1] > 0), fraction, 1.0)
            t.first.mul_(0.9).add_(update * ratio, alpha=1e-4)
            t.weight.sub_(t.first)

    return step


@torch.no_grad()
def _muon_loop(tensors: list[_Tensor]) -> Callable[[], None]:
    def step() -> None:
        for t in tensors:
            t.step += 1
            t.weight.mul_(1 - 1e-4 * 0.1)
            t.first.lerp_(t.gradient, 0.05 if t.is_hidden else 0.1)
            if not t.is_hidden:
                t.second.mul_(0.95).addcmul_(t.gradient, t.gradient, value=0.05)
                roots = t.second.sqrt().div_(math.sqrt(1 - 0.95**t.step)).add_(1e-8)
                t.weight.addcdiv_(t.first, roots, value=-1e-4 / (1 - 0.9**t.step))
                continue
            x = t.gradient.lerp(t.first, 0.95)
            x = x.T if x.shape[0] > x.shape[1] else x
            x = x / (x.norm() + 1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
            x = x.T if t.weight.shape[0] > t.weight.shape[1] else x
            t.weight.sub_(x, alpha=1e-4 * 0.2 * math.sqrt(max(x.shape)))

    return step


_LOOPS = {"lamb": _lamb_loop, "lars": _lars_loop, "muon": _muon_loop}
