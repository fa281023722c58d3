"""Values of a recipe that belong to one kind of model, and to its data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fmoe.errors import UserError
from pretrain.config.parallel import divides
from pretrain.data.blend import whole_weights

if TYPE_CHECKING:
    from pretrain.config.recipe import Recipe


def check_kind(recipe: Recipe) -> None:
    """Raises UserError for the first value that the kind of model, or the blend of corpora, cannot have."""
    model, data = recipe.model, recipe.data
    if model.kind != "t5" and model.num_decoder_layers is not None:
        raise UserError(f"model.num_decoder_layers={model.num_decoder_layers} is of model.kind=t5, not {model.kind}")
    if model.kind != "gpt" and data.document_mask:
        raise UserError(f"data.document_mask=true is of model.kind=gpt, not {model.kind}")
    if not 0 < data.noise_density < 1:
        raise UserError(f"data.noise_density={data.noise_density} is not between 0 and 1")
    if not 1 <= data.mean_span < math.inf:
        raise UserError(f"data.mean_span={data.mean_span} is not a number from 1")
    if model.kind == "t5":
        try:
            _ = recipe.spans
        except UserError as error:
            raise UserError(f"model.{error}") from error
        if recipe.parallel.is_sequence_parallel:
            divides("parallel.tensor", recipe.parallel.tensor, "the tokens of a t5's decoder", recipe.decoder_length)
    if model.kind == "bert" and model.sequence_length < 3:
        raise UserError(f"model.sequence_length={model.sequence_length} is less than 3: no token of text is in it")
    if data.weights and len(data.weights) != len(data.train):
        raise UserError(f"data.weights has {len(data.weights)} entries, data.train {len(data.train)}: one each")
    if data.weights:
        try:
            whole_weights(data.weights)
        except UserError as error:
            raise UserError(f"data.{error}") from error
