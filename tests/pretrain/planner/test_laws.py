"""Scaling laws and sizes, compared with figures that the papers print."""

import re
from pathlib import Path

import pytest

from pretrain.planner.laws import LAWS, OWN_STUDY, Size

HEADLINES = Path(__file__).parents[3] / "docs" / "headlines.md"

# Ludziejewski et al., table 4: the law as m N^mu + n D^nu + c for E experts.
REDUCED = [
    (1, 30.3640, -0.1817, 53.9838, -0.1965),
    (2, 27.7982, -0.1780, 66.8401, -0.2065),
    (4, 24.8462, -0.1731, 87.7022, -0.2192),
    (8, 21.8330, -0.1676, 119.9126, -0.2338),
    (16, 19.0159, -0.1617, 167.5073, -0.2494),
    (32, 16.5424, -0.1557, 234.6726, -0.2652),
]
# Validation losses of S-BASE in DeepMind's data: experts, layers, width, loss.
DEEPMIND = [
    (2, 24, 2048, 2.2287),
    (64, 24, 2048, 2.0543),
    (512, 24, 2048, 1.9990),
    (64, 8, 512, 2.6410),
    (8, 8, 512, 2.8576),
]
# Law, experts, layers, width; active and total parameters that the paper or its data print.
COUNTED = [
    ("clark", 512, 24, 2048, 1.309e9, 2.071e11),
    ("clark", 64, 8, 512, 2.728e7, 5.559e8),
    ("krajewski-64", 64, 10, 640, 49e6, None),
    ("krajewski-64", 64, 12, 768, 85e6, 3.7e9),
    ("ludziejewski", 32, 16, 1024, 321e6, 5.0e9),
    ("ludziejewski", 4, 28, 1792, 1.3e9, 3.8e9),
    ("ludziejewski", 1, 8, 512, 79e6, 79e6),
]


@pytest.mark.parametrize(("experts", "m", "mu", "n", "nu"), REDUCED)
def test_ludziejewski_reduces_to_table_4(experts, m, mu, n, nu):
    size = Size(LAWS["ludziejewski"], 1e20, experts, 1, 16, 1024)
    assert size.loss == pytest.approx(m * size.active**mu + n * size.tokens**nu + 1.3637, abs=2e-3)


@pytest.mark.parametrize(("experts", "layers", "width", "loss"), DEEPMIND)
def test_clark_predicts_published_losses(experts, layers, width, loss):
    assert Size(LAWS["clark"], 1e21, experts, 1, layers, width).loss == pytest.approx(loss, rel=0.01)


@pytest.mark.parametrize(("law", "experts", "layers", "width", "active", "total"), COUNTED)
def test_parameters_are_those_of_the_papers(law, experts, layers, width, active, total):
    size = Size(LAWS[law], 1e20, experts, 1, layers, width)
    assert size.active == pytest.approx(active, rel=0.04)  # printed with two digits
    if total is not None:
        assert size.total == pytest.approx(total, rel=0.03)


def test_krajewski_counts_the_flops_of_routers():
    """Equation 10 for the first row of table 2, with the width of 64 x 100M."""
    blocks = (100e6 / 12 / 64**2) ** (1 / 3)
    size = Size(LAWS["krajewski-64"], 1e20, 64, 8, blocks, 64 * blocks)
    assert size.flops_per_token * 4.37e9 == pytest.approx(2.95e18, rel=0.01)


def test_own_study_agrees_with_its_page():
    """The exponent over 8 to 32 experts from the losses on the page, and the interval that the page prints."""
    page = HEADLINES.read_text()
    first, last = (float(re.search(rf"\| {experts} experts \|[^|]+\| ([\d.]+)", page)[1]) for experts in (8, 32))
    assert OWN_STUDY["figures"]["loss_relative_to_8_experts"] == pytest.approx(last / first, abs=5e-4)
    coefficients = OWN_STUDY["coefficients"]
    assert 4 ** coefficients["b"] == pytest.approx(last / first, rel=1e-3)
    assert "{b} [{b_low}, {b_high:.3f}]".format(**coefficients) in page
