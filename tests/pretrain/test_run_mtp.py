"""Multi-token prediction: equal to DeepSeek-V3's equations 21 to 25 in float64, and the same at every split."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from forks import only, values
from test_run_split_engine import RECIPE as SPLIT_RECIPE
from test_run_split_engine import Samples, engine_of

from pretrain.config import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig

LENGTH, VOCAB, HIDDEN, HEADS, DEPTH, BATCH = 16, 64, 16, 2, 2, 4
PLAIN = Recipe(
    model=ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        ffn_hidden_size=24,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        num_experts=0,
        norm="rms",
        init_std=0.3,
        mtp_layers=DEPTH,
        mtp_loss=0.7,
    ),
    optimizer=OptimizerConfig(warmup_steps=0),
    train=TrainConfig(steps=1, global_batch=BATCH, micro_batch=2),
)


def backward(recipe):
    """(loss, losses of the modules, parameters, their gradients) of a step."""
    engine = engine_of(recipe)
    loss = engine.backward(0, Samples())
    named = dict(engine.gpt.named_parameters())
    weights = {name: p.detach().clone() for name, p in named.items()}
    return float(loss), engine._mtp_losses, weights, {name: p.main_grad.clone() for name, p in named.items()}


def norm(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rotate(x):
    """Rotary positions of [batch, heads, sequence, width]."""
    half = x.shape[-1] // 2
    wavelengths = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device="cpu") / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device="cpu").unsqueeze(1) * wavelengths
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def transformer_layer(x, w, prefix):
    fused = norm(x, w[f"{prefix}input_layernorm.weight"]) @ w[f"{prefix}self_attention.linear_qkv.weight"].t()
    q, k, v = fused.unflatten(-1, (HEADS, 3, HIDDEN // HEADS)).permute(3, 0, 2, 1, 4)
    scores = rotate(q) @ rotate(k).transpose(2, 3) / (HIDDEN // HEADS) ** 0.5
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cpu").triu(1)
    seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    x = x + seen.transpose(1, 2).flatten(2) @ w[f"{prefix}self_attention.linear_proj.weight"].t()
    hidden = F.gelu(norm(x, w[f"{prefix}pre_mlp_layernorm.weight"]) @ w[f"{prefix}mlp.linear_fc1.weight"].t())
    return x + hidden @ w[f"{prefix}mlp.linear_fc2.weight"].t()


def cross_entropy(hidden, embedding, targets):
    return F.cross_entropy((hidden @ embedding.t()).flatten(0, 1), targets.flatten())


def reference(w, tokens):
    """Mean losses of the next token and of the tokens after it, from ``tokens`` [b, t + 1], by slices as in the paper.

    Module k has the positions 1 ... t - k. The hidden state is that of which the output layer makes logits.
    """
    embedding, length = w["embedding.word_embeddings.weight"], tokens.shape[1] - 1
    hidden = transformer_layer(embedding[tokens[:, :-1]], w, "decoder.layers.0.")
    hidden = norm(hidden, w["decoder.final_layernorm.weight"])
    losses = [cross_entropy(hidden, embedding, tokens[:, 1:])]
    for k in range(1, DEPTH + 1):
        name = f"mtp.layers.{k - 1}."
        inner = next(n for n in ("transformer_layer.", "mtp_model_layer.") if any(x.startswith(name + n) for x in w))
        entering = torch.cat(  # equation 21; Megatron-core concatenates the embedding first
            [
                norm(embedding[tokens[:, k:length]], w[f"{name}enorm.weight"]),
                norm(hidden[:, : length - k], w[f"{name}hnorm.weight"]),
            ],
            -1,
        )
        hidden = transformer_layer(entering @ w[f"{name}eh_proj.weight"].t(), w, f"{name}{inner}")  # 22
        hidden = norm(hidden, w[f"{name}final_layernorm.weight"])
        losses.append(cross_entropy(hidden, embedding, tokens[:, k + 1 :]))  # 23 and 24
    return losses


def test_losses_and_gradients_are_those_of_the_equations(forks):
    loss, mtp_losses, weights, gradients = only(forks.run(1, backward, PLAIN))
    w = {name: value.double().requires_grad_() for name, value in weights.items()}
    tokens = torch.stack([torch.as_tensor(Samples()[n]) for n in range(BATCH)])
    expected, *further = reference(w, tokens)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert mtp_losses.tolist() == pytest.approx([x.item() for x in further], rel=1e-5)
    (expected + 0.7 * sum(further) / DEPTH).backward()  # 25
    assert w.keys() == gradients.keys()
    for name, value in w.items():
        assert value.grad.norm() > 0, name
        assert_close(gradients[name].double(), value.grad, 1e-5, name)


RECIPE = replace(SPLIT_RECIPE, model=replace(SPLIT_RECIPE.model, mtp_layers=2, mtp_loss=0.5, num_layers=2))


def train(recipe):
    """Figures of all steps, and every parameter that is not a slice."""
    engine = engine_of(recipe)
    seen = {"validation before": engine.evaluate(Samples(), 16)}
    for step in range(recipe.train.steps):
        result = engine.train_step(step, Samples())
        seen |= {f"loss {step}": result.loss, f"gradient norm {step}": result.grad_norm}
        seen |= {f"mtp loss {step} {depth}": loss for depth, loss in enumerate(result.mtp_losses, start=1)}
        seen |= {f"load {step} {number}": torch.tensor(r.load) for number, r in engine.routing().items()}
    return seen | {"validation": engine.evaluate(Samples(), 16)}


@pytest.fixture(scope="module")
def alone(forks):
    return only(forks.run(1, train, replace(RECIPE, train=replace(RECIPE.train, micro_batch=8))))


@pytest.mark.by_default("pipeline=2-True")
@pytest.mark.parametrize(
    ("parallel", "distributed"),
    [({}, False), ({"data": 2}, True), ({"expert": 2}, False), ({"tensor": 2}, False), ({"pipeline": 2}, True)],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else None,
)
def test_micro_batches_and_splits_change_nothing(forks, alone, parallel, distributed):
    recipe = replace(
        RECIPE,
        parallel=ParallelConfig(**parallel),
        optimizer=replace(RECIPE.optimizer, distributed=distributed),
    )
    for rank, found in enumerate(values(forks.run(recipe.parallel.world_size, train, recipe))):
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            if torch.is_tensor(expected):
                assert_close(found[name], expected, 1e-5, f"{name} on rank {rank}")
            else:
                assert found[name] == pytest.approx(expected, rel=1e-5), f"{name} on rank {rank}"


def test_the_case_means_something(alone):
    """Both losses fall, and routing is counted in the layers of the modules."""
    assert alone["validation"] < alone["validation before"]
    for depth in (1, 2):
        assert alone[f"mtp loss {RECIPE.train.steps - 1} {depth}"] < 0.9 * alone[f"mtp loss 0 {depth}"]
    assert {name for name in alone if name.startswith("load 0")} == {f"load 0 {number}" for number in (1, 2, 3, 4)}


def without_modules(recipe):
    """Validation and logits of the model with MTP modules, and of one with its other weights alone."""
    from pretrain.engine import Engine
    from pretrain.models.gpt import forward

    engine = engine_of(recipe)
    plain = Engine(replace(recipe, model=replace(recipe.model, mtp_layers=0, mtp_loss=0.3)), engine.processes)
    weights = engine.gpt.state_dict()
    plain.gpt.load_state_dict({name: value for name, value in weights.items() if not name.startswith("mtp.")})
    tokens = torch.as_tensor(Samples()[3]).unsqueeze(0)
    seen = [(e.evaluate(Samples(), 8), forward(e.gpt.eval(), {"tokens": tokens}).detach()) for e in (engine, plain)]
    assert any(name.startswith("mtp.") for name in weights)
    assert engine.config.mtp_num_layers == 2
    return seen


def test_evaluation_and_logits_ignore_the_modules(forks):
    (loss, logits), (expected, plain) = only(forks.run(1, without_modules, RECIPE))
    assert loss == expected
    assert torch.equal(logits, plain)


def small_then_deep(recipe):
    """Losses of a step of a model, after one of a model with fewer layers in the same process."""
    from pretrain.engine import stop_parallel

    small = replace(recipe, model=replace(recipe.model, num_layers=1, moe_layers=(1,), mtp_layers=0, mtp_loss=0.3))
    seen = []
    for one in (small, recipe):
        seen.append(engine_of(one).train_step(0, Samples()).loss)
        stop_parallel()
    return seen


def test_a_model_may_follow_one_with_fewer_layers(forks, alone):
    """Megatron's tracker of auxiliary losses is sized for the first model of a process."""
    assert only(forks.run(1, small_then_deep, RECIPE))[1] == pytest.approx(alone["loss 0"], rel=1e-6)
