"""Loads of the experts for a plan: uniform, skewed, or recorded in a run; and what their imbalance costs.

Shape letters: S recorded steps, L layers with experts, E experts, W ranks of the expert parallel group.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fmoe.errors import UserError
from pretrain.planner.cluster import Cluster
from pretrain.tracking import read_metrics
from pretrain.tracking.folder import METRICS
from pretrain.tracking.loads import load_matrix

# Rows of each expert [ranks, experts] that each rank of the expert parallel group sends, before drops by a capacity:
# (number of the layer, from 1; ranks; assignments of each rank).
Loads = Callable[[int, int, int], np.ndarray]


def uniform(num_experts: int) -> np.ndarray:
    """Return equal shares of all experts: [1, 1, E]."""
    return np.full((1, 1, num_experts), 1 / num_experts)


def skewed(num_experts: int, exponent: float) -> np.ndarray:
    """Return shares by Zipf's law: that of expert e, from 0, is proportional to ``(e + 1) ** -exponent``: [1, 1, E]."""
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return (weights / weights.sum())[None, None]


def recorded(run: Path, num_experts: int, last: int = 100) -> np.ndarray:
    """Return the shares in the ``last`` steps with loads of a run: [S, L, E].

    Raises:
        UserError: the run has no loads, or another number of experts.
    """
    rows = []
    for row in read_metrics(run / METRICS):
        matrix = load_matrix(int(row["step"]), row)
        if matrix is not None:
            rows.append(matrix.load_LE)
    if not rows:
        raise UserError(f"--load {run}: {METRICS} has no loads of experts")
    shares_SLE = np.array(rows[-last:], dtype=np.float64)
    if shares_SLE.shape[2] != num_experts:
        raise UserError(f"--load {run}: it has {shares_SLE.shape[2]} experts, but the recipe has {num_experts}")
    return shares_SLE / np.maximum(shares_SLE.sum(2, keepdims=True), 1e-30)


def of_slowest(shares_SLE: np.ndarray) -> Loads:
    """Return loads in which the first rank gets the rows of each layer's busiest rank, averaged over steps and layers.

    A layer's exchange waits for its busiest rank. So a step of this rank lasts as long as a step of all.
    """

    @cache
    def loads(layer: int, num_ranks: int, assignments: int) -> np.ndarray:
        shares_NWX = shares_SLE.reshape(-1, num_ranks, shares_SLE.shape[2] // num_ranks)
        order_NW = np.argsort(-shares_NWX.sum(2), axis=1, kind="stable")
        shares_E = np.take_along_axis(shares_NWX, order_NW[:, :, None], axis=1).mean(0).ravel()
        return np.stack([shared_out(shares_E, assignments, rank) for rank in range(num_ranks)])

    return loads


def shared_out(shares: np.ndarray, total: int, rank: int = 0) -> np.ndarray:
    """Return whole numbers with these shares of ``total``, by largest remainder: int64, as many as shares.

    Of equal remainders, each rank rounds up others.
    """
    exact = shares * (total / shares.sum())
    counts = np.floor(exact).astype(np.int64)
    missing = int(total - counts.sum())
    place = (np.arange(len(exact)) - rank * missing) % len(exact)
    by_remainder = np.lexsort((place, np.round(counts - exact, 9)))
    counts[by_remainder[:missing]] += 1
    return counts


def imbalance(shares_SLE: np.ndarray, num_ranks: int, capacity_factor: float | None) -> dict[str, Any]:
    """Return what the imbalance of loads means for a group of ranks, as ratios to equal loads.

    Returns:
        By name: the busiest rank's rows over steps and layers (``p50``, ``p99``, ``max``); its rows if experts were
        placed by their mean loads (``placed``); and the share of assignments that a capacity drops (``dropped``; 0
        without one), with the loads of whole steps.
    """
    busiest_SL = shares_SLE.reshape(*shares_SLE.shape[:2], num_ranks, -1).sum(3).max(2) * num_ranks
    num_experts = shares_SLE.shape[2]
    limit = np.inf if capacity_factor is None else capacity_factor / num_experts
    figures = {f"p{q}": float(np.percentile(busiest_SL, q)) for q in (50, 99)}
    figures["max"] = float(busiest_SL.max())
    figures["placed"] = float(np.mean([_placed(shares_E, num_ranks) for shares_E in shares_SLE.mean(0)]))
    figures["dropped"] = float(np.maximum(shares_SLE - limit, 0).sum(2).mean())
    return figures


def exchange_seconds(
    cluster: Cluster, shares_SLE: np.ndarray, num_ranks: int, num_bytes: float, expert_bytes: float
) -> dict[str, float]:
    """Return the seconds of an exchange of rows, by the way to do it.

    They are flat; hierarchical, within nodes and then between them; padded to the rows of the largest expert; with
    experts placed by their loads; within nodes only, as a gate that prefers near experts could at best achieve; and
    shadowed, with the number of shadowed experts that is fastest. Shadowing sends weights to all ranks and gradients
    back, once for four exchanges of rows (`fmoe.exchange.shadow`).

    Args:
        num_bytes: bytes of all rows of a rank.
        expert_bytes: bytes of an expert's parameters.
    """

    def to_all(busiest: float) -> float:
        return cluster.collective_seconds("all_to_all", num_ranks, num_ranks, num_bytes * busiest)

    def busiest_of(shares: np.ndarray) -> float:
        return float(shares.reshape(*shares.shape[:2], num_ranks, -1).sum(3).max(2).mean() * num_ranks)

    node = min(cluster.links[0].size, num_ranks)
    within = cluster.collective_seconds("all_to_all", node, node, num_bytes)
    hottest_SLE = np.argsort(-shares_SLE, axis=2, kind="stable")
    shadowed = []
    for count in range(min(8, shares_SLE.shape[2])):
        rest_SLE = shares_SLE.copy()
        np.put_along_axis(rest_SLE, hottest_SLE[:, :, :count], 0.0, axis=2)
        weights = 2 * count * cluster.collective_seconds("all_gather", num_ranks, num_ranks, expert_bytes)
        shadowed.append(to_all(busiest_of(rest_SLE)) + weights / 4)
    best = int(np.argmin(shadowed))
    busiest = busiest_of(shares_SLE)
    between = cluster.collective_seconds("all_to_all", max(1, num_ranks // node), num_ranks, num_bytes * busiest)
    return {
        "flat": to_all(busiest),
        "hierarchical": within + between,
        "padded": to_all(float(shares_SLE.max(2).mean()) * shares_SLE.shape[2]),
        "placed": to_all(float(np.mean([_placed(shares_E, num_ranks) for shares_E in shares_SLE.mean(0)]))),
        "within nodes": within,
        f"{best} shadowed": shadowed[best],
    }


def _placed(shares_E: np.ndarray, num_ranks: int) -> float:
    """Return the busiest rank's load over an even one, with each expert, by descending load, on the rank with the
    least that has room."""
    load_W = np.zeros(num_ranks)
    room_W = np.full(num_ranks, len(shares_E) // num_ranks)
    for share in np.sort(shares_E)[::-1]:
        rank = int(np.argmin(np.where(room_W > 0, load_W, np.inf)))
        load_W[rank] += share
        room_W[rank] -= 1
    return float(load_W.max() * num_ranks)
