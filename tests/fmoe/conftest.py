"""Skips tests of models that the installed transformers does not run."""

import pytest


@pytest.fixture(autouse=True)
def known_family(request):
    callspec = getattr(request.node, "callspec", None)
    family = callspec.params.get("family") if callspec else None
    if family is None:
        return
    from bench.studies.experts import SINCE
    from fmoe.runtime.versions import installed

    needed = SINCE.get(family, (0, 0))
    if installed("transformers") < needed:
        pytest.skip(f"{family} needs transformers>={needed[0]}.{needed[1]}")
