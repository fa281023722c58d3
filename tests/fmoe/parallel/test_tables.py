"""Tables divided among ranks against a dense embedding in one process: values, gradients, updates, checkpoints."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_close
from forks import values
from rank_pool import Raised

from fmoe import UserError, parallel
from fmoe.exchange.monitor import PeerError
from fmoe.optim import RowAdagrad, RowAdam

ROWS, DIM, STEPS = 37, 5, 4
EVERY_ID = torch.arange(ROWS)
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.5),
    "adagrad": lambda weights: RowAdagrad(weights, lr=0.5),
    "adam": lambda weights: RowAdam(weights, lr=0.1),
}


def group_of(size):
    """All ranks, or a group for each of them: then each is a job of one process."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return dist.group.WORLD if size > 1 else alone[dist.get_rank()]


def batch(step):
    """Ids with duplicates, and what their rows are compared with."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (8, 3), generator=generator).square() % ROWS
    return ids, torch.randn(8, 3, DIM, generator=generator, dtype=torch.float64)


def take_steps(model, optimizers, numbers, group, groups):
    for step in numbers:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, group).backward()
        if group.size() > 1:
            parallel.average_gradients(model, groups=groups)
        for optimizer in optimizers:
            optimizer.step()


def loss_of(embedding, step, group=None):
    """The sum over the global batch is the mean over ranks; in the second step, the first rank has all ids."""
    ids, target = batch(step)
    if group is None:
        return (embedding(ids) - target).square().sum()
    size = group.size()
    lengths = [len(ids) // size] * size if step != 1 else [len(ids)] + [0] * (size - 1)
    mine = [part.split(lengths)[group.rank()] for part in (ids, target)]
    return size * (embedding(mine[0]) - mine[1]).square().sum()


def make(size, optimizer):
    group = group_of(size)
    table = parallel.ShardedEmbedding(ROWS, DIM, group, std=1.0, seed=3).double()
    return table, OPTIMIZERS[optimizer]([table.weight]), group


def whole(table):
    with torch.no_grad():
        return table(EVERY_ID)


def steps(table, optimizer, group, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(table, step, group).backward()
        optimizer.step()


def train(size, optimizer):
    """The table before and after training, the first gradient, and the number of rows that it has."""
    table, optimizer, group = make(size, optimizer)
    first = whole(table)
    loss_of(table, 0, group).backward()
    gradient = table.weight.grad.coalesce()
    dense = table.whole(gradient.to_dense()).full_tensor()[table.positions(EVERY_ID)]
    touched = torch.tensor(gradient.values().shape[0])
    dist.all_reduce(touched, group=group)
    steps(table, optimizer, group, 0, STEPS)
    return first, dense, touched.item(), whole(table)


class Dense:
    """The obvious table in one process: loops over the rows that a batch has."""

    def __init__(self, weight, optimizer):
        self.weight = weight.clone().requires_grad_()
        self.kind = optimizer
        self.sums = torch.zeros(ROWS, dtype=torch.float64)
        self.moments = torch.zeros(2, ROWS, DIM, dtype=torch.float64)

    def __call__(self, ids):
        return self.weight[ids]

    def gradient(self, step):
        return torch.autograd.grad(loss_of(self, step), self.weight)[0]

    @torch.no_grad()
    def step(self, gradient, step):
        for row in set(batch(step)[0].flatten().tolist()):
            g = gradient[row]
            if self.kind == "sgd":
                self.weight[row] -= 0.5 * g
            elif self.kind == "adagrad":
                self.sums[row] += g.square().mean()
                self.weight[row] -= 0.5 * g / (self.sums[row].sqrt() + 1e-8)
            else:
                m, v = self.moments[:, row]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g.square())
                scale = (1 - 0.999 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1))
                self.weight[row] -= 0.1 * scale * m / (v.sqrt() + 1e-8)


def trained(first, optimizer):
    dense = Dense(first, optimizer)
    for step in range(STEPS):
        dense.step(dense.gradient(step), step)
    return dense.weight.detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("pool", "size"), [("two_ranks", 1), ("two_ranks", 2), pytest.param("four_ranks", 4, marks=pytest.mark.slow)]
)
def test_a_table_equals_a_dense_one(request, pool, size, optimizer):
    results = values(request.getfixturevalue(pool).run(train, size, optimizer))
    first = results[0][0]
    assert first.std() == pytest.approx(1, abs=0.2)
    dense = Dense(first, optimizer)
    for initial, gradient, touched, last in results:
        assert torch.equal(initial, first)
        assert_close(gradient, dense.gradient(0), 1e-12, "gradient")
        assert touched == len(batch(0)[0].unique()), "duplicates are merged, other rows have no gradient"
        assert_close(last, trained(first, optimizer), 1e-12, "table")


def initial(size):
    return whole(make(size, "sgd")[0])


def test_initial_rows_do_not_depend_on_ranks(two_ranks):
    one, _ = values(two_ranks.run(initial, 1))
    two, _ = values(two_ranks.run(initial, 2))
    assert torch.equal(one, two)
    assert len(one.unique(dim=0)) == ROWS


def scalar():
    table = make(2, "sgd")[0]
    return table(torch.tensor(7)).detach(), whole(table)[7]


def test_one_id(two_ranks):
    for row, expected in values(two_ranks.run(scalar)):
        assert torch.equal(row, expected)


def narrow(dtype):
    table = parallel.ShardedEmbedding(1000, 2, dist.group.WORLD)
    ids = torch.tensor([0, 5, 100])
    return torch.equal(table(ids.to(dtype)), table(ids))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_ids_whose_dtype_does_not_hold_the_number_of_rows(two_ranks, dtype):
    assert values(two_ranks.run(narrow, dtype)) == [True, True]


def spread(num_rows):
    table = parallel.ShardedEmbedding(num_rows, 1, dist.group.WORLD)
    positions = table.positions(torch.arange(num_rows))
    frequent = (positions[: max(2, num_rows // 50)] // table.rows_per_rank).double().mean().item()
    rows = table(torch.arange(num_rows))  # also if a rank has none of them
    rows.sum().backward()
    assert len(rows) == num_rows and table.weight.grad.shape == table.weight.shape
    return positions.sort().values.tolist() == list(range(num_rows)), frequent, len(table.weight)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 1000, 1024])
def test_positions_are_a_permutation_that_spreads_small_ids(two_ranks, num_rows):
    results = values(two_ranks.run(spread, num_rows))
    assert all(is_permutation for is_permutation, _, _ in results)
    assert sum(count for _, _, count in results) == num_rows
    assert num_rows < 1000 or results[0][1] == pytest.approx(0.5, abs=0.1)


class Both(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(0)
        self.table = table
        self.linear = torch.nn.Linear(DIM, DIM).double()

    def forward(self, ids):
        return self.linear(self.table(ids))


def half(size, optimizer, folder, save):
    """Train half of the steps and save, or load and train the rest; the state is that of `fmoe.parallel`."""
    table, rows, group = make(size, optimizer)
    groups = parallel.init()
    model = Both(table)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": parallel.state_dict(model, groups), "rows": parallel.optimizer_rows(model, rows)}
    if not save:
        with torch.no_grad():
            table.weight.zero_()
        # Jobs of one process, side by side.
        dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=size == 1)
        parallel.load_state_dict(model, state["model"], groups)
    numbers = range(STEPS // 2) if save else range(STEPS // 2, STEPS)
    take_steps(model, (rows, dense), numbers, group, groups)
    if save and (size > 1 or dist.get_rank() == 0):
        state = {"model": parallel.state_dict(model, groups), "rows": parallel.optimizer_rows(model, rows)}
        dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=size == 1)
    return whole(table), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 2),
        (1, 2),
        (2, 1),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 4), (2, 4), (4, 2), (4, 1))),
    ],
)
def test_checkpoints_load_at_any_number_of_ranks(request, tmp_path, optimizer, before, after):
    pools = {1: "two_ranks", 2: "two_ranks", 4: "four_ranks"}
    values(request.getfixturevalue(pools[before]).run(half, before, optimizer, tmp_path / "a", True))
    results = values(request.getfixturevalue(pools[after]).run(half, after, optimizer, tmp_path / "a", False))
    expected = straight(request.getfixturevalue(pools[before]), before, optimizer)
    for table, parameters in results:
        if before == after:
            assert torch.equal(table, expected[0])
        assert_close(table, expected[0], 1e-12, "table")
        for actual, wanted in zip(parameters, expected[1], strict=True):
            assert_close(actual, wanted, 1e-12, "dense")


def straight_steps(size, optimizer):
    table, rows, group = make(size, optimizer)
    groups = parallel.init()
    model = Both(table)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    take_steps(model, (rows, dense), range(STEPS), group, groups)
    return whole(table), [p.detach() for p in model.parameters()]


def straight(pool, size, optimizer):
    return values(pool.run(straight_steps, size, optimizer))[0]


def loaded(change):
    """The table after a load of a changed state of another table."""
    table, other = (parallel.ShardedEmbedding(ROWS, DIM, dist.group.WORLD, seed=seed) for seed in (0, 1))
    table.load_state_dict(change(other))
    return torch.equal(whole(table), whole(other)), torch.equal(whole(deepcopy(table)), whole(table))


def of_shape(rows, dim):
    return parallel.ShardedEmbedding(rows, dim, dist.group.WORLD).state_dict()


STATES = {
    "divided": lambda table: table.state_dict(),
    "plain": lambda table: {"weight": table.state_dict()["weight"].full_tensor()},
    "unknown": lambda table: table.state_dict() | {"bias": torch.zeros(1)},
    "missing": lambda table: {},
    "width": lambda table: of_shape(ROWS, 1),
    "two rows": lambda table: of_shape(2, DIM),
    "one row less": lambda table: of_shape(ROWS + 1, DIM),
}
REFUSED = {"unknown": '"bias"', "missing": '"weight"'}
REFUSED |= {"width": f"({ROWS}, 1)", "two rows": f"(2, {DIM})", "one row less": f"({ROWS + 1}, {DIM})"}


def load(name):
    return loaded(STATES[name])


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_loaded_or_refused_on_all_ranks(two_ranks, name):
    for result in two_ranks.run(load, name):
        if name in REFUSED:
            assert isinstance(result, Raised) and issubclass(result.kind, RuntimeError)
            assert REFUSED[name] in result.message
        else:
            assert result == (True, True)


def states_of_two():
    groups = parallel.init()
    tables = {name: parallel.ShardedEmbedding(ROWS, DIM, groups.data_group) for name in ("a", "b")}
    model = torch.nn.ModuleDict(tables | {"linear": torch.nn.Linear(1, 1)})
    optimizers = RowAdagrad([tables["a"].weight]), RowAdam([tables["b"].weight])
    wrapped = torch.nn.ModuleDict({"inner": parallel.DistributedDataParallel(model, groups)})
    names = [sorted(parallel.optimizer_rows(wrapped, optimizer)) for optimizer in optimizers]
    return names, [len(optimizer.state_dict()["state"]) for optimizer in optimizers]


def test_two_optimizers_and_a_wrapper(two_ranks):
    """Each has the state of its own tables, and names are those of the model without wrapper."""
    for names, counts in values(two_ranks.run(states_of_two)):
        assert names == [["inner.a.sum"], ["inner.b.exp_avg", "inner.b.exp_avg_sq", "inner.b.step"]]
        assert counts == [1, 1]


def invalid(ids):
    table = parallel.ShardedEmbedding(ROWS, DIM, dist.group.WORLD)
    return table(ids if dist.get_rank() == 1 else torch.tensor([1]))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.tensor([0, ROWS]), f"ids={ROWS} "),
        (torch.tensor([[-1]]), "ids=-1 "),
        (torch.tensor(ROWS), f"ids={ROWS} "),
        (torch.tensor([0.5]), "torch.float32"),
    ],
    ids=["above", "below", "scalar", "float"],
)
def test_an_invalid_id_on_one_rank_raises_on_all(two_ranks, ids, text):
    results = two_ranks.run(invalid, ids)
    assert [type(result) for result in results] == [Raised, Raised]
    assert issubclass(results[1].kind, UserError) and issubclass(results[0].kind, PeerError)
    assert all(text in result.message and "\n" not in result.message for result in results)
    assert "rank 1" in results[0].message
    assert len(values(two_ranks.run(initial, 2))) == 2, "the ranks still work"


def refused(what):
    group = dist.group.WORLD
    if what == "num_rows":
        parallel.ShardedEmbedding(0, DIM, group)
    if what == "dim":
        parallel.ShardedEmbedding(ROWS, 0, group)
    if what == "std":
        parallel.ShardedEmbedding(ROWS, DIM, group, std=-1.0)
    table = parallel.ShardedEmbedding(ROWS, DIM, group)
    if what == "period":
        parallel.CachedEmbedding(table, period=0)
    if what == "local_lr":
        parallel.CachedEmbedding(table, period=1, local_lr=-1.0)
    if what == "lr":
        RowAdagrad([table.weight], lr=-1.0)


@pytest.mark.parametrize(
    ("what", "value"), [("num_rows", 0), ("dim", 0), ("std", -1.0), ("period", 0), ("local_lr", -1.0), ("lr", -1.0)]
)
def test_wrong_arguments(two_ranks, what, value):
    for result in two_ranks.run(refused, what):
        assert isinstance(result, Raised) and issubclass(result.kind, UserError)
        assert result.message.startswith(f"{what}={value} ")


def wrapped(kind):
    """Gradients of the table and of the dense layer of a wrapped model."""
    groups = parallel.init()
    table, _, group = make(2, "sgd")
    model = Both(table)
    wrappers = {"ddp": parallel.DistributedDataParallel, "fsdp": parallel.fully_shard}
    model = wrappers[kind](model, groups) if kind in wrappers else model
    loss_of(model, 0, group).backward()
    if kind == "none":
        parallel.average_gradients(model, groups=groups)
    gradients = [p.grad.full_tensor() if kind == "fsdp" else p.grad for p in model.parameters()]
    return [table.weight.grad.to_dense(), *gradients]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrappers_leave_tables_alone(two_ranks, kind):
    for expected, actual in zip(
        values(two_ranks.run(wrapped, "none")), values(two_ranks.run(wrapped, kind)), strict=True
    ):
        for a, b in zip(actual, expected, strict=True):
            assert_close(a, b, 1e-12, kind)


def cached(period, local_lr, count, folder=None, resumes=False):
    """The table after each step; with a folder, it is saved after two steps, or loaded before the third."""
    table, optimizer, group = make(2, "sgd" if local_lr is None else "adagrad")
    if local_lr is not None:
        optimizer = torch.optim.SGD([table.weight], lr=1.0)
    embedding = parallel.CachedEmbedding(table, period, local_lr)
    tables = [whole(table)]
    if resumes:
        state = embedding.state_dict()
        dcp.load(state, checkpoint_id=folder)
        embedding.load_state_dict(state)
    for step in range(2 if resumes else 0, count):
        optimizer.zero_grad()
        ids, target = (part.chunk(2)[group.rank()] for part in batch(step))
        once, again = embedding(ids), embedding(ids[:1])  # two forward passes in a step
        loss = (once - target).square().sum() + again.square().sum()
        (2 * loss).backward()
        embedding.end_backward()
        optimizer.step()
        tables.append(whole(table))
        if folder and not resumes and step == 1:
            dcp.save(embedding.state_dict(), checkpoint_id=folder)
    return tables


def by_hand(first, period, local_lr, count):
    """Both modes in one process, with a table for each rank."""
    table = first.clone()
    tables = [table.clone()]
    copies = []
    for step in range(count):
        if step % period == 0:
            copies = [{}, {}]
        total = torch.zeros_like(table)
        for rank, copy in enumerate(copies):
            ids, target = (part.chunk(2)[rank] for part in batch(step))
            for row in ids.unique().tolist():
                copy.setdefault(row, table[row].clone())
            gradient = torch.zeros_like(table)
            for row, wanted in zip(ids.flatten().tolist(), target.flatten(0, 1), strict=True):
                gradient[row] += 4 * (copy[row] - wanted)
            for row in ids[:1].flatten().tolist():
                gradient[row] += 4 * copy[row]
            total += gradient / 2
            for row in copy:
                copy[row] = copy[row] - (local_lr or 0) * gradient[row]
        if local_lr is None:
            table = table - 0.5 * total
        elif (step + 1) % period == 0:
            for row in set().union(*copies):
                table[row] += sum(copy[row] - table[row] for copy in copies if row in copy).div(2)
        tables.append(table.clone())
    return tables


@pytest.mark.parametrize("local_lr", [None, 0.02], ids=["stale", "geo"])
@pytest.mark.parametrize("period", [1, 2, 3])
def test_copies_are_as_old_as_the_period_allows(two_ranks, period, local_lr):
    results = values(two_ranks.run(cached, period, local_lr, 6))
    expected = by_hand(results[0][0], period, local_lr, 6)
    for tables in results:
        for step, (actual, wanted) in enumerate(zip(tables, expected, strict=True)):
            assert_close(actual, wanted, 1e-12, f"step {step}")


@pytest.mark.parametrize("local_lr", [None, 0.02], ids=["stale", "geo"])
def test_a_resume_after_a_period_is_exact(two_ranks, tmp_path, local_lr):
    expected = values(two_ranks.run(cached, 2, local_lr, 4, tmp_path / "a"))
    results = values(two_ranks.run(cached, 2, local_lr, 4, tmp_path / "a", True))
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual[-1], wanted[-1])


def test_a_save_within_a_period_is_refused(two_ranks, tmp_path):
    for result in two_ranks.run(cached, 3, None, 4, tmp_path / "a"):
        assert isinstance(result, Raised) and issubclass(result.kind, UserError)
        assert "steps=2 " in result.message and "period=3 " in result.message


def loaded_within_a_period():
    table, other = (parallel.ShardedEmbedding(ROWS, DIM, dist.group.WORLD, seed=seed) for seed in (0, 1))
    embedding = parallel.CachedEmbedding(table, period=3)
    embedding(EVERY_ID).sum().backward()
    embedding.end_backward()
    embedding.load_state_dict({"table.weight": other.state_dict()["weight"]})
    embedding.state_dict()  # a period begins
    return torch.equal(embedding(EVERY_ID), whole(other))


def test_a_load_drops_copies(two_ranks):
    assert values(two_ranks.run(loaded_within_a_period)) == [True, True]
