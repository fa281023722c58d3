"""Classes divided among ranks against the softmax over all classes with margins, in one process."""

import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values
from rank_pool import Raised

from fmoe import UserError, parallel, random
from fmoe.exchange.monitor import PeerError
from fmoe.optim import RowAdagrad

CLASSES, DIM, BATCH = 23, 6, 8


def group_of(size):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return dist.group.WORLD if size > 1 else alone[dist.get_rank()]


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[:3] = CLASSES - 1  # some classes have several samples
    return x, labels


def make(size, options):
    group = group_of(size)
    return parallel.ShardedClassifier(CLASSES, DIM, group, std=1.0, seed=4, **options).double(), group


def centers(layer):
    return layer.whole(layer.weight.detach()).full_tensor()


def part(group, empty):
    """This rank's samples; with ``empty``, the first rank has all of them."""
    size = group.size()
    lengths = [BATCH] + [0] * (size - 1) if empty else [BATCH // size] * size
    begin = sum(lengths[: group.rank()])
    return slice(begin, begin + lengths[group.rank()])


def run(size, options, empty=False):
    """Losses of this rank, gradients of its features and of all centers, and the classes that took part."""
    layer, group = make(size, options)
    random.set_position(seed=1, step=5)
    x, labels = batch()
    mine = part(group, empty)
    x = x[mine].clone().requires_grad_()
    losses = layer(x, labels[mine])
    (losses * weights(labels)[mine]).sum().backward()
    gradient = layer.weight.grad.coalesce()
    touched = torch.zeros(len(layer.weight), dtype=torch.bool)
    touched[gradient.indices()[0]] = True
    return (
        losses.detach(),
        x.grad,
        layer.whole(gradient.to_dense()).full_tensor(),
        layer.whole(touched).full_tensor(),
        centers(layer),
    )


def weights(labels):
    return torch.linspace(0.5, 2.0, len(labels), dtype=torch.float64)


def reference(weight, scale=64.0, angle=0.0, cosine=0.0, classes=None):
    """Softmax over ``classes`` in loops: losses, gradients of features and of centers."""
    x, labels = batch()
    x.requires_grad_()
    weight = weight.clone().requires_grad_()
    losses = []
    for sample, label in zip(x, labels.tolist(), strict=True):
        logits = []
        for index in range(CLASSES) if classes is None else classes:
            value = (sample / sample.norm()) @ (weight[index] / weight[index].norm())
            if index == label:
                theta = value.acos()
                moved = (theta + angle).cos() if theta + angle < math.pi else value - angle * math.sin(angle)
                logits.insert(0, scale * (moved - cosine))
            else:
                logits.append(scale * value)
        losses.append(torch.stack(logits).logsumexp(0) - logits[0])
    losses = torch.stack(losses)
    (losses * weights(labels)).sum().backward()
    return losses.detach(), x.grad, weight.grad


def pieces(results, index, size):
    return results[0][index] if size == 1 else torch.cat([result[index] for result in results])


POOLS = [("two_ranks", 1), ("two_ranks", 2), pytest.param("four_ranks", 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    "options",
    [{"scale": 8.0}, {"angle": 0.5}, {"cosine": 0.35}, {"angle": 1.5, "cosine": 0.1, "scale": 10.0}],
    ids=["softmax", "arcface", "cosface", "beyond"],
)
@pytest.mark.parametrize(("pool", "size"), POOLS)
def test_losses_and_gradients_are_those_of_the_whole_softmax(request, pool, size, options):
    results = values(request.getfixturevalue(pool).run(run, size, options))
    losses, x_grad, weight_grad = reference(results[0][4], **options)
    assert_close(pieces(results, 0, size), losses, 1e-10, "losses")
    assert_close(pieces(results, 1, size), x_grad, 1e-10, "gradient of features")
    for _, _, gradient, touched, _ in results:
        assert_close(gradient * size, weight_grad, 1e-10, "gradient of centers: the mean over ranks")
        assert touched.all()


def test_beyond_is_reached():
    """The case above has angles on both sides of pi - angle."""
    x, labels = batch()
    weight = torch.randn(CLASSES, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta = torch.cosine_similarity(x, weight[labels]).acos() + 1.5
    assert (theta > math.pi).any() and (theta < math.pi).any()


@pytest.mark.parametrize(("pool", "size"), POOLS)
def test_sampled_classes(request, pool, size):
    """All labels and some of the other classes, the same on any number of ranks; the softmax is over these."""
    options = {"angle": 0.3, "sample": 0.4}
    results = values(request.getfixturevalue(pool).run(run, size, options))
    (alone, _) = values(request.getfixturevalue("two_ranks").run(run, 1, options))
    _, _, _, touched, weight = results[0]
    assert torch.equal(touched, alone[3])
    classes = touched.nonzero()[:, 0].tolist()
    assert set(batch()[1].tolist()) < set(classes) and len(classes) < CLASSES
    losses, x_grad, weight_grad = reference(weight, angle=0.3, classes=classes)
    assert_close(pieces(results, 0, size), losses, 1e-10, "losses")
    assert_close(pieces(results, 1, size), x_grad, 1e-10, "gradient of features")
    assert_close(results[0][2] * size, weight_grad, 1e-10, "gradient of centers")


def test_a_rank_without_samples(two_ranks):
    results = values(two_ranks.run(run, 2, {"angle": 0.5}, True))
    losses, x_grad, weight_grad = reference(results[0][4], angle=0.5)
    assert [len(result[0]) for result in results] == [BATCH, 0]
    assert_close(results[0][0], losses, 1e-10, "losses")
    assert_close(results[0][1], x_grad, 1e-10, "gradient of features")
    assert_close(results[1][2] * 2, weight_grad, 1e-10, "gradient of centers")


def unlike():
    """The first rank's features are constants, and its labels narrower; the samples are as in `run`."""
    layer, group = make(2, {"angle": 0.5})
    x, labels = batch()
    mine = part(group, False)
    first = group.rank() == 0
    losses = layer(x[mine].requires_grad_(not first), labels[mine].to(torch.uint8 if first else torch.int64))
    (losses * weights(labels)[mine]).sum().backward()
    return losses.detach(), layer.whole(layer.weight.grad.to_dense()).full_tensor(), centers(layer)


def test_ranks_with_features_and_labels_of_other_kinds(two_ranks):
    results = values(two_ranks.run(unlike))
    losses, _, weight_grad = reference(results[0][2], angle=0.5)
    assert_close(pieces(results, 0, 2), losses, 1e-10, "losses")
    assert_close(results[0][1] * 2, weight_grad, 1e-10, "gradient of centers")


def aligned(dtype):
    """A sample in the direction of its center, in 16 bits: cosine 1, where the slope of the angle is infinite."""
    layer = parallel.ShardedClassifier(CLASSES, DIM, dist.group.WORLD, std=1.0, angle=0.5).to(dtype)
    layer.weight.data.copy_(torch.eye(CLASSES, DIM)[layer.first_row :][: len(layer.weight)] + 0.001)
    x = torch.eye(1, DIM, dtype=dtype, requires_grad=True)
    loss = layer(x, torch.tensor([0]))
    loss.sum().backward()
    gradients = [x.grad, layer.weight.grad.to_dense()]
    return loss.dtype, all(gradient.isfinite().all() and gradient.dtype == dtype for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits(two_ranks, dtype):
    assert values(two_ranks.run(aligned, dtype)) == [(torch.float32, True)] * 2


def train(size, begin, end, state=None):
    """Losses of sampled steps from a state on, and the state."""
    layer, group = make(size, {"angle": 0.3, "sample": 0.3})
    optimizer = RowAdagrad([layer.weight], lr=0.1)
    if state is not None:
        with torch.no_grad():
            layer.weight.copy_(state[0])
        optimizer.state[layer.weight]["sum"].copy_(state[1])
    losses = []
    touched = []
    for step in range(begin, end):
        random.set_position(seed=1, step=step)
        x, labels = batch(step)
        mine = part(group, False)
        optimizer.zero_grad()
        loss = layer(x[mine], labels[mine]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        touched.append(layer.weight.grad.coalesce().indices()[0].tolist())
    return torch.stack(losses), touched, (layer.weight.detach(), optimizer.state[layer.weight]["sum"]), centers(layer)


def test_a_resume_draws_the_same_classes(two_ranks):
    whole = values(two_ranks.run(train, 2, 0, 4))
    half = values(two_ranks.run(train, 2, 0, 2))
    (resumed, *_) = two_ranks.run(resume, [result[2] for result in half])
    assert torch.equal(resumed[0], whole[0][0][2:]) and torch.equal(resumed[3], whole[0][3])
    assert len({*map(tuple, whole[0][1])}) == 4, "each step draws others"


def resume(states):
    return train(2, 2, 4, states[dist.get_rank()])


def test_training_does_not_depend_on_ranks(two_ranks):
    (one, _) = values(two_ranks.run(train, 1, 0, 4))
    two = values(two_ranks.run(train, 2, 0, 4))
    assert_close((two[0][0] + two[1][0]) / 2, one[0], 1e-10, "losses")
    assert_close(two[0][3], one[3], 1e-10, "centers")


def evaluate():
    layer, _ = make(2, {"sample": 0.1, "scale": 8.0})
    x, labels = batch()
    return layer.eval()(x, labels).detach(), centers(layer)


def test_evaluation_is_over_all_classes(two_ranks):
    losses, weight = values(two_ranks.run(evaluate))[0]
    assert_close(losses, reference(weight, scale=8.0)[0], 1e-10, "losses")


def invalid(x, labels):
    layer, _ = make(2, {})
    good = batch()
    return layer(x, labels) if dist.get_rank() == 0 else layer(*good)


@pytest.mark.parametrize(
    ("x", "labels", "text"),
    [
        (torch.zeros(1, DIM), torch.tensor([CLASSES]), f"labels={CLASSES} "),
        (torch.zeros(1, DIM), torch.tensor([-1]), "labels=-1 "),
        (torch.zeros(2, DIM), torch.tensor([1]), f"(2, {DIM})"),
        (torch.zeros(1, DIM + 1), torch.tensor([1]), f"(1, {DIM + 1})"),
        (torch.zeros(2, DIM), torch.tensor([[1], [2]]), "labels have shape (2, 1)"),
    ],
    ids=["above", "below", "samples", "width", "axes"],
)
def test_invalid_input_on_one_rank_raises_on_all(two_ranks, x, labels, text):
    results = two_ranks.run(invalid, x, labels)
    assert all(isinstance(result, Raised) and text in result.message for result in results)
    assert issubclass(results[0].kind, UserError) and issubclass(results[1].kind, PeerError)


def refused(options):
    parallel.ShardedClassifier(CLASSES, DIM, dist.group.WORLD, **options)


@pytest.mark.parametrize(
    "options",
    [{"sample": -0.5}, {"sample": 1.5}, {"angle": -0.1}, {"angle": 2.0}, {"scale": -1.0}, {"cosine": math.nan}],
    ids=str,
)
def test_wrong_options(two_ranks, options):
    ((key, value),) = options.items()
    for result in two_ranks.run(refused, options):
        assert isinstance(result, Raised) and issubclass(result.kind, UserError)
        assert f"{key}={value} " in result.message and "\n" not in result.message
