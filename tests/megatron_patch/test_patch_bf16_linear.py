"""bf16 products of dense layers in float32, and what else the CPU runtime computes faster: the same values and
gradients as megatron-core's."""

import pytest
import torch
from compare import assert_close
from forks import only, values


def linear(marked, bias):
    """Output and gradients of Megatron's linear map in bf16 on the ranks of a tensor parallel group, beside those in
    float64 of the rounded inputs."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as apply

    from megatron_patch import bf16_linear, cpu

    cpu.install()
    torch.manual_seed(0)
    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    x, w, b, g = (torch.randn(s).bfloat16() for s in ((7, 3, 40), (24, 40), (24,), (7, 3, 24)))
    w, b = (torch.nn.Parameter(p) for p in (w, b))
    x.requires_grad_()
    if marked:
        setattr(w, bf16_linear._MARK, True)
    out = apply(x, w, b if bias else None, False, group.size() > 1, False, tp_group=group)
    out.backward(g)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = torch.nn.functional.linear(exact[0], exact[1], exact[2] if bias else None)
    expected.backward(g.double())
    exact[0].grad *= group.size()  # every rank has the same part here
    found = [out.detach(), x.grad, w.grad] + [b.grad] * bias
    return found, [expected.detach(), exact[0].grad, exact[1].grad] + [exact[2].grad] * bias


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_marked_weight_is_multiplied_in_float32(size, bias, forks):
    for rank in values(forks.run(size, linear, True, bias)):
        for found, expected in zip(*rank, strict=True):
            assert found.dtype == torch.bfloat16 and found.shape == expected.shape
            if size == 1 and not bias:  # rounded once: to the nearest
                assert_close(found, expected.bfloat16(), 1e-3, "product")
            assert_close(found.double(), expected, 5e-3, "product")


@pytest.mark.parametrize("shape", [(5, 3, 4), (1, 1, 1), (0, 3, 4), (700, 16, 3000)], ids=str)
def test_products_in_parts(shape, monkeypatch):
    from megatron_patch import bf16_linear

    monkeypatch.setattr(bf16_linear, "_CHUNK", 1 << 18)
    m, k, n = shape
    a = torch.randn(k, m).bfloat16().t()
    b = torch.randn(n, k).bfloat16().t()
    found = bf16_linear.product(a, b)
    assert found.dtype == torch.bfloat16 and found.shape == (m, n)
    assert_close(found, (a.double() @ b.double()).bfloat16(), 1e-3, "product")


def marked():
    """Names of the marked weights of a GPT with megatron-core's experts, and attention with and without float32."""
    from bench.step.contenders import _megatron_moe
    from megatron_patch import bf16_linear, cpu
    from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, Recipe, TrainConfig
    from pretrain.engine import init_parallel

    cpu.install()
    model = ModelConfig(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=16,
        vocab_size=64,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(num_experts=2),
    )
    recipe = Recipe(model=model, train=TrainConfig(precision="bf16"))
    init_parallel(recipe)
    gpt = _megatron_moe(recipe)
    bf16_linear.mark_weights(gpt)
    attention = gpt.decoder.layers[0].self_attention.core_attention
    q, k, v = (torch.randn(9, 2, 2, 16).bfloat16().requires_grad_() for _ in range(3))
    results = {}
    for is_needed in (False, True):
        bf16_linear.is_needed = lambda is_needed=is_needed: is_needed
        out = attention(q, k, v, None)
        results[is_needed] = [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]
    return [name for name, p in gpt.named_parameters() if getattr(p, bf16_linear._MARK, False)], results


def test_dense_matrices_are_marked_and_no_experts(forks):
    names, attention = only(forks.run(1, marked))
    assert sorted(names) == [
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "embedding.word_embeddings.weight",
    ]
    for narrow, wide in zip(attention[False], attention[True], strict=True):
        assert wide.dtype == torch.bfloat16
        assert_close(wide, narrow, 2e-2, "attention")


def cross_entropy(installed):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_patch import cpu

    cpu.install()  # without which Megatron's does not run here
    if not installed:
        from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

        VocabParallelCrossEntropy.calculate_logits_max = lambda logits: (logits.float(), logits.float().max(-1)[0])
    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    torch.manual_seed(torch.distributed.get_rank())
    logits = torch.randn(5, 3, 17).requires_grad_()
    torch.manual_seed(0)
    loss = vocab_parallel_cross_entropy(logits * 1, torch.randint(17, (5, 3)))
    loss.sum().backward()
    return loss.detach(), logits.grad


def test_the_loss_is_bit_for_bit_megatrons(forks):
    for ours, theirs in zip(
        only(forks.run(1, cross_entropy, True)), only(forks.run(1, cross_entropy, False)), strict=True
    ):
        assert torch.equal(ours, theirs)


def clipped(norm):
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    from megatron_patch import cpu
    from megatron_patch.optimizer import clip_gradients

    cpu.install()
    torch.manual_seed(0)
    grads = [torch.randn(shape) for shape in ((3, 5), (7,), (2, 3, 4))]
    results = []
    for clip in (clip_gradients, clip_grad_by_total_norm_fp32):
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads] + [torch.nn.Parameter(torch.zeros(2))]
        for parameter, grad in zip(parameters, grads, strict=False):
            parameter.grad = grad.clone()
        clip(parameters, 0.7, norm)
        results.append([p.grad for p in parameters])
    return results


@pytest.mark.parametrize("norm", [0.5, 3.7, 1e4])
def test_gradients_are_clipped_as_megatron_clips_them(norm, forks):
    ours, theirs = only(forks.run(1, clipped, norm))
    assert ours[-1] is None and theirs[-1] is None
    assert all(torch.equal(a, b) for a, b in zip(ours[:-1], theirs[:-1], strict=True))
