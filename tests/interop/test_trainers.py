"""The examples of other libraries' training loops equal a plain loop of torch: losses and parameters, with balance
losses that are added to the loss by hand."""

import functools
import importlib.util
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import assert_close, relative_error
from forks import values
from torch.nn import functional as F

import fmoe

EXAMPLES = Path(__file__).parents[2] / "examples"
WEIGHTS = {"balance": 0.3, "z": 0.1}  # large, so that losses applied twice or in half are seen
ROWS, MICRO, LR = 20, 4, 0.1
TRAINER = {"optim": "sgd", "learning_rate": LR, "num_train_epochs": 2, "max_steps": -1, "logging_steps": 1}
TRAINER |= {"train_sampling_strategy": "sequential", "use_cpu": True, "max_grad_norm": 0}


def example(name, *libraries):
    for library in libraries:
        pytest.importorskip(library, reason=f"{library} is not installed")
    return load(name)


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_trainer_loop(hf_trainer):
    """Losses and parameters of `TRAINER`: sequences in order, two micro batches a step; the fifth is a step alone."""
    model = hf_trainer.make_model(loss_weights=WEIGHTS, aux_loss="manual").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    rows = torch.stack([row["input_ids"] for row in hf_trainer.make_data()[:ROWS]])
    losses = []
    for _ in range(2):
        for step in rows.split(2 * MICRO):
            micros = step.split(MICRO)
            total = 0.0
            for x in micros:
                loss = F.cross_entropy(model(input_ids=x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
                ((loss + fmoe.collect_losses(model)) / len(micros)).backward()
                total += loss.item() / len(micros)
            losses.append(total)
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def assert_same(trainer_losses, losses, parameters, expected):
    assert_close(torch.tensor(trainer_losses), torch.tensor(losses), 1e-5, "losses")
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert_close(parameter, expected[name], 1e-5, name)


def run_trainer(hf_trainer, size=1):
    model = hf_trainer.make_model(loss_weights=WEIGHTS)
    return hf_trainer.main(model, hf_trainer.make_data()[:ROWS], per_device_train_batch_size=MICRO // size, **TRAINER)


def test_trainer_equals_a_plain_loop():
    hf_trainer = example("hf_trainer", "transformers", "accelerate")
    losses, expected = plain_trainer_loop(hf_trainer)
    trainer = run_trainer(hf_trainer)
    logs = trainer.state.log_history[:-1]
    assert_same([log["loss"] for log in logs], losses, dict(trainer.model.named_parameters()), expected)
    assert fmoe.auxiliary.loss_scale() == 1
    for log in logs:
        assert {f"model.layers.{i}.mlp/{key}" for i in (0, 1) for key in ("load_cv", "balance", "z")} <= log.keys()


def test_trainer_multiplies_balance_losses_by_the_loss_scale_of_fp16():
    hf_trainer = example("hf_trainer", "transformers", "accelerate")
    gradients = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        arguments = hf_trainer.TrainingArguments(use_cpu=True, report_to=[])
        trainer = hf_trainer.MoETrainer(hf_trainer.make_model(loss_weights=WEIGHTS), arguments)
        trainer.accelerator.scaler, trainer.current_gradient_accumulation_steps = scaler, 4
        trainer.create_optimizer()
        rows = torch.stack([row["input_ids"] for row in hf_trainer.make_data()[:2]])
        trainer.training_step(trainer.model, {"input_ids": rows, "labels": rows})
        gradients.append(trainer.model.model.layers[0].mlp.gate.weight.grad)
    assert_close(gradients[1], 1024 * gradients[0], 1e-5, "gradient of a router")


def set_environment():
    """As torchrun does, for libraries that look there; the process group exists already."""
    os.environ |= {name: str(dist.get_rank()) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def trainer_on_a_rank():
    set_environment()
    trainer = run_trainer(load("hf_trainer"), dist.get_world_size())
    parameters = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return type(trainer.model_wrapped).__name__, trainer.state.log_history[:-1], parameters


@pytest.mark.slow
def test_trainer_on_two_processes_equals_a_plain_loop(forks):
    hf_trainer = example("hf_trainer", "transformers", "accelerate")
    losses, expected = plain_trainer_loop(hf_trainer)
    for wrapper, logs, parameters in values(forks.run(2, trainer_on_a_rank)):
        assert wrapper == "DistributedDataParallel"
        assert_same([log["loss"] for log in logs], losses, parameters, expected)


def spread_trainer_on_a_rank():
    set_environment()
    hf_trainer = load("hf_trainer")
    hf_trainer.main(hf_trainer.make_model(moe_group=dist.group.WORLD), hf_trainer.make_data()[:ROWS], **TRAINER)


@pytest.mark.slow
def test_trainer_with_spread_experts_is_refused(forks):
    """Trainer wraps every model in torch's DDP."""
    example("hf_trainer", "transformers", "accelerate")
    for result in forks.run(2, spread_trainer_on_a_rank):
        assert result.kind is fmoe.UserError and "DistributedDataParallel" in result.message


@pytest.mark.slow
def test_trainer_resumes_from_its_checkpoint(tmp_path):
    hf_trainer = example("hf_trainer", "transformers", "accelerate")
    data = hf_trainer.make_data()[:ROWS]
    options = TRAINER | {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options |= {"optim": "adamw_torch", "per_device_train_batch_size": MICRO}
    whole = hf_trainer.main(hf_trainer.make_model(), data, **options).model.state_dict()
    other = hf_trainer.make_model()
    torch.nn.init.zeros_(other.model.layers[0].mlp.experts.weight_in)
    options["resume_from_checkpoint"] = str(tmp_path / "checkpoint-2")
    resumed = hf_trainer.main(other, data, **options).model.state_dict()
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[name], whole[name]) for name in whole)


PARALLEL = {"train_sampling_strategy": "sequential", "max_steps": 4, "logging_steps": 1}
PARALLEL |= {"save_strategy": "steps", "save_steps": 2}


def plain_parallel_loop(model, rows, batch):
    """Losses, norms and parameters of a model of an example, in a plain loop in one process."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    logs = []
    for step in rows.split(batch)[: PARALLEL["max_steps"]]:
        loss = model(input_ids=step, labels=step).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        logs.append((loss.item(), norm.item()))
    return logs, model.state_dict()


def assert_saved(folder, state):
    """The folder has, for plain transformers, these parameters after four steps of Adam."""
    transformers = pytest.importorskip("transformers")
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for key, value in state.items():
        assert_close(saved[key], value, 2e-2, key)  # Adam turns rounding of tiny gradients into whole steps


def parallel_trainer_on_a_rank(folder, checkpoint=None):
    set_environment()
    trainer = load("parallel_trainer").main(output_dir=folder, resume_from_checkpoint=checkpoint, **PARALLEL)
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history[:-1]]


@pytest.mark.slow
def test_trainer_of_a_split_model_equals_a_plain_loop(forks, tmp_path):
    parallel_trainer = example("parallel_trainer", "transformers", "accelerate")
    rows = torch.stack([row["input_ids"] for row in parallel_trainer.make_data()])
    expected, state = plain_parallel_loop(parallel_trainer.make_model(), rows, parallel_trainer.BATCH)
    runs = [
        (2, "two", None),
        (1, "one", None),
        (2, "two again", "one/checkpoint-2"),
        (1, "one again", "two/checkpoint-2"),
    ]
    for size, name, checkpoint in runs:
        start = None if checkpoint is None else str(tmp_path / checkpoint)
        for logs in values(forks.run(size, parallel_trainer_on_a_rank, str(tmp_path / name), start)):
            assert_close(torch.tensor(logs), torch.tensor(expected), 1e-5, "losses and norms")
        assert_saved(tmp_path / name / "checkpoint-4", state)


def lightning_parallel_on_a_rank(folder):
    set_environment()
    return load("lightning_parallel").main(folder, accelerator="cpu", max_steps=PARALLEL["max_steps"]).logs


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_lightning_of_a_split_model_equals_a_plain_loop(forks, size, tmp_path):
    lightning_parallel = example("lightning_parallel", "transformers", "lightning")
    rows = lightning_parallel.make_data()
    expected, state = plain_parallel_loop(lightning_parallel.make_model(), rows, lightning_parallel.BATCH)
    for logs in values(forks.run(size, lightning_parallel_on_a_rank, str(tmp_path / "saved"))):
        assert_close(torch.tensor(logs), torch.tensor(expected), 1e-5, "losses and norms")
    assert_saved(tmp_path / "saved", state)


def sft_on_a_rank(folder):
    """Losses and norms of TRL's own trainer without a folder, else of the example, which saves the model there."""
    set_environment()
    sft_trainer = load("sft_trainer")
    options = {"max_steps": 4, "logging_steps": 1}
    if folder is None:
        trainer = sft_trainer.train(sft_trainer.SFTTrainer, sft_trainer.make_model(), **options)
    else:
        trainer = sft_trainer.main(**options)
        trainer.save_model(folder)
    logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history[:-1]]
    return logs, None if folder else trainer.model.state_dict()


@pytest.mark.slow
def test_sft_of_a_split_model_equals_trl_in_one_process(forks, tmp_path):
    for library in ("transformers", "trl"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    ((expected, state),) = values(forks.run(1, sft_on_a_rank, None))
    for logs, _ in values(forks.run(2, sft_on_a_rank, str(tmp_path / "saved"))):
        assert_close(torch.tensor(logs), torch.tensor(expected), 1e-5, "losses and norms")
    assert_saved(tmp_path / "saved", state)


def plain_accelerate_loop(accelerate_loop):
    """Losses of the example without Accelerate, experts in one process."""
    model = accelerate_loop.make_model(aux_loss="manual")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in accelerate_loop.make_data().split(accelerate_loop.BATCH):
        tokens, words = step.unbind(1)
        loss = F.cross_entropy(model(tokens).transpose(1, 2), words)
        (loss + fmoe.collect_losses(model)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def accelerate_on_a_rank():
    set_environment()
    return load("accelerate_loop").main()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_accelerate_with_spread_experts_equals_a_plain_loop(forks, size):
    expected = plain_accelerate_loop(example("accelerate_loop", "accelerate"))
    for losses in values(forks.run(size, accelerate_on_a_rank)):
        assert relative_error(torch.tensor(losses), expected) < 1e-4


def plain_lightning_loop(lightning_module, size=1):
    """Losses and parameters of the example without Lightning: five batches for each process, two in a step."""
    torch.manual_seed(0)
    model = lightning_module.Model()
    for layer in model.modules():
        if isinstance(layer, fmoe.MoE):
            layer.aux.is_manual = True
    optimizer, losses = model.configure_optimizers(), []
    batches = lightning_module.make_data(5 * size * lightning_module.BATCH).split(size * lightning_module.BATCH)
    for index, batch in enumerate(batches):
        tokens, words = batch.unbind(1)
        loss = F.cross_entropy(model.model(tokens).transpose(1, 2), words)
        ((loss + fmoe.collect_losses(model)) / 2).backward()
        losses.append(loss.item())
        if index % 2 or index == len(batches) - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def test_lightning_equals_a_plain_loop():
    lightning_module = example("lightning_module", "lightning")
    losses, expected = plain_lightning_loop(lightning_module)
    found = lightning_module.main(lightning_module.make_data(5 * lightning_module.BATCH), accelerator="cpu")
    assert_same(found.losses, losses, dict(found.named_parameters()), expected)
    assert fmoe.auxiliary.loss_scale() == 1


def with_sgd(lightning_module):
    """AdamW would move biases of attention keys, whose gradients are zero up to rounding, by rounding errors."""
    lightning_module.Model.configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=LR)
    return lightning_module


def lightning_on_a_rank():
    set_environment()
    lightning_module, size = with_sgd(load("lightning_module")), dist.get_world_size()
    data = lightning_module.make_data(5 * size * lightning_module.BATCH)[dist.get_rank() :: size]
    options = {"accelerator": "cpu", "devices": size, "strategy": "ddp", "use_distributed_sampler": False}
    model = lightning_module.main(data, **options)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_lightning_on_two_processes_equals_a_plain_loop(forks):
    _, expected = plain_lightning_loop(with_sgd(example("lightning_module", "lightning")), 2)
    for parameters in values(forks.run(2, lightning_on_a_rank)):
        assert_same([], [], parameters, expected)


def small_vit():
    import transformers

    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_attention_heads=2, **sizes))


def small_mixtral():
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, **sizes)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("build", [small_vit, small_mixtral])
def test_trainer_resumes_models_that_keep_their_names(tmp_path, build):
    """`save_original_format=False`, as docs/interop.md says: otherwise transformers renames weights of these models."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(32, (6,), generator=generator)} for _ in range(8)]
    data = [{**row, "labels": row["input_ids"]} for row in data]
    if build is small_vit:
        data = [{"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": i % 2} for i in range(8)]

    def train(is_zero=False, **options):
        model = build()
        if build is small_vit:
            fmoe.fmoefy(model, num_experts=4, top_k=2, seed=0)
        model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, save_steps=1, report_to=[], use_cpu=True, learning_rate=0.01
        )
        for parameter in model.parameters() if is_zero else ():
            torch.nn.init.zeros_(parameter)
        transformers.Trainer(model, arguments, train_dataset=data).train(**options)
        return model.state_dict()

    whole = train()
    resumed = train(is_zero=True, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("name", ["ViT", "GPT-2"])
def test_saved_weights_of_a_converted_model_load_again(tmp_path, name):
    """As docs/fmoefy.md says: ViT's weights would be renamed, and GPT-2's output weight is not saved."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32)
    builds = {"ViT": small_vit, "GPT-2": lambda: transformers.GPT2LMHeadModel(config)}
    model = fmoe.fmoefy(builds[name](), num_experts=4, top_k=2, seed=0, noise=0.1)
    model.save_pretrained(tmp_path, save_original_format=False)
    again = fmoe.fmoefy(builds[name](), num_experts=4, top_k=2, upcycle=False)
    safetensors.load_model(again, tmp_path / "model.safetensors")
    loaded = again.state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items())
