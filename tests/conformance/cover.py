"""The cases of the conformance matrix: every level of every factor, and every pair of levels that can go together."""

import collections
import functools
import itertools
from collections.abc import Callable

FACTORS = {
    "gate": [
        "naive",
        "noisy",
        "switch",
        "gshard",
        "swipe",
        "zero",
        "random",
        "base",
        "hash",
        "expert_choice",
        "sinkhorn",
        "sigmoid",
        "topology",
        "sparsemixer",
    ],
    "experts": ["ffn", "swiglu", "modules"],
    "optimizer": ["sgd", "adamw"],
    "split": ["ep1 x dp2", "ep2", "ep4", "ep2 x dp2"],
    "exchange": ["all_to_all", "padded", "all_gather", "hierarchical"],
    "chunks": [1, 2, 3],
    "shadow": [0, 2],
    "bound": [False, True],
    "wrapper": ["ddp", "fsdp2", "grouped", "none"],
    "dtype": ["float32", "float64"],
}
Case = dict[str, object]
Factors = dict[str, list]


def is_possible(case: Case) -> bool:
    """Return whether a case, or a part of one, is possible."""

    def has(factor: str, *levels: object) -> bool:
        return factor in case and case[factor] in levels

    if has("exchange", "all_gather") and (has("chunks", 2, 3) or has("shadow", 2) or has("bound", True)):
        return False
    if has("exchange", "padded") and (has("shadow", 2) or has("bound", True)):
        return False
    if has("wrapper", "fsdp2") and has("shadow", 2):  # an expert that is cut in shards cannot be lent whole
        return False
    # One worker exchanges nothing: there the options say nothing, and one level of each is enough.
    alone = has("split", "ep1 x dp2")
    return not (
        alone
        and (
            has("exchange", "padded", "all_gather", "hierarchical")
            or has("chunks", 2, 3)
            or has("shadow", 2)
            or has("bound", True)
        )
    )


def generate(factors: Factors = FACTORS, possible: Callable[[Case], bool] = is_possible) -> list[Case]:
    """Greedy: each case takes the levels that cover most pairs not covered yet, and of those the least used.

    The same at every call.

    Args:
        possible: whether a case, or a part of one, asks for nothing that there is not.
    """
    names = list(factors)
    missing = possible_pairs(factors, possible)
    cases = []
    uses = collections.Counter()
    while missing:
        first = min(missing, key=lambda pair: (names.index(pair[0][0]), names.index(pair[1][0]), str(pair)))
        case: Case = dict(first)
        for name in names:
            if name in case:
                continue

            levels = [level for level in factors[name] if _can_end({**case, name: level}, factors, possible)]
            case[name] = max(levels, key=functools.partial(_gain, missing, names, case, uses, name))
        missing -= pairs_of(case)
        uses.update(case.items())
        cases.append({name: case[name] for name in names})
    return cases


def possible_pairs(factors: Factors, possible: Callable[[Case], bool]) -> set:
    """All that a cover has to cover."""
    return {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
        if possible({a: x, b: y})
    }


def _can_end(case: Case, factors: Factors, possible: Callable[[Case], bool]) -> bool:
    """Return whether the remaining factors have levels that make the case possible; only pairs conflict."""
    return possible(case) and all(
        any(possible({**case, name: level}) for level in levels) for name, levels in factors.items() if name not in case
    )


def _gain(missing: set, names: list[str], case: Case, uses: collections.Counter, name: str, level: object):
    """Return the value of a level: the pairs that it covers, then how rarely it was used."""
    return sum(_pair(names, (name, level), item) in missing for item in case.items()), -uses[name, level]


def _pair(names: list[str], a: tuple[str, object], b: tuple[str, object]):
    return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)


def pairs_of(case: Case) -> set:
    """The pairs of levels that a case covers."""
    return set(itertools.combinations(case.items(), 2))


def name_of(case: Case) -> str:
    """For the report of the tests."""
    return "-".join(f"{factor}{level}" if isinstance(level, int) else str(level) for factor, level in case.items())
