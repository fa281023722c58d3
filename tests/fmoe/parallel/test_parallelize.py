"""`fmoe.parallelize`: a model on two ranks trains, saves and loads as in one process."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fmoe
from bench.studies.experts import inputs_of, tiny
from fmoe import parallel

transformers = pytest.importorskip("transformers")

STEPS = 3


@pytest.fixture(autouse=True)
def job_of_one_process():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def on_meta(family, **options):
    with torch.device("meta"):
        return tiny(family, torch.float32, **options)


def batches(model, sequences=4):
    inputs = inputs_of(model, sequences)
    inputs.pop("output_router_logits", None)  # the auxiliary loss is of a rank's tokens
    return inputs


def train(model, ranks, size, groups=None):
    """Train on the sequences of ``ranks``, of ``size`` ranks; return the losses and the norms of the gradients."""
    inputs = batches(getattr(model, "module", model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for _ in range(STEPS):
        loss = sum(model(**{name: value.chunk(size)[rank] for name, value in inputs.items()}).loss for rank in ranks)
        loss = loss / len(ranks)
        loss.backward()
        norm = parallel.clip_grad_norm_(model.parameters(), 0.5, groups=groups)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(loss.detach()), float(norm)))
    return results


def on_a_rank(family, options, published, saved):
    model = fmoe.parallelize(on_meta(family), weights=published, **options)
    groups = model.groups
    experts = [layer for layer in model.modules() if isinstance(layer, fmoe.MoE)]
    assert experts and all(layer.num_local_experts * groups.ep == layer.num_experts for layer in experts)
    if size := options.get("shard_size"):
        assert model.lm_head.weight.device_mesh.shape == (dist.get_world_size() // size, size)
        copies = max(1, size // groups.ep)
        assert experts[0].experts.weight_in.device_mesh.shape == (groups.dp // copies, copies)
    results = train(model, [dist.get_rank()], dist.get_world_size(), groups)
    parallel.save_hf(model, saved, groups, shard_bytes=20_000)
    with pytest.raises(fmoe.UserError, match=f"folder={saved} has a model"):
        parallel.save_hf(model, saved, groups)
    losses = torch.tensor([loss for loss, _ in results])
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist(), [norm for _, norm in results]


def assert_equal_to_one_process(ranks, size, family, options, tmp_path):
    published = tmp_path / "published"
    tiny(family, torch.float32).save_pretrained(published, max_shard_size="30KB")
    results = values(ranks.run(on_a_rank, family, options, str(published), str(tmp_path / "saved")))
    model = tiny(family, torch.float32).train()
    expected = train(model, range(size), size)
    for losses, norms in results:
        assert losses == pytest.approx([loss for loss, _ in expected], rel=2e-5)
        assert norms == pytest.approx([norm for _, norm in expected], rel=2e-4)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    loaded = type(model).from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert loaded.config.to_dict().keys() == model.config.to_dict().keys()
    state = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert_close(value, state[name], 2e-3, name)
    inputs = batches(model)
    with torch.no_grad():
        assert_close(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits, 2e-3, "logits")


@pytest.mark.by_default(0, 5, 6, 9)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3", "Mixtral"])
@pytest.mark.parametrize(
    "options",
    [
        {"ep": 2},
        {"ep": 2, "shard": "full"},
        {"ep": 1, "shard": "full"},
        {"ep": 1, "shard": "full", "shard_size": 1},
        {"ep": 2, "shard": "full", "shard_size": 1},
    ],
    ids=str,
)
def test_two_ranks_equal_one_process(family, options, two_ranks, tmp_path):
    assert_equal_to_one_process(two_ranks, 2, family, options, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_four_ranks_that_shard_in_pairs_equal_one_process(family, ep, four_ranks, tmp_path):
    options = {"ep": ep, "shard": "full", "shard_size": 2}
    assert_equal_to_one_process(four_ranks, 4, family, options, tmp_path)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "GraniteMoe", "DeepseekV3", "Mixtral", "Phimoe"])
def test_a_published_folder_is_read_as_transformers_reads_it(family, tmp_path):
    theirs = tiny(family, torch.float32)
    theirs.save_pretrained(tmp_path)
    model = fmoe.fmoefy(copy.deepcopy(theirs))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parallel.load_hf(model, tmp_path)
    state = model.state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", ["none", "full"])
def test_precision_and_recomputation(shard, precision):
    theirs = tiny("Qwen3Moe", torch.float32).train()
    model = fmoe.parallelize(copy.deepcopy(theirs), shard=shard, precision=precision, recompute=True)
    inputs = batches(theirs)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = theirs(**inputs, use_cache=False).loss
    actual = model(**inputs, use_cache=False).loss
    actual.backward()
    assert float(actual) == pytest.approx(float(expected), rel=1e-5 if precision == "fp32" else 2e-2)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


class Block(nn.Module):
    def __init__(self, moe_group=None):
        super().__init__()
        self.moe = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=6, moe_group=moe_group, seed=0)

    def forward(self, x):
        return x + self.moe(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_with_our_layers(recompute):
    theirs = Model()
    model = fmoe.parallelize(copy.deepcopy(theirs), shard="full", recompute=recompute)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 5  # model, blocks, their experts
    x = torch.randn(2, 3, 8)
    expected = theirs(x)
    expected.square().mean().backward()
    actual = model(x)
    actual.square().mean().backward()
    assert_close(actual, expected, 1e-6, "output")
    for value, right in zip(model.parameters(), theirs.parameters(), strict=True):
        assert_close(value.grad.full_tensor(), right.grad, 1e-5, "gradient")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shard": "half"}, "shard='half'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"ep": 3}, "ep=3.*4 experts"),
        ({"weights": "none/such"}, "weights=none/such"),
        ({"granularity": 2}, "granularity=2"),
        ({"top_k": 1}, "top_k=1"),
        ({"ep": 0}, "ep=0"),
        ({"ep": 2.0}, r"ep=2\.0"),
        ({"ep": 2}, "ep=2 .* 1$"),
        ({"shard_size": 1}, "shard_size=1 .*shard"),
        ({"shard": "full", "shard_size": True}, "shard_size=True"),
        ({"shard": "full", "shard_size": 2}, "shard_size=2 .* 1$"),
        ({"ep": 4, "shard": "full", "shard_size": 3}, "shard_size=3 .*ep=4"),
    ],
)
def test_bad_input_leaves_the_model_unchanged(options, says):
    model = tiny("Qwen2Moe", torch.float32)
    modules = list(model.modules())
    with pytest.raises(fmoe.UserError, match=says) as raised:
        fmoe.parallelize(model, **options)
    assert not dist.is_initialized()
    assert "\n" not in str(raised.value) and list(model.modules()) == modules


def test_incomplete_folders(tmp_path):
    model = tiny("Qwen2Moe", torch.float32)
    with pytest.raises(fmoe.UserError, match="meta device"):
        fmoe.parallelize(on_meta("Qwen2Moe"))
    with pytest.raises(fmoe.UserError, match=r"exchange.*the model has none"):
        fmoe.parallelize(nn.Linear(2, 2), exchange="all_gather")
    with pytest.raises(fmoe.UserError, match="ep=2 needs a model with experts"):
        fmoe.parallelize(nn.Linear(2, 2), ep=2)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    parts = sorted(tmp_path.glob("*.safetensors"))
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[:-5])
    with pytest.raises(fmoe.UserError, match=f"{parts[1].name} is damaged"):
        fmoe.parallelize(model, weights=tmp_path)
    parts[1].unlink()
    with pytest.raises(fmoe.UserError, match=f"has no {parts[1].name}"):
        fmoe.parallelize(model, weights=tmp_path)
    assert not dist.is_initialized()
    other = tiny("Qwen2Moe", torch.float32, num_hidden_layers=3)
    parts[1].write_bytes(content)
    with pytest.raises(fmoe.UserError, match=r"lacks .* model\.layers\.2"):
        parallel.load_hf(other, tmp_path)
