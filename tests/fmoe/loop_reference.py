"""The layer once more, as a loop over tokens in float64, written from the papers and from nothing of `fmoe` but its
noise (which is an input here). Sequences are lists of token vectors; a routing group is one sequence.
"""

import math

import torch
from torch import Tensor


def softmax(values: Tensor) -> Tensor:
    exp = (values - values.max()).exp()
    return exp / exp.sum()


class LoopMoE:
    """``forward`` gives the output and the total auxiliary loss; parameters are float64 leaves named as the layer's."""

    def __init__(self, layer, capacity_factor: float | None):
        self.kind = type(layer.gate).__name__
        self.top_k, self.num_experts = layer.gate.top_k, layer.num_experts
        self.capacity_factor = capacity_factor
        self.gated, self.loss_weights = layer.experts.gated, layer.loss_weights
        self.jitter = getattr(layer.gate, "jitter", 0.0)
        self.training = layer.training
        self.parameters = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}

    def expert(self, e: int, x: Tensor) -> Tensor:
        p = self.parameters
        hidden = p["experts.weight_in"][e] @ x
        if "experts.bias_in" in p:
            hidden = hidden + p["experts.bias_in"][e]
        if self.gated:
            half = len(hidden) // 2
            hidden = torch.nn.functional.gelu(hidden[:half]) * hidden[half:]
        else:
            hidden = torch.nn.functional.gelu(hidden)
        out = p["experts.weight_out"][e] @ hidden
        return out + p["experts.bias_out"][e] if "experts.bias_out" in p else out

    def choices(self, probs: Tensor, logits: Tensor, second_noise: Tensor) -> list[tuple[int, Tensor]]:
        """Experts of one token with their weights, best first; a choice not made is expert -1."""
        order = sorted(range(self.num_experts), key=lambda e: -logits[e].item())[: self.top_k]
        if self.kind == "NaiveRouter":
            weights = softmax(logits[order])
            return [(e, weights[i]) for i, e in enumerate(order)]
        if self.kind == "SwitchRouter":
            return [(e, probs[e]) for e in order]
        total = sum(probs[e] for e in order)
        picked = []
        for i, e in enumerate(order):
            weight = probs[e] / total
            made = i == 0 or not self.training or 2 * weight.item() > second_noise[i - 1].item()
            picked.append((e if made else -1, weight))
        return picked

    def forward(self, sequences: Tensor, jitter_noise: Tensor, second_noise: Tensor) -> tuple[Tensor, Tensor, int]:
        """[B, S, D] with noise [B, S, D] and [B, S, K - 1] -> output, auxiliary loss, assignments dropped."""
        outputs, balances, z_losses, dropped = [], [], [], 0
        for b, tokens in enumerate(sequences):
            size = len(tokens)
            probs_list, chosen = [], []
            for t, x in enumerate(tokens):
                if self.kind == "SwitchRouter" and self.training:
                    router_in = x * (1 - self.jitter + 2 * self.jitter * jitter_noise[b, t])
                else:
                    router_in = x
                logits = self.parameters["gate.weight"] @ router_in
                probs = softmax(logits)
                probs_list.append(probs)
                z_losses.append(torch.logsumexp(logits, 0) ** 2)
                chosen.append(self.choices(probs, logits, second_noise[b, t]))
            balances.append(self.balance(probs_list, chosen))
            capacity = math.inf
            if self.capacity_factor is not None:
                capacity = max(1, math.ceil(self.capacity_factor * size * self.top_k / self.num_experts - 1e-9))
            taken = [0] * self.num_experts
            ys = [torch.zeros_like(x) for x in tokens]
            for k in range(self.top_k):  # first choices of all tokens before second ones
                for t, x in enumerate(tokens):
                    e, weight = chosen[t][k]
                    if e < 0:
                        continue
                    if taken[e] >= capacity:
                        dropped += 1
                        continue
                    taken[e] += 1
                    ys[t] = ys[t] + weight * self.expert(e, x)
            outputs.append(torch.stack(ys))
        balance = sum(balances) / len(balances)
        z_loss = sum(z_losses) / len(z_losses)
        return torch.stack(outputs), self.loss_weights["balance"] * balance + self.loss_weights["z"] * z_loss, dropped

    def balance(self, probs: list[Tensor], chosen: list[list[tuple[int, Tensor]]]) -> Tensor:
        counted = [pairs[:1] if self.kind == "GShardRouter" else pairs for pairs in chosen]
        picks = [e for pairs in counted for e, _ in pairs if e >= 0]
        total = 0.0
        for e in range(self.num_experts):
            total = total + picks.count(e) / len(picks) * sum(p[e] for p in probs) / len(probs)
        return self.num_experts * total
