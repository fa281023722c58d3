"""Versions of megatron-core: the supported range, what differs in it, and an import that works without Triton.

| versions | difference                                               | adaptation                                     |
|----------|----------------------------------------------------------|------------------------------------------------|
| to 0.18  | the gradient norm treats different experts as replicas   | `patches.PATCHES`, on ChainedOptimizer         |
| 0.16     | MLA uses stand-ins for Transformer Engine's classes      | `patches.PATCHES`, on HAVE_TE                  |
| to 0.16  | experts may be a GroupedMLP, side by side in one matrix  | `muon.megatron_matrices` refuses it            |
| 0.17 on  | the package requires Python 3.12                         | pip installs 0.16.1 on Python 3.11             |
| 0.17 on  | replaces the function with which torch unpickles tensors | tests/forks.py restores it                     |
| 0.17 on  | ``schedules.backward_step`` has no ``model_type``        | `pretrain.engine.pipeline` checks for it       |
| 0.17 on  | recomputation of norms compiles C++, with ninja          | `cpu.PATCHES`, on _get_share_storage           |
| 0.18 on  | ``import megatron.core`` needs Triton                    | `without_triton`, around the import            |
| 0.18 on  | the aux-loss tracker is an object of a new module        | `layer.drop_tracked_losses` knows both         |
| 0.18 on  | specs have partials, which differ from their copies      | `fmoe_layer_spec` reads them; never compared   |
| 0.19 on  | the linear function has an argument ``gtp_remat_size``   | `bf16_linear` passes it on                     |
| 0.19 on  | attention refuses norms of queries and keys in its spec  | `qk_norm.norm_all_heads` adds them afterwards  |
| 0.19 on  | checkpoints have an object instead of common.pt          | `pretrain.interchange.megatron` reads both     |
| 0.19 on  | MLA chooses its norms by the config, not by the spec     | `latent_attention` takes the norms of the spec |
| 0.19 on  | GPTModel and an import warn                              | silenced in __init__.py, pretrain.engine.model |

``python tests/conformance/megatron_versions.py FOLDER...`` compares what versions compute, bit for bit.
"""

import builtins
import contextlib
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from fmoe.errors import MissingPackageError, UserError

LOWEST = (0, 16, 1)
BELOW = (0, 20)
REQUIREMENT = "megatron-core>=0.16.1,<0.20"


def check() -> str:
    """Return the installed version of megatron-core.

    Raises:
        UserError: megatron-core is not installed, or its version is not supported.
    """
    try:
        installed = version("megatron-core")
    except PackageNotFoundError as error:
        raise MissingPackageError("megatron-core is not installed: pip install 'fmoe[pretrain]'") from error
    numbers = []
    for part in installed.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))  # "0rc2" counts as 0
        if not digits:
            break
        numbers.append(int(digits))
    if not LOWEST <= tuple(numbers) < BELOW:
        raise UserError(f"megatron-core {installed} is not supported: pip install '{REQUIREMENT}'")
    return installed


# Modules that define Triton kernels and import Triton unconditionally, from megatron-core 0.18 on. `megatron.core`
# itself imports them. Their kernels need a GPU, and torch's builds for GPUs include Triton.
_NEEDS_TRITON = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")
_NO_TRITON = SimpleNamespace(jit=lambda function: function, language=SimpleNamespace(constexpr=object))


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Allow ``import megatron.core`` where Triton is not installed, as with torch's build for the CPU.

    Modules that ``megatron.core`` always imports and that need Triton get a stand-in. All others still find no Triton.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    import_ = builtins.__import__

    def imported(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if name in ("triton", "triton.language") and globals and globals.get("__name__") in _NEEDS_TRITON:
            return _NO_TRITON
        return import_(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    try:
        yield
    finally:
        builtins.__import__ = import_
