"""Settings of an imported model that only an export uses. A run that starts from the model keeps them."""

from collections.abc import Mapping
from typing import Any

# Key of these settings in a checkpoint's state.
PUBLISHED = "published"
# Further keys of generation_config.json with token ids.
_ID_KEYS = ("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "constraints")


def without_ids(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return `PUBLISHED` settings without token ids, for a model with another tokenizer."""
    generation = published.get("generation_config", {})
    return {
        "generation_config": {
            key: value
            for key, value in generation.items()
            if not (key.endswith(("_token_id", "_token_ids", "_words_ids")) or key in _ID_KEYS or "forced_" in key)
        }
    }
