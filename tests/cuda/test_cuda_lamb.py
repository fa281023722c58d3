"""LAMB's kernels against fmoe.optim.Lamb over several steps: stacks of experts, matrices, vectors, parts of them."""

import copy
import math
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch
from compare import assert_close
from cpu_launcher import on_cpu
from emulator import Emulator, InOut, Output
from kernel_list import NAMES

from fmoe.optim import Lamb
from fmoe.optim.layout import Blocks, Layout

FLOAT = torch.float32


class Parameters:
    """Some parameters: stacks, matrices, vectors; all in one dtype, gradients perhaps in another."""

    def __init__(self, seed):
        draw, self.g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = list(NAMES)[seed % 3]
        self.grad_dtype = draw.choice([self.dtype, FLOAT])
        self.chunk = draw.choice([64, 1000, 65536])
        shapes = [(draw.randint(1, 5), draw.randint(1, 40), draw.randint(1, 30)) for _ in range(2)]
        shapes += [(draw.randint(1, 60), draw.randint(1, 60)), (draw.randint(1, 300),), (1, 1)]
        self.weights = [torch.randn(shape, generator=self.g).to(self.dtype).requires_grad_() for shape in shapes]
        for weight in self.weights[:2]:
            weight.is_stacked = True
        with torch.no_grad():
            self.weights[0][0].zero_()  # an expert without a norm: ratio 1
        self.options = {
            "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": draw.choice([0.0, 0.1]),
            "max_trust": draw.choice([None, 0.5, 10.0]),
        }  # fmt: skip

    def gradients(self):
        return [torch.randn(w.shape, generator=self.g).to(self.grad_dtype) for w in self.weights]


class Step:
    """Tables of the kernels for these arrays, and a step by them."""

    def __init__(self, launch, parameters):
        self.launch, self.p = launch, parameters
        self.kernel = f"fmoe::lamb_measure<{NAMES[parameters.dtype]}, {NAMES[parameters.grad_dtype]}>"
        self.blocks = sum(self._count(w) for w in parameters.weights)

    @staticmethod
    def _count(weight):
        return weight.shape[0] if getattr(weight, "is_stacked", False) else int(weight.dim() > 1)

    @contextmanager
    def arrays(self, *lists):
        """Memory for lists of tensors, that the tables point to."""
        held = [[self.launch.array(self.kernel, t, f"tensor {n}") for n, t in enumerate(some)] for some in lists]
        try:
            yield held
        finally:
            whole = [array.release() for some in held for array in some]
        assert all(whole), "written beside a tensor"

    def chunks(self, held):
        """[C, 6] and where the chunks of each block begin."""
        table, vectors, first = [], [], [0]
        block = 0
        for slot, weight in enumerate(self.p.weights):
            count = self._count(weight)
            length = weight.numel() // max(count, 1)
            for part in range(max(count, 1)):
                for begin in range(part * length, (part + 1) * length, self.p.chunk):
                    size = min(self.p.chunk, (part + 1) * length - begin)
                    itemsizes = (self.p.dtype.itemsize, self.p.grad_dtype.itemsize, 4, 4)
                    addresses = [
                        some[slot].address + begin * size_of for some, size_of in zip(held, itemsizes, strict=True)
                    ]
                    (table if count else vectors).append(
                        [*addresses, size, (block + part if count else -1) << 32 | slot]
                    )  # fmt: skip
                if count:
                    first.append(len(table))
            block += count
        return torch.tensor(table + vectors, dtype=torch.int64), torch.tensor(first)

    def slots(self, step):
        beta1, beta2 = self.p.options["betas"]
        root = math.sqrt(1 - beta2**step)
        trust = self.p.options["max_trust"]
        row = [
            1 - beta1, beta2, self.p.options["eps"] * root, root / (1 - beta1**step), self.p.options["weight_decay"],
            self.p.options["lr"], math.inf if trust is None else trust, 1 - beta2,
        ]  # fmt: skip
        return torch.tensor([row] * len(self.p.weights))

    def run(self, weights, gradients, exp_avg, exp_avg_sq, step):
        """Everything after the step, and the ratios."""
        with self.arrays(weights, gradients, exp_avg, exp_avg_sq) as held:
            chunks, first = self.chunks(held)
            slots, count = self.slots(step), len(chunks)
            (partial,) = self.launch(self.kernel, (count, 512, 256), chunks, slots, Output((count, 2), torch.float64))
            (squares,) = self.launch(
                "fmoe::lamb_norms", (max(1, -(-self.blocks // 8)), 256, 0), partial, first, self.blocks,
                Output((2, self.blocks), torch.float64),
            )  # fmt: skip
            (ratios,) = self.launch(
                f"fmoe::lamb_update<{NAMES[self.p.dtype]}>", (count, 512, 0), chunks, slots, squares, self.blocks,
                InOut(torch.full((self.blocks,), torch.nan)),
            )  # fmt: skip
            return [[array.read() for array in some] for some in held], ratios


@pytest.mark.parametrize("seed", range(18))
def test_steps(launch, seed):
    parameters = Parameters(seed)
    step = Step(launch, parameters)
    optimizer = Lamb(parameters.weights, **parameters.options)
    weights = [w.detach().clone() for w in parameters.weights]
    exp_avg, exp_avg_sq = ([torch.zeros(w.shape) for w in weights] for _ in range(2))
    for number in (1, 2, 3):
        gradients = parameters.gradients()
        for weight, gradient in zip(parameters.weights, gradients, strict=True):
            weight.grad = gradient.to(weight.dtype)
            weight.grad_dtype = None
        if parameters.grad_dtype != parameters.dtype:  # as torch has no wider gradients, give what it can hold
            gradients = [w.grad.to(parameters.grad_dtype) for w in parameters.weights]
        (weights, _, exp_avg, exp_avg_sq), ratios = step.run(weights, gradients, exp_avg, exp_avg_sq, number)
        optimizer.step()
        limit = {FLOAT: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[parameters.dtype]
        expected = torch.cat(optimizer.trust_ratios())
        assert_close(ratios, expected, limit, "ratios")
        for index, weight in enumerate(parameters.weights):
            state = optimizer.state[weight]
            assert_close(exp_avg[index], state["exp_avg"], 1e-5, "exp_avg")
            assert_close(exp_avg_sq[index], state["exp_avg_sq"], 1e-5, "exp_avg_sq")
            assert_close(weights[index], weight, limit, f"weight {index}")
        # 16-bit rounding may differ in a last place: the next step begins from the same.
        weights = [w.detach().clone() for w in parameters.weights]


def test_squares_do_not_overflow(launch):
    """In float32 the square of 1e25 is infinite."""
    parameters = Parameters(0)
    step = Step(launch, parameters)
    weights = [w.detach() * 1e25 for w in parameters.weights]
    zeros = [torch.zeros(w.shape) for w in weights]
    (_, ratios) = step.run(weights, parameters.gradients(), zeros, zeros, 1)
    assert ratios.isfinite().all()


def test_the_same_bits_wherever_tensors_lie(kernels):
    """At 16 bytes or not: an expert of a stack is stepped as one that lies alone."""
    results = []
    for unaligned in (False, True):
        parameters = Parameters(3)
        weights = [w.detach() for w in parameters.weights]
        zeros = [torch.zeros(w.shape) for w in weights]
        step = Step(Emulator(kernels, unaligned=unaligned), parameters)
        (stepped, _, _, _), ratios = step.run(weights, parameters.gradients(), zeros, zeros, 1)
        results.append([*stepped, ratios])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_blocks_without_chunks(launch):
    """Tensors without a gradient in this step have norms of zero, and no ratio is written."""
    (squares,) = launch(
        "fmoe::lamb_norms", (1, 256, 0), torch.ones(3, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 3]), 3,
        Output((2, 3), torch.float64),
    )  # fmt: skip
    assert squares.tolist() == [[1, 0, 2], [1, 0, 2]]


def optimizers(seed):
    """Two alike, over parameters of several dtypes in two groups, each a whole parameter or flat shards of one."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    stacked = [torch.randn(draw.randint(1, 5), 12, draw.randint(1, 30), generator=g) for _ in range(3)]
    others = [torch.randn(shape, generator=g) for shape in ((40, 33), (70,), (300, 300))]
    dtypes = [FLOAT, FLOAT, torch.bfloat16, torch.bfloat16, FLOAT, torch.float16]
    tensors = [t.to(dtype) for t, dtype in zip(stacked + others, dtypes, strict=True)]
    start, made = draw.randint(0, 12), []
    for _ in range(2):
        weights = [t.clone().requires_grad_() for t in tensors]
        for weight in weights[:3]:
            weight.is_stacked = True
        parts, blocks = list(weights), [Blocks.of(w) for w in weights]
        where = {w: (number, 0) for number, w in enumerate(weights)}
        if seed % 2:  # what a distributed optimizer has of the first: not whole blocks
            shard = tensors[0].flatten()[start:].clone().requires_grad_()
            parts[0], where = shard, {shard: (0, start)} | dict(list(where.items())[1:])
        groups = [{"params": parts[:2] + parts[4:]}, {"params": parts[2:4], "lr": 0.1, "max_trust": 2.0}]
        optimizer = Lamb(groups, lr=0.02, weight_decay=0.1)
        optimizer.set_layout(Layout(blocks, where))
        made.append((parts, optimizer))
    return g, made


@pytest.mark.parametrize("seed", range(8))
def test_the_optimizer_takes_them(kernels, seed):
    """Five steps of fmoe.optim.Lamb with the kernels and without; some tensors have no gradient at times."""
    g, ((ours, fused), (theirs, plain)) = optimizers(seed)
    for number in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(mine.shape, generator=g).to(mine.dtype)
            is_left_out = torch.rand((), generator=g) < 0.2
            mine.grad = None if is_left_out else gradient
            other.grad = None if is_left_out else gradient.clone()
        if number == 3:  # a schedule, and a state that was loaded
            for optimizer in (fused, plain):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.param_groups[0]["lr"] *= 0.5
        for optimizer, where in ((fused, on_cpu(kernels, seed)), (plain, nullcontext())):
            with where as launcher:
                optimizer.step()
            if launcher is not None and any(p.grad is not None for p in ours):
                assert launcher.names() >= {"lamb_measure", "lamb_update"}
        for mine, other in zip(fused.trust_ratios(), plain.trust_ratios(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-6, equal_nan=True)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other, {FLOAT: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[mine.dtype], "weight")
            with torch.no_grad():
                mine.copy_(other)


def test_the_optimizer_leaves_what_they_do_not_take(kernels):
    """float64, and tensors that are no plain rows."""
    for weight in (torch.randn(4, 4, dtype=torch.float64), torch.randn(6, 4).t()):
        weight.requires_grad_().grad = torch.ones_like(weight)
        with on_cpu(kernels) as launcher:
            Lamb([weight]).step()
        assert not launcher.launched
