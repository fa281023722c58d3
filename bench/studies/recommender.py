"""``python -m bench recommender``: MMoE over a table of embeddings, divided among ranks, against its dense twin.

The click log is generated: users and items follow power laws, and the popular items drift from step to step. Clicks and
conversions depend on hidden vectors of user and item; items of a category resemble each other. Two tasks are trained:
click, and click with conversion. Experts are spread over the ranks. The dense twin is a shared bottom, one feed-forward
block with as many FLOPs and parameters as all experts, and a head per task.

Compare each contender at its best learning rate. Every batch is predicted before it is trained on. AUCs are over the
last fifth of the steps. The table is trained by row-wise Adagrad. The exit code is 1 if a rank holds other bytes than
rows / ranks x (4 x dim + 4). For a large table: ``--rows 50000000 --steps 10 --seeds 0 --lr 0.01 --contenders mmoe``.
"""

import argparse
import itertools
import resource
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fmoe
from bench import options, ranks, report
from fmoe import parallel, random
from fmoe.errors import UserError
from fmoe.experts import build_experts
from fmoe.optim import RowAdagrad
from fmoe.shards import TokenShards

TASKS = ("click", "conversion")
CONTENDERS = ("mmoe", "dense")
USERS, CATEGORIES, HIDDEN_DIM = 2_000, 64, 4


def main(argv: Sequence[str]) -> int:
    parser = options.bare_parser("recommender", __doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table: users, categories and items")
    parser.add_argument("--dim", type=int, default=16, help="width of an embedding")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=2_048, help="impressions per step, over all ranks")
    parser.add_argument("--drift", type=int, default=20, help="places by which the popularity moves on in a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--width", type=int, default=48, help="width of the experts' input and output")
    parser.add_argument("--hidden", type=int, default=32, help="hidden units of an expert")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.01, 0.02], help="rates of Adam, for the dense part")
    parser.add_argument("--row-lr", type=float, default=0.1, help="learning rate of row-wise Adagrad, for the table")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, ranks=1, dim=1, steps=5, drift=0, width=1, hidden=1, rows=2 * (USERS + CATEGORIES))
    options.at_least(arguments, lr=0, row_lr=0)
    for name in ("batch", "experts"):
        if getattr(arguments, name) < 1 or getattr(arguments, name) % arguments.ranks:
            raise UserError(f"--{name}={getattr(arguments, name)} must be a multiple of --ranks={arguments.ranks}")
    rows = ranks.run(arguments.ranks, train_all, arguments)
    text, is_met = table(rows, arguments)
    report.write_rows(rows, text, arguments.out, "recommender")
    return 0 if is_met else 1


class ClickLog:
    """Batch n is a function of n and the seed."""

    def __init__(self, arguments: argparse.Namespace, seed: int):
        self.arguments = arguments
        self.seed = seed
        self.items = arguments.rows - USERS - CATEGORIES

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return ids of the table [T, 3] (user, category, item), and labels [T, 2]."""
        generator = torch.Generator().manual_seed(random.key("clicks", self.seed, step))
        draws = torch.rand(self.arguments.batch, 4, generator=generator, dtype=torch.float64)
        users = (USERS ** draws[:, 0]).long() - 1  # the probability of place k falls as 1 / k
        places = (self.items ** draws[:, 1]).long() - 1
        items = (places + self.arguments.drift * step) % self.items
        categories = random.fold(self._key("categories"), items) % CATEGORIES
        logits = []
        for task in TASKS:
            likes = self._vectors(f"users {task}", users)
            kinds = self._vectors(f"categories {task}", categories)
            quirks = self._vectors(f"items {task}", items)
            logits.append((likes * (0.8 * kinds + 0.6 * quirks)).sum(1) - 1)
        click = draws[:, 2] < torch.sigmoid(logits[0])
        conversion = click & (draws[:, 3] < torch.sigmoid(0.7 * logits[0] + 0.7 * logits[1]))
        ids = torch.stack([users, USERS + categories, USERS + CATEGORIES + items], 1)
        return ids, torch.stack([click, conversion], 1).float()

    def _key(self, name: str) -> Tensor:
        return random.derive(self.seed, name, torch.device("cpu"))

    def _vectors(self, name: str, ids: Tensor) -> Tensor:
        return random.exact_normal(random.fold(self._key(name), ids), HIDDEN_DIM)


class SpreadMMoE(fmoe.MMoE):
    """`fmoe.MMoE` whose experts are divided among the ranks of a group: each of them computes the tokens of all."""

    def __init__(self, d_model: int, num_experts: int, num_tasks: int, d_hidden: int, seed: int, group):
        super().__init__(d_model, num_experts, num_tasks, d_hidden, seed=seed)
        self.group = group
        count = num_experts // group.size()
        self.mine = slice(count * group.rank(), count * (group.rank() + 1))
        self.experts = build_experts("ffn", num_experts, self.mine, d_model, d_hidden, seed, {})
        for parameter in self.experts.parameters():
            parameter.allreduce = False  # `average_gradients` takes them for experts, which this rank alone has

    def forward(self, x: Tensor) -> list[Tensor]:
        shards = TokenShards.of_equal_parts(len(x), self.group)
        x_TD = shards.gather(x)
        out_ETD = self._run(x_TD.expand(self.mine.stop - self.mine.start, -1, -1))
        weight_TNE = torch.einsum("td,ked->tke", x_TD, self.gates).softmax(-1)
        y_TND = torch.einsum("tke,etd->tkd", weight_TNE[..., self.mine], out_ETD)
        return list(shards.reduce_scatter(y_TND).unbind(1))


class Model(nn.Module):
    """Embeddings of the three fields, experts or a shared bottom, and a head per task."""

    def __init__(self, contender: str, arguments: argparse.Namespace, seed: int, group):
        super().__init__()
        self.table = parallel.ShardedEmbedding(arguments.rows, arguments.dim, group, std=0.05, seed=seed)
        width = arguments.width
        with random.keyed("recommender", seed):
            self.project = nn.Linear(3 * arguments.dim, width)
            self.heads = nn.ModuleList([nn.Linear(width, 1) for _ in TASKS])
            units = arguments.experts * arguments.hidden
            self.bottom = nn.Sequential(nn.Linear(width, units), nn.GELU(), nn.Linear(units, width))
        if contender == "mmoe":
            self.bottom = SpreadMMoE(width, arguments.experts, len(TASKS), arguments.hidden, seed, group)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.project(self.table(ids).flatten(1))
        y = self.bottom(x)
        outputs = y if isinstance(y, list) else [y] * len(TASKS)
        return torch.cat([head(x + out) for head, out in zip(self.heads, outputs, strict=True)], 1)


def train_all(arguments: argparse.Namespace) -> list[dict]:
    """Return a row for each contender, learning rate and seed, on every rank."""
    runs = itertools.product(arguments.contenders, arguments.lr, arguments.seeds)
    return [train(arguments, *run) for run in runs]


def train(arguments: argparse.Namespace, contender: str, lr: float, seed: int) -> dict:
    groups = parallel.init()
    group = groups.data_group
    model = Model(contender, arguments, seed, group)
    rows = RowAdagrad([model.table.weight], lr=arguments.row_lr)
    dense = torch.optim.Adam(model.parameters(), lr=lr)
    log = ClickLog(arguments, seed)
    evaluated = max(1, arguments.steps // 5)
    mine = slice(*(arguments.batch // group.size() * end for end in (group.rank(), group.rank() + 1)))
    predictions = []
    losses = []
    begin = time.perf_counter()
    for step in range(arguments.steps):
        ids, labels = log[step]
        logits = model(ids[mine])
        loss = F.binary_cross_entropy_with_logits(logits, labels[mine])
        losses.append(loss.detach())
        if step >= arguments.steps - evaluated:
            predictions.append(torch.cat([logits.detach(), labels[mine]], 1))
        rows.zero_grad()
        dense.zero_grad()
        loss.backward()
        parallel.average_gradients(model, group)
        rows.step()
        dense.step()
    seconds = time.perf_counter() - begin
    both = torch.cat(predictions)
    scored = TokenShards.of_equal_parts(len(both), group).all_gather(both)
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=group)
    held = model.table.weight.nbytes + sum(value.nbytes for value in rows.state[model.table.weight].values())
    return {
        "contender": contender,
        "lr": lr,
        "seed": seed,
        "auc": [auc(scored[:, n], scored[:, 2 + n] > 0) for n in range(len(TASKS))],
        "losses": (mean / group.size()).tolist(),
        "held": int(ranks.slowest(held)),
        "peak": int(ranks.slowest(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)),
        "seconds": ranks.slowest(seconds / arguments.steps),
    }


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the probability that a positive has a larger score than a negative; equal scores count half."""
    negatives = scores[~labels].sort().values
    positives = scores[labels]
    below = torch.searchsorted(negatives, positives) + torch.searchsorted(negatives, positives, right=True)
    return (below.double().mean() / 2 / len(negatives)).item()


def table(rows: Sequence[dict], arguments: argparse.Namespace) -> tuple[str, bool]:
    """Return Markdown, and whether all ranks hold the bytes of the formula."""
    cells = [["contender", "lr", *(f"AUC of {task}, by seed" for task in TASKS), "mean", "loss, last fifth"]]
    for name, lr in itertools.product(arguments.contenders, arguments.lr):
        of = [row for row in rows if (row["contender"], row["lr"]) == (name, lr)]
        aucs = [[row["auc"][n] for row in of] for n in range(len(TASKS))]
        last = statistics.mean(statistics.mean(row["losses"][-max(1, arguments.steps // 5) :]) for row in of)
        shown = [", ".join(f"{value:.4f}" for value in values) for values in aucs]
        means = " / ".join(f"{statistics.mean(values):.4f}" for values in aucs)
        cells.append([name, f"{lr:g}", *shown, means, f"{last:.4f}"])
    formula = -(-arguments.rows // arguments.ranks) * (4 * arguments.dim + 4)
    held = max(row["held"] for row in rows)
    is_met = held == formula
    lines = [
        f"{arguments.rows:,} rows of width {arguments.dim} on {arguments.ranks} ranks, {arguments.steps} steps of "
        f"{arguments.batch} impressions:",
        "",
        *report.table(cells),
        "",
        f"bytes of the table and its optimizer on the largest rank: {held:,}; rows / ranks x (4 x dim + 4) = "
        f"{formula:,} ({'met' if is_met else 'missed'}); largest resident size of a process {rows[-1]['peak']:,}",
        "",
        "seconds per step: " + ", ".join(f"{row['contender']} {row['seconds']:.4f}" for row in rows),
    ]
    return "\n".join(lines) + "\n", is_met
