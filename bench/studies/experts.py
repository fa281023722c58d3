"""``python -m bench experts``: `fmoe.fmoefy` of the families of transformers that have experts already.

For a tiny random model of each family in float64, a table with the largest relative errors of output and gradients,
compared with the eager experts of transformers. The loss includes the model's own auxiliary loss, if it has one. The
converted model is saved, and loaded by transformers. If it differs, or an error is above 1e-10, the exit code is 1.

With ``--ep``, models whose experts are spread over ranks are compared in the same way, with columns of their own: the
largest relative error of output and gradients.

With ``--rounds``, training steps of a small Qwen3-MoE are timed too: converted, and with the eager and the grouped_mm
experts of transformers. Saved is the memory that autograd keeps for the backward pass, without parameters.
"""

import copy
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fmoe
from bench import frame, options, ranks, report
from bench.studies.recompute import Kept
from fmoe import parallel
from fmoe.convert import RoutedMoE
from fmoe.runtime.versions import installed

LIMIT = 1e-10
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": None}
LOCAL = GROUPED | {"num_local_experts": 4}
WIDE = GROUPED | {"intermediate_size": 40, "moe_intermediate_size": 24}
NUMBERED = WIDE | {"num_experts": 4}
ROUTED = WIDE | {"n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
LATENT = ROUTED | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
LATENT |= {"v_head_dim": 14, "q_lora_rank": 18, "n_group": 4, "topk_group": 2}
ERNIE = {name: value for name, value in WIDE.items() if name != "num_experts_per_tok"}
ERNIE |= {"moe_k": 3, "moe_num_experts": 8, "moe_layer_start_index": 1}

# Configuration of a tiny model by the prefix of its classes in transformers. The first ones are the families of
# `fmoe import`.
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": LOCAL,
    "Qwen2Moe": NUMBERED | {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 1},
    "Qwen3Moe": NUMBERED | {"head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "Olmoe": GROUPED | {"num_experts": 4},
    "GraniteMoe": LOCAL,
    "Phimoe": LOCAL | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "DeepseekV2": LATENT | {"topk_method": "group_limited_greedy"},
    "DeepseekV3": LATENT,
    "Glm4Moe": ROUTED | {"head_dim": 12},
    "Ernie4_5_Moe": ERNIE,
    "GptOss": LOCAL | {"head_dim": 12, "sliding_window": 5},
    "SwitchTransformers": {
        "vocab_size": 61,
        "d_model": 24,
        "d_kv": 8,
        "d_ff": 40,
        "num_layers": 2,
        "num_heads": 2,
        "num_experts": 4,
        "dropout_rate": 0.0,
        "router_jitter_noise": 0.0,
        "decoder_start_token_id": 0,
    },
    "Dots1": ROUTED | {"n_shared_experts": 1},
    "FlexOlmo": NUMBERED,
    "HunYuanMoEV1": NUMBERED | {"moe_topk": 2, "head_dim": 8},
    "Lfm2Moe": NUMBERED | {"num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
    "MiniMaxM2": LOCAL | {"head_dim": 8, "rotary_dim": 4},
    "Qwen3Next": NUMBERED
    | {"layer_types": ["full_attention", "full_attention"], "shared_expert_intermediate_size": 20},
}

# First version of transformers that runs these models, in float64 and with their auxiliary losses.
SINCE = {"DeepseekV2": (5, 13), "GraniteMoe": (5, 13), "HunYuanMoEV1": (5, 1), "Phimoe": (5, 1), "Qwen3Next": (5, 8)}
SINCE |= {"FlexOlmo": (5, 2), "SwitchTransformers": (5, 18)}


def main(argv: Sequence[str]) -> int:
    parser = options.bare_parser("experts", __doc__)
    known = [family for family in MODELS if installed("transformers") >= SINCE.get(family, (0, 0))]
    parser.add_argument("--families", nargs="+", choices=known, default=known, help="prefixes of classes")
    parser.add_argument("--ep", nargs="+", type=int, default=[], help="numbers of ranks that divide the experts")
    parser.add_argument("--rounds", type=int, default=0, help="timed steps of every contender; 0 for none")
    parser.add_argument("--width", type=int, default=256, help="width of the timed model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the timed model")
    parser.add_argument("--experts", type=int, default=32, help="experts of each of its layers")
    parser.add_argument("--length", type=int, default=256, help="tokens of each of its 4 sequences")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the timed model")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, rounds=0, width=16, layers=1, experts=4, length=1)
    rows = [compared(family) for family in arguments.families]
    for ep in arguments.ep:
        with tempfile.TemporaryDirectory() as folder:
            spread_rows = ranks.run(ep, spread_all, arguments.families, folder)
        for row, found in zip(rows, spread_rows, strict=True):
            row[f"ep {ep}"] = max(found["output"], found["gradients"])
            row["is_same_when_loaded"] &= found["is_same_when_loaded"]
    names = ("model of transformers", "weights", "output", "gradients", *(f"EP {ep}" for ep in arguments.ep))
    lines = [f"| {' | '.join(names)} | saved and loaded |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        errors = [f"{row[key]:.0e}" for key in ("output", "gradients", *(f"ep {ep}" for ep in arguments.ep))]
        saved = "bit-equal" if row["is_same_when_loaded"] else "differs"
        lines.append(f"| {row['family']} | {row['weights']} | {' | '.join(errors)} | {saved} |")
    report.write_rows(rows, "\n".join(lines) + "\n", arguments.out, "experts")
    if arguments.rounds:
        report.write([timed(arguments)], arguments.out, "experts speed")
    errors = [value for row in rows for value in row.values() if isinstance(value, float)]
    is_met = max(errors) <= LIMIT and all(row["is_same_when_loaded"] for row in rows)
    return 0 if is_met else 1


def tiny(family: str, dtype: torch.dtype = torch.float64, **values: Any) -> Any:
    """Return a model with random weights, and eager experts; ``values`` are further ones of its configuration."""
    import transformers

    transformers.logging.set_verbosity_error()  # advice on sizes, and a bar for each file that is read
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MODELS[family] | values)
    kind = "ForConditionalGeneration" if config.is_encoder_decoder else "ForCausalLM"
    model = getattr(transformers, f"{family}{kind}")._from_config(config).to(dtype)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):  # zeros would hide a bias in the wrong place
                tensor.normal_(std=0.2)
    if family != "SwitchTransformers":
        model.set_experts_implementation("eager")
    return model


def inputs_of(model: nn.Module, sequences: int = 2) -> dict[str, Any]:
    """Return tokens and labels, and ask for the auxiliary loss of models that have one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 61, (sequences, 10), generator=generator)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if hasattr(model.config, "router_aux_loss_coef"):
        inputs["output_router_logits"] = True
    return inputs


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters under their names in transformers."""
    layers = {f"{name}.": layer for name, layer in model.named_modules() if isinstance(layer, RoutedMoE)}
    found = {}
    for name, parameter in model.named_parameters():
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), None)
        if parameter.grad is None:
            continue
        if prefix is None:
            found[name] = parameter.grad
            continue
        layer = layers[prefix]
        tensors = layer.form.write(name.removeprefix(f"{prefix}experts."), parameter.grad, layer.local_experts)
        found |= {prefix + key: value for key, value in tensors.items()}
    return found


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ``|actual - expected| / |expected|`` in 2-norms."""
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))


def _saved_and_loaded(model: Any) -> dict[str, Tensor]:
    """Return the state that transformers loads after ``save_pretrained``."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=torch.float64).state_dict()


def _is_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def compared(family: str) -> dict[str, Any]:
    """Convert a model, and return its row of the table."""
    theirs = tiny(family).train()
    model = fmoe.fmoefy(copy.deepcopy(theirs))
    inputs = inputs_of(theirs)
    outputs = []
    for each in (theirs, model):
        output = each(**inputs)
        output.loss.backward()
        outputs.append((output.logits, output.loss))
    gradients, expected = gradients_of(model), gradients_of(theirs)
    for name in gradients.keys() - expected.keys():  # an expert without tokens, in a module of its own
        expected[name] = torch.zeros_like(gradients[name])
    state, loaded = (_saved_and_loaded(each) for each in (theirs, model))
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedMoE)]
    is_shared = all(layer.form.is_same(name) for layer in layers for name in layer.form.names)
    return {
        "family": f"{type(theirs).__name__}",
        "weights": "shared" if is_shared else "converted",
        "output": max(map(relative_error, outputs[1], outputs[0])),
        "gradients": max(relative_error(gradients[name], value) for name, value in expected.items()),
        "is_same_when_loaded": _is_same(loaded, state),
    }


def spread_all(families: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """Return the rows of `spread`."""
    return [spread(family, f"{folder}/{family}") for family in families]


def spread(family: str, folder: str) -> dict[str, Any]:
    """Train a model whose experts all ranks divide, and return the largest errors of the ranks. Collective.

    Each rank has a sequence. The reference is transformers in one process, one sequence after the other. The spread
    model is saved to ``folder``.
    """
    groups = parallel.init(ep=dist.get_world_size())
    theirs = tiny(family).train()
    model = fmoe.fmoefy(copy.deepcopy(theirs), moe_group=groups.moe_group)
    inputs = inputs_of(theirs, groups.ep)
    outputs = []
    for rank in range(groups.ep):
        mine = {name: value[rank : rank + 1] if torch.is_tensor(value) else value for name, value in inputs.items()}
        output = theirs(**mine)
        (output.loss / groups.ep).backward()
        if rank == dist.get_rank():
            actual = model(**mine)
            actual.loss.backward()
            outputs = [relative_error(actual.logits, output.logits), relative_error(actual.loss, output.loss)]
    parallel.average_gradients(model, groups=groups)
    expected = gradients_of(theirs)
    layers = {f"{name}.": layer for name, layer in model.named_modules() if isinstance(layer, RoutedMoE)}
    gradients = []
    for name, gradient in gradients_of(model).items():
        whole = expected.get(name, torch.zeros_like(gradient))  # None: an expert without tokens
        layer = next((layer for prefix, layer in layers.items() if name.startswith(prefix)), None)
        if layer is not None and not layer.form.is_listed:
            whole = whole[layer.local_experts.start : layer.local_experts.stop]
        if gradient.dtype == torch.float64:  # not the routers of Switch, which compute in float32
            gradients.append(relative_error(gradient, whole))
        elif relative_error(gradient, whole) > 1e-6:
            gradients.append(torch.inf)
    parallel.save_hf(model, folder, groups)
    is_same = True
    if dist.get_rank() == 0:
        loaded = type(theirs).from_pretrained(folder, dtype=torch.float64)
        is_same = _is_same(loaded.state_dict(), _saved_and_loaded(theirs))
    errors = torch.tensor([max(outputs), max(gradients), not is_same], dtype=torch.float64)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    output, gradient, differs = errors.tolist()
    return {"output": output, "gradients": gradient, "is_same_when_loaded": not differs}


def timed(arguments: Any) -> frame.Measurement:
    """Time training steps of a small Qwen3-MoE whose experts run in transformers or, converted, in fmoe."""
    sizes = {
        "hidden_size": arguments.width,
        "moe_intermediate_size": arguments.width // 2,
        "head_dim": arguments.width // 4,
        "num_experts": arguments.experts,
        "num_experts_per_tok": 4,
        "num_hidden_layers": arguments.layers,
        "mlp_only_layers": [],
        "max_position_embeddings": arguments.length,
    }
    tokens = torch.randint(61, (4, arguments.length), generator=torch.Generator().manual_seed(0))
    model = tiny("Qwen3Moe", getattr(torch, arguments.dtype), **sizes).train()
    kept: dict[str, int] = {}

    def setup(name: str) -> Callable[[], None]:
        mine = copy.deepcopy(model)
        if name == "fmoe":
            fmoe.fmoefy(mine)
        else:
            mine.set_experts_implementation(name)
        optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3)
        saved = Kept(mine)
        with saved:
            mine(input_ids=tokens, labels=tokens)
        kept[name] = saved.bytes

        def step() -> None:
            mine(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    names = ("fmoe", "grouped_mm", "eager")
    contenders = [frame.Contender(name, functools.partial(setup, name), tokens.numel()) for name in names]
    label = f"{arguments.layers} layers of {arguments.experts} experts, width {arguments.width}, {arguments.dtype}"
    found = frame.measure(contenders, rounds=arguments.rounds, warmup=2, reference="grouped_mm", label=label)
    return replace(found, facts={name: {"saved": f"{size / 2**20:.3f} MiB"} for name, size in kept.items()})
