"""`fmoe.fmoefy` leaves a Megatron-core model to megatron_patch, by its entry point."""

import pytest
from forks import only

# Functions run in processes of the `forks` fixture, where megatron-core is imported already.


def converted(options):
    from tiny_gpt import EXPERTS, start, tiny_gpt

    import fmoe
    from megatron_patch import MegatronMoE

    start()
    gpt = tiny_gpt()
    try:
        fmoe.fmoefy(gpt, EXPERTS, **options)
    except fmoe.UserError as error:
        return str(error)
    return [layer.layer_number for layer in gpt.decoder.layers if isinstance(layer.mlp, MegatronMoE)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2]),
        ({"layers": "all", "upcycle": False, "seed": 1}, [1, 2]),
        ({"layers": [1]}, [1]),
        ({"layers": 2}, [2]),
        ({"layers": [3]}, "layers=[3] must be one or more layer numbers from 1 to 2"),
        ({"layers": []}, "layers=[] must be one or more layer numbers from 1 to 2"),
        ({"layers": "odd"}, "layers='odd' is neither 'all', nor layer numbers, nor n for every n-th layer"),
        ({"layers": 3}, "layers=3 (every n-th layer) selects no layer: the model has 2 layers"),
    ],
    ids=str,
)
def test_megatron_models_go_to_their_converter(forks, options, expected):
    assert only(forks.run(1, converted, options)) == expected


def not_megatrons():
    from torch import nn

    import fmoe

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    fmoe.fmoefy(model, 2)
    try:
        fmoe.fmoefy(nn.Linear(4, 4), 2)
    except fmoe.UserError as error:
        return isinstance(model[0], fmoe.MoE), str(error)


def test_other_models_do_not_although_megatron_is_there(forks):
    found, message = only(forks.run(1, not_megatrons))
    assert found
    assert "of whole models: megatron." in message
