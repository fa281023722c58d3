"""Encoded activations: what is exact, what is rounded, what is shared, and the bytes that are held."""

import gc

import pytest
import torch
from torch import nn

import fmoe
from fmoe import UserError
from fmoe.activations import MODES, SavedActivations


def model_of(seed=0):
    torch.manual_seed(seed)
    experts = fmoe.FMoE(num_experts=4, d_model=32, d_hidden=64)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 32), experts, nn.Softmax(-1))


def gradients(mode, held=None):
    model = model_of()
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    saved = None if mode is None else SavedActivations(mode, model.parameters())
    torch.manual_seed(2)
    if saved is None:
        output = model(x)
    else:
        with saved:
            output = model(x)
        if held is not None:
            held.append(saved.held)
    (output * torch.linspace(-1, 1, 32)).square().sum().backward()
    if saved is not None:
        del output
        gc.collect()
        assert saved.held == 0 < saved.peak
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode):
    expected = gradients(None)
    tolerance = {"mask": 0.0, "offload": 0.0, "bf16": 0.02, "int8": 0.15}[mode]
    for gradient, wanted in zip(gradients(mode), expected, strict=True):
        assert (gradient - wanted).norm() <= tolerance * wanted.norm()
        assert tolerance == 0 or not torch.equal(gradient, wanted) or wanted.count_nonzero() == 0 or wanted.dim() == 1


def test_bytes_of_modes():
    held = {}
    for mode in MODES:
        of_mode = []
        gradients(mode, of_mode)
        (held[mode],) = of_mode
    assert held["int8"] < held["bf16"] < held["mask"] < held["offload"]
    assert held["bf16"] < 0.6 * held["offload"] and held["int8"] < 0.4 * held["offload"]


def round_trip(mode, tensor):
    saved = SavedActivations(mode)
    packed = saved._pack(tensor)
    return saved._unpack_hook(packed) if hasattr(saved, "_unpack_hook") else saved.unpack_hook(packed), saved.held


@pytest.mark.parametrize("shape", [(5000,), (70, 61), (3, 40, 50)])
def test_a_mask_of_any_shape_and_stride_is_exact(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for tensor in (values.relu() - 0.0, values > 1, values.relu().transpose(0, -1), values.double().relu()):
        sparse = tensor if tensor.dtype == torch.bool else tensor * (tensor > 0.5)
        found, held = round_trip("mask", sparse)
        assert torch.equal(found, sparse) and found.stride() == sparse.stride() and found.dtype == sparse.dtype
        assert held < 0.6 * sparse.nbytes
    found, held = round_trip("mask", values)
    assert torch.equal(found, values) and held == values.nbytes, "a dense tensor is kept as it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_8_bits_are_within_a_half_step_of_the_largest_of_a_block(dtype):
    tensor = torch.randn(5001, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[:256] *= 1e-30
    tensor[256:512] = 0
    found, held = round_trip("int8", tensor)
    assert found.dtype == dtype and held < 1.1 * tensor.numel()
    for begin in range(0, 5001, 256):
        block = tensor[begin : begin + 256].double()
        difference = (found[begin : begin + 256].double() - block).abs().max()
        assert difference <= block.abs().max() / 254 * 1.01 + (
            block.abs().max() / 128 if dtype == torch.bfloat16 else 0
        )


def test_a_tensor_that_several_operations_save_is_encoded_once():
    saved = SavedActivations("int8")
    x = torch.randn(8192).requires_grad_()
    with saved:
        y = x * 2
        loss = (y.sin() + y.cos() + y * y).sum()
    once = saved.held
    assert 8192 <= once < 1.1 * 8192
    with saved:
        z = y + 1
        more = (z.sin()).sum()
    assert saved.held > once
    (loss + more).backward()
    del loss, more, y, z
    assert saved.held == 0


def test_a_tensor_changed_in_place_or_freed_is_another_one():
    saved = SavedActivations("offload")
    weight = torch.ones(8192, requires_grad=True)
    total = 0.0
    with saved:
        for number in range(6):
            y = torch.full((8192,), float(number))  # in the memory of the one before
            total = total + (weight * y).sum()
            y.add_(1)
            total = total + (weight * y).sum()
    total.backward()
    assert torch.equal(weight.grad, torch.full((8192,), float(sum(2 * n + 1 for n in range(6)))))


def test_infinite_elements_are_kept():
    mask = torch.zeros(100, 100).masked_fill(torch.ones(100, 100).triu(1).bool(), -torch.inf)
    found, _ = round_trip("int8", mask)
    assert torch.equal(found, mask)


def test_a_change_in_place_of_what_is_not_encoded_is_an_error():
    x = torch.ones(100, requires_grad=True)
    y = x * 2
    with SavedActivations("int8"):
        z = (y * y).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="in place"):
        z.backward()


def test_parameters_are_kept_as_they_are():
    model = nn.Linear(128, 128)
    saved = SavedActivations("int8", model.parameters())
    x = torch.randn(4, 128, requires_grad=True)  # small
    with saved:
        loss = model(x).sum()
    assert saved.held <= 4 * 128 * 4
    loss.backward()
    torch.testing.assert_close(x.grad, model.weight.sum(0).expand(4, 128), rtol=1e-6, atol=1e-6)


def test_an_unknown_mode_is_one_line():
    with pytest.raises(UserError, match=r"activations='fp8' .*mask"):
        SavedActivations("fp8")
