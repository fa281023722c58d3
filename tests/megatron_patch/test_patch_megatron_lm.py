"""Megatron-LM's own training program, ``pretrain_gpt.py``, with experts by one added line; on the CPU.

``FMOE_MEGATRON_LM=/path/to/Megatron-LM`` names a checkout of the version of the installed megatron-core. Without it, a
small program runs that uses the training loop of the installed wheel, which has one from 0.19 on.
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ON_CPU = Path(__file__).parent / "megatron_lm_on_cpu.py"
# The added line, as in docs/megatron.md, after a line of the program: from Megatron-LM 0.19 on, and before.
LINES = {
    "    model_cfg = gpt_config_from_args(args)\n": (
        "    from fmoe.megatron import fmoefy; "
        "model_cfg.pre_wrap_hooks.append(lambda models: [fmoefy(model, top_k=2) for model in models])\n"
    ),
    "from model_provider import model_provider\n": (
        "from fmoe.megatron import patch_model_provider; "
        "model_provider = patch_model_provider(model_provider, top_k=2)\n"
    ),
}
ARGUMENTS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-style constant --weight-decay 0
    --hidden-dropout 0 --attention-dropout 0 --mock-data --num-workers 0 --tokenizer-type NullTokenizer
    --vocab-size 127 --log-interval 1 --eval-iters 0 --eval-interval 9 --distributed-backend gloo
    --use-cpu-initialization
    --transformer-impl local --attention-backend unfused --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
"""


@pytest.fixture(scope="module")
def checkout():
    if "FMOE_MEGATRON_LM" in os.environ:
        return Path(os.environ["FMOE_MEGATRON_LM"])
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron-core has no megatron.training, and FMOE_MEGATRON_LM names no checkout of Megatron-LM")
    return Path(__file__).parent / "megatron_lm"


@pytest.fixture(scope="module")
def train(checkout, forks, tmp_path_factory):
    """``train(*arguments, size=1, has_experts=True)``: the program's losses, with the added line or without."""
    source = (checkout / "pretrain_gpt.py").read_text()
    after, line = next((after, line) for after, line in LINES.items() if after in source)
    with_experts = tmp_path_factory.mktemp("program") / "pretrain_gpt.py"
    with_experts.write_text(source.replace(after, after + line))

    def run(*arguments, size=1, has_experts=True):
        program = with_experts if has_experts else checkout / "pretrain_gpt.py"
        environment = {"PYTHONPATH": str(checkout), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        ends = forks.command(str(ON_CPU), program, *ARGUMENTS.split(), *arguments, size=size, environment=environment)
        for end in ends:
            assert end.code == 0, end.out + end.err
        losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", ends[-1].out)]
        assert len(losses) == 4, ends[-1].out
        assert ("load_balancing_loss: " in ends[-1].out) == has_experts
        return losses

    return run


@pytest.fixture(scope="module")
def on_one(train):
    return train("--num-experts", "4")


def test_experts_change_the_losses(train, on_one):
    assert on_one[-1] < on_one[0]
    assert all(loss != dense for loss, dense in zip(on_one, train(has_experts=False), strict=True))


def test_losses_on_two_data_parallel_processes_are_equal(train, on_one):
    assert train("--num-experts", "4", size=2) == pytest.approx(on_one, rel=1e-6)


def test_experts_on_two_processes(train, on_one):
    losses = train("--num-experts", "4", "--expert-model-parallel-size", "2", size=2)
    # Megatron-LM draws other dense weights, because it first draws experts of its own, fewer on each rank.
    assert losses == pytest.approx(on_one, rel=0.02)
