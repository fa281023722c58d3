"""The cases of Megatron's matrix: every level of every factor, and every pair of levels that can go together."""

from cover import Case, generate

LAYOUTS = {
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "EP2": {"expert": 2},
    "DP2": {"data": 2},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
    "TP2xEP2": {"tensor": 2, "expert": 2},
    "TP2xDP2": {"tensor": 2, "data": 2},
    "PP2xEP2": {"pipeline": 2, "expert": 2},
    "PP2xDP2": {"pipeline": 2, "data": 2},
    "EP2xDP2": {"expert": 2, "data": 2},
    "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "PP4": {"pipeline": 4},
    "TP2xEP4": {"tensor": 2, "expert": 4},
    "TP2xEP2xDP2": {"tensor": 2, "expert": 2, "data": 2},
    "TP2 ETP2": {"tensor": 2, "expert_tensor": 2},
    "TP2xEP2 ETP2": {"tensor": 2, "expert": 2, "expert_tensor": 2},
    "CP2": {"context": 2},
    "CP4": {"context": 4},
    "CP2xEP2": {"context": 2, "expert": 2},
    "CP2xEP4": {"context": 2, "expert": 4},
    "CP2xDP2": {"context": 2, "data": 2},
    "CP2xPP2": {"context": 2, "pipeline": 2},
    "TP2xCP2": {"tensor": 2, "context": 2},
    "TP2xCP2xEP4": {"tensor": 2, "context": 2, "expert": 4},
    "TP2xCP2 ETP2": {"tensor": 2, "context": 2, "expert_tensor": 2},
}
FACTORS = {
    "layout": list(LAYOUTS),
    "sequence": ["-", "on", "off"],
    "shard": ["none", "optimizer"],
    "recompute": ["none", "selective", "full"],
    "schedule": ["1f1b", "gpipe"],
    "overlap": [False, True],
    "model": ["gpt", "gpt, gated and untied"],
}


def is_possible(case: Case) -> bool:
    """Return whether a case, or a part of one, is possible."""
    layout = LAYOUTS.get(case.get("layout"))
    if layout is not None and "sequence" in case and (case["sequence"] == "-") == ("tensor" in layout):
        return False
    if layout is not None and case.get("sequence") == "off" and "context" in layout:
        return False
    if layout is not None and case.get("schedule") == "gpipe":
        return "pipeline" in layout and "virtual_pipeline" not in layout
    return True


def parallel_of(case: Case) -> dict:
    """The keys of ``[parallel]``."""
    return LAYOUTS[case["layout"]] | {
        "sequence": None if case["sequence"] == "-" else case["sequence"] == "on",
        "recompute": case["recompute"],
        "schedule": case["schedule"],
        "shard": case["shard"],
        "overlap_gradients": case["overlap"],
        "overlap_parameters": case["overlap"] and case["shard"] == "optimizer",
    }


CASES = generate(FACTORS, is_possible)
