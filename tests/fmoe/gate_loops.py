"""Every gate once more, as loops over Python floats, written from the papers and from nothing of `fmoe`: what a routing
group of tokens decides. Noise is an input.

A group is a list of token vectors; the result is a list, by token, of (expert, weight) in the order of the choices, and
the losses of the group by name.
"""

import math
from dataclasses import dataclass, field


@dataclass
class Group:
    """Inputs of one routing group.

    Attributes:
        tokens: vectors of the valid tokens.
        rows: the router's weight, one row an expert.
        top_k: K.
        training: whether the gate is in training.
        noise: numbers for each token, of the kind that the gate draws.
        options: what else the gate was told.
    """

    tokens: list[list[float]]
    rows: list[list[float]]
    top_k: int
    training: bool = True
    noise: list[list[float]] = field(default_factory=list)
    options: dict = field(default_factory=dict)

    def logits(self, tokens=None):
        return [[dot(row, x) for row in self.rows] for x in (self.tokens if tokens is None else tokens)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(values):
    top = max(values)
    exps = [math.exp(v - top) for v in values]
    return [e / sum(exps) for e in exps]


def sigmoid(v):
    return 1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v))


def best(values, k):
    """Indices of the k largest, of equals the first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def z_loss(logits):
    values = []
    for row in logits:
        top = max(row)
        values.append((top + math.log(sum(math.exp(v - top) for v in row))) ** 2)
    return sum(values) / len(values)


def balance_loss(probs, picks):
    num_experts = len(probs[0])
    counted = [e for row in picks for e in row if e >= 0]
    total = 0.0
    for e in range(num_experts):
        total += counted.count(e) / len(counted) * sum(p[e] for p in probs) / len(probs)
    return num_experts * total


def squared_variation(values):
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2 if mean else 0.0


def naive(g):
    logits = g.logits()
    picks = []
    for row in logits:
        row = within_groups(row, g.options, 1)
        picks.append(best(row, g.top_k))
    chosen, probs = [], []
    for row, picked in zip(logits, picks, strict=True):
        is_sigmoid = g.options.get("score") == "sigmoid"
        scores = [sigmoid(v) for v in row] if is_sigmoid else softmax(row)
        total = sum(scores[e] for e in picked) if g.options.get("normalize", True) else 1.0
        chosen.append([(e, scores[e] / total * g.options.get("routed_scale", 1.0)) for e in picked])
        probs.append([s / sum(scores) for s in scores])
    return chosen, {"balance": balance_loss(probs, picks), "z": z_loss(logits)}


def within_groups(row, options, best_of):
    """Group-limited scores."""
    if "expert_groups" not in options:
        return row
    size = len(row) // options["expert_groups"]
    worth = [sum(sorted(row[i : i + size])[-best_of:]) for i in range(0, len(row), size)]
    kept = best(worth, options["kept_groups"])
    return [v if i // size in kept else -math.inf for i, v in enumerate(row)]


def topology(g):
    """The largest bonus for experts of the node that keeps the load within the bound."""
    logits = g.logits()
    size = len(g.rows) // g.options["num_nodes"]

    def picks_with(bonus):
        return [
            best([v + bonus * (e // size == g.options["node"]) for e, v in enumerate(row)], g.top_k) for row in logits
        ]

    def most(picks):
        loads = [0] * len(g.rows)
        for row in picks:
            for e in row:
                loads[e] += 1
        return max(loads)

    picks = picks_with(0.0)
    bound = max(most(picks), g.options["skew"] * len(logits) * g.top_k / len(g.rows))
    for part in (0.125, 0.25, 0.5, 1.0):
        nearer = picks_with(part * g.options["bonus"])
        if most(nearer) <= bound:
            picks = nearer
    chosen = [list(zip(p, softmax([row[e] for e in p]), strict=True)) for row, p in zip(logits, picks, strict=True)]
    return chosen, {"balance": balance_loss([softmax(r) for r in logits], picks), "z": z_loss(logits)}


def switch(g):
    tokens = g.tokens
    if g.training:
        jitter = g.options["jitter"]
        tokens = [
            [v * (1 - jitter + 2 * jitter * u) for v, u in zip(x, noise, strict=True)]
            for x, noise in zip(tokens, g.noise, strict=True)
        ]
    logits = g.logits(tokens)
    probs = [softmax(row) for row in logits]
    chosen = [[(e, p[e]) for e in best(p, g.top_k)] for p in probs]
    picks = [[e for e, _ in row] for row in chosen]
    return chosen, {"balance": balance_loss(probs, picks), "z": z_loss(logits)}


def gshard(g):
    logits = g.logits()
    probs = [softmax(row) for row in logits]
    chosen = []
    for t, p in enumerate(probs):
        order = best(p, g.top_k)
        total = sum(p[e] for e in order)
        row = []
        for i, e in enumerate(order):
            weight = p[e] / total
            made = i == 0 or not g.training or 2 * weight > g.noise[t][i - 1]
            row.append((e if made else -1, weight))
        chosen.append(row)
    return chosen, {"balance": balance_loss(probs, [[row[0][0]] for row in chosen]), "z": z_loss(logits)}


def noisy(g):
    clean = g.logits()
    if not g.training:
        return [
            [(e, w) for e, w in zip(p, softmax([r[e] for e in p]), strict=True)]
            for r in clean
            if (p := best(r, g.top_k))
        ], {}
    num_experts = len(g.rows)
    std = [[math.log1p(math.exp(dot(row, x))) for row in g.options["noise_rows"]] for x in g.tokens]
    chosen, importance, load = [], [0.0] * num_experts, [0.0] * num_experts
    for t, row in enumerate(clean):
        h = [row[e] + g.noise[t][e] * std[t][e] for e in range(num_experts)]
        picks = best(h, g.top_k)
        weights = softmax([h[e] for e in picks])
        chosen.append(list(zip(picks, weights, strict=True)))
        for e, w in chosen[-1]:
            importance[e] += w
        for e in range(num_experts):
            others = sorted((h[i] for i in range(num_experts) if i != e), reverse=True)
            if g.top_k == num_experts:
                load[e] += 1
            else:
                load[e] += 0.5 * (1 + math.erf((row[e] - others[g.top_k - 1]) / std[t][e] / math.sqrt(2)))
    return chosen, {"importance": squared_variation(importance), "load": squared_variation(load)}


def swipe(g):
    logits = g.logits()
    num_tokens, num_experts = len(logits), len(g.rows)
    picks = [[] for _ in logits]
    if not g.training:
        picks = [best(row, g.top_k) for row in logits]
    load = [0] * num_experts
    for k in range(1, g.top_k + 1 if g.training else 1):
        share = math.ceil(k * num_tokens / num_experts)
        left = []
        for t, row in enumerate(logits):
            e = best([-math.inf if i in picks[t] else v for i, v in enumerate(row)], 1)[0]
            if load[e] < share:
                load[e] += 1
                picks[t] = [*picks[t], e]
            else:
                left.append(t)
        for t, e in zip(left, matching([logits[t] for t in left], [picks[t] for t in left], load), strict=True):
            picks[t] = [*picks[t], e]
            load[e] += 1
    chosen = [list(zip(p, softmax([row[e] for e in p]), strict=True)) for row, p in zip(logits, picks, strict=True)]
    return chosen, {"z": z_loss(logits)}


def base(g):
    logits = g.logits()
    picks = [[] for _ in logits]
    load = [0] * len(g.rows)
    if not g.training:
        picks = [best(row, g.top_k) for row in logits]
    for _ in range(g.top_k if g.training else 0):
        for t, e in enumerate(matching(logits, picks, load)):
            picks[t] = [*picks[t], e]
            load[e] += 1
    return [[(e, sigmoid(row[e])) for e in p] for row, p in zip(logits, picks, strict=True)], {}


def matching(scores, taken, load):
    """The expert of each token: loads as even as can be, then the largest sum of scores. By the Hungarian method on
    places: the n-th place of an expert costs n times a large number."""
    if not scores:
        return []
    places = [(e, n) for e in range(len(load)) for n in range(len(scores))]
    costs = []
    for row, has in zip(scores, taken, strict=True):
        costs.append([1e12 if e in has else 1e5 * (load[e] + n) - row[e] for e, n in places])
    return [places[p][0] for p in hungarian(costs)]


def hungarian(costs):
    """Column of each row, of least total cost (Kuhn and Munkres, with potentials); no more rows than columns."""
    rows, columns = len(costs), len(costs[0])
    u, v, row_of = [0.0] * (rows + 1), [0.0] * (columns + 1), [0] * (columns + 1)
    for i in range(1, rows + 1):
        row_of[0], column = i, 0
        least, way, used = [math.inf] * (columns + 1), [0] * (columns + 1), [False] * (columns + 1)
        while row_of[column]:
            used[column] = True
            current, delta, following = row_of[column], math.inf, 0
            for j in range(1, columns + 1):
                if used[j]:
                    continue
                reduced = costs[current - 1][j - 1] - u[current] - v[j]
                if reduced < least[j]:
                    least[j], way[j] = reduced, column
                if least[j] < delta:
                    delta, following = least[j], j
            for j in range(columns + 1):
                if used[j]:
                    u[row_of[j]] += delta
                    v[j] -= delta
                else:
                    least[j] -= delta
            column = following
        while column:
            row_of[column] = row_of[way[column]]
            column = way[column]
    result = [0] * rows
    for j in range(1, columns + 1):
        if row_of[j]:
            result[row_of[j] - 1] = j - 1
    return result


def zero(g):
    return [[(0, 1 / g.top_k)] * g.top_k for _ in g.tokens], {}


def random(g):
    return [[(e, 1 / g.top_k) for e in best(noise, g.top_k)] for noise in g.noise], {}


def hash(g):
    """splitmix64 of key and id, then MurmurHash3's finaliser of that and the expert, its top 24 bits."""
    mask = (1 << 64) - 1
    chosen = []
    for token_id in g.options["ids"]:
        x = (g.options["key"] + (token_id + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
        values = [mix32(mix32((e * 0x9E3779B1 + x) & 0xFFFFFFFF) ^ (x >> 32)) >> 8 for e in range(len(g.rows))]
        chosen.append([(e, 1 / g.top_k) for e in best(values, g.top_k)])
    return chosen, {}


def mix32(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def expert_choice(g):
    logits = g.logits()
    probs = [softmax(row) for row in logits]
    capacity = max(1, math.ceil(g.options["capacity_factor"] * len(logits) / len(g.rows) - 1e-9))
    chosen = [[] for _ in logits]
    for e in range(len(g.rows)):
        for t in best([p[e] for p in probs], min(capacity, len(probs))):
            chosen[t].append((e, probs[t][e]))
    return [sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in chosen], {"z": z_loss(logits)}


def sinkhorn(g):
    logits = g.logits()
    num_tokens, num_experts = len(logits), len(g.rows)
    columns = [1.0] * num_experts
    mass = [[math.exp(v - max(row)) for v in row] for row in logits]
    for _ in range(g.options["iterations"] if g.training else 0):
        rows = [1 / dot(m, columns) for m in mass]
        sums = [columns[e] * sum(r * m[e] for r, m in zip(rows, mass, strict=True)) for e in range(num_experts)]
        excess = [s / (num_tokens / num_experts) for s in sums]
        if max(abs(math.log(x)) for x in excess) <= g.options["tolerance"]:
            break
        columns = [c / x for c, x in zip(columns, excess, strict=True)]
    chosen = []
    for row, m in zip(logits, mass, strict=True):
        picks = best([v * c for v, c in zip(m, columns, strict=True)], g.top_k)
        chosen.append([(e, sigmoid(row[e]) if g.top_k == 1 else softmax(row)[e]) for e in picks])
    return chosen, {"z": z_loss(logits)}


def sigmoid_gate(g):
    logits = g.logits()
    scores = [[sigmoid(v) for v in row] if g.options["score"] == "sigmoid" else softmax(row) for row in logits]
    chosen, plain = [], []
    for row in scores:
        biased = within_groups([s + b for s, b in zip(row, g.options["bias"], strict=True)], g.options, 2)
        picks = best(biased, g.top_k)
        total = sum(row[e] for e in picks) if g.top_k > 1 and g.options["normalize"] else 1.0
        chosen.append([(e, row[e] / total * g.options["routed_scale"]) for e in picks])
        plain.append(best(row, g.top_k))
    normal = [[s / sum(row) for s in row] for row in scores]
    return chosen, {"sequence_balance": balance_loss(normal, plain)}


def sparsemixer(g):
    """Each choice among the experts left whose logits are near the largest; noise is one number per expert, and one for
    the division of the weight, of each choice."""
    logits = g.logits()
    num_experts, margin = len(g.rows), g.options["margin"]
    chosen = []
    for t, row in enumerate(logits):
        left, picks = list(range(num_experts)), []
        for k in range(g.top_k):
            top = max(row[e] for e in left)
            near = [e for e in left if top == row[e] or (top - row[e]) / max(abs(row[e]), top) <= margin]
            probs = dict(zip(near, softmax([row[e] for e in near]), strict=True))
            favourite = picked = max(near, key=lambda e: row[e])
            divisor = 1
            if g.training:
                *draws, last = g.noise[t][k * (num_experts + 1) : (k + 1) * (num_experts + 1)]
                picked = max(near, key=lambda e: row[e] - math.log(-math.log(draws[e])))
                divisor = 3 if picked != favourite and last <= 0.75 else 1
            picks.append((picked, probs[picked] / divisor))
            left.remove(picked)
        chosen.append(picks)
    picks = [[e for e, _ in row] for row in chosen]
    return chosen, {"balance": balance_loss([softmax(row) for row in logits], picks), "z": z_loss(logits)}


def drop(chosen, top_k, num_experts, factor):
    """Capacity: first choices of all tokens before second ones, in token order."""
    capacity = max(1, math.ceil(factor * len(chosen) * top_k / num_experts - 1e-9))
    taken, result = [0] * num_experts, [list(row) for row in chosen]
    for k in range(top_k):
        for row in result:
            e, weight = row[k]
            if e >= 0:
                row[k] = (e if taken[e] < capacity else -1, weight)
                taken[e] += 1
    return result


LOOPS = {
    "naive": naive,
    "noisy": noisy,
    "switch": switch,
    "gshard": gshard,
    "swipe": swipe,
    "zero": zero,
    "random": random,
    "base": base,
    "hash": hash,
    "expert_choice": expert_choice,
    "sinkhorn": sinkhorn,
    "sigmoid": sigmoid_gate,
    "topology": topology,
    "sparsemixer": sparsemixer,
}
