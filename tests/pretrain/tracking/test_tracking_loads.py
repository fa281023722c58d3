import math

import pytest

from pretrain.tracking.loads import LOAD, LoadPictures, load_matrix


def of_layers(**loads):
    return {"loss": 1.0, **{f"moe/{name}/load": load for name, load in loads.items()}}


def test_matrix_is_the_load_over_an_even_share_by_layer_number():
    metrics = of_layers(layer_10=[0.25, 0.75], layer_2=[1.0, 0.0]) | {"moe/layer_2/load_cv": 1.0}
    matrix = load_matrix(3, metrics)
    assert matrix.layers == (2, 10)
    assert matrix.load_LE == ((2.0, 0.0), (0.5, 1.5))
    assert matrix.caption == "step 3: experts' load over an even share, 0.00 to 2.00"
    assert load_matrix(3, {"loss": 1.0, "val/loss": 2.0}) is None


def test_picture_is_red_where_more_blue_where_less_black_where_nothing():
    metrics = of_layers(layer_1=[0.0, 0.1, 0.25, 0.65], layer_2=[math.nan, 0.25, 0.25, 0.5])
    picture_HWC = load_matrix(1, metrics).pixels_HWC
    assert picture_HWC.dtype == "uint8"
    assert picture_HWC.shape[2] == 3
    colours = picture_HWC.reshape(-1, 3).astype(int)
    red, _, blue = colours.T
    black = (picture_HWC.sum(2) == 0).mean(0)  # by column of pixels
    assert max(black) > 0.6, "no column of dead experts"
    assert ((red - blue) > 60).sum() > 1000, "nothing is red"
    assert ((blue - red) > 60).sum() > 1000, "nothing is blue"


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6, 7]), (100, [1, 7])])
def test_pictures_of_the_first_every_nth_and_last_step(every, expected):
    view = LoadPictures(every, last_step=7)
    assert LOAD not in view(0, {"val/loss": 2.0})
    metrics = of_layers(layer_1=[0.5, 0.5])
    seen = {step: view(step, metrics) for step in range(1, 8)}
    assert [step for step, row in seen.items() if LOAD in row] == expected
    assert LOAD not in metrics
    assert all(row.items() >= metrics.items() for row in seen.values())


def test_a_dense_model_has_no_picture():
    assert LoadPictures(1, last_step=1)(1, {"loss": 1.0}) == {"loss": 1.0}
