"""The model card of an export has what the run recorded, and nothing else."""

import json
import math
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from fmoe.errors import UserError
from pretrain.config import DataConfig, ModelConfig, MoEConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from pretrain.interchange.card import check_license, model_card

CONFIG = {"architectures": ["MixtralForCausalLM"]}


def table(card, title):
    """Rows of a section's table by their first cell."""
    section = card.split(f"## {title}\n", 1)[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:2] == "| "
    ]
    return {cells[0]: cells[1:] for cells in rows}


@pytest.fixture
def trained(tmp_path):
    """A recipe and a checkpoint of step 20 of 30, in the folder of its run."""
    train, validation = tmp_path / "web", tmp_path / "held|out"
    datasets = [
        {"name": "owner/set", "config": "en", "split": "train", "revision": "0a1b"},
        {"name": "folder", "config": None, "split": "train", "revision": None},
    ]
    facts = {"documents": 12, "tokens": 34567, "sha256": {"bin": "aa"}, "mixture": {"datasets": datasets}}
    train.with_suffix(".json").write_text(json.dumps(facts | {"sources": ["owner/set, split train, folder"]}))
    facts = {"documents": 1, "tokens": 890, "sha256": {"bin": "other than in the run"}, "sources": ["/home/me/b.txt"]}
    validation.with_suffix(".json").write_text(json.dumps(facts))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    info = {"data": {"validation": ["bb"]}, "device": "cpu", "versions": {"torch": "2.99"}}
    (run / "run.json").write_text(json.dumps(info))
    rows = [{"step": 0, "val/loss": 9.0}]
    for step in range(1, 31):
        routing = {"moe/entropy": 1.0, "moe/layer_2/entropy": step / 10, "moe/layer_2/load_cv": 0.5}
        rows.append({"step": step, "loss": 5 - step / 10, "moe/layer_2/drop_rate": None} | routing)
    rows[20] |= {"val/loss": 3.5, "eval/local/acc": 0.25}
    rows[30] |= {"val/loss": 2.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(
        model=ModelConfig(moe=MoEConfig(num_experts=4, top_k=2, granularity=2, layers=(2,))),
        data=DataConfig(train=(str(train),), validation=(str(validation),)),
        parallel=ParallelConfig(expert=2),
        optimizer=OptimizerConfig(name="lamb", lr=1e-3, lr_scaling="linear", base_batch=8),
        train=TrainConfig(steps=30, global_batch=16, init_from=str(tmp_path / "earlier")),
    )
    state = {"data": {"corpora": ["aa"]}}
    return recipe, SimpleNamespace(path=run / "checkpoints" / "step-00000020", step=20, state=state)


def test_it_has_what_the_run_recorded(trained, tmp_path):
    recipe, checkpoint = trained
    card = model_card(checkpoint, recipe, CONFIG, "owner/model", license="apache-2.0")
    front = ModelCard(card).data.to_dict()
    assert front["license"] == "apache-2.0" and front["datasets"] == ["owner/set"]
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert "moe" in front["tags"] and "language" not in front
    assert 'AutoModelForCausalLM.from_pretrained("owner/model")' in card
    architecture = table(card, "Architecture")
    assert architecture["parameters"] == [f"{recipe.num_params():,}"]
    assert architecture["active parameters per token"] == [f"{recipe.num_active_params():,}"]
    assert architecture["routed experts per layer"] == ["8"] and architecture["experts per token"] == ["4"]
    training = table(card, "Training")
    assert training["steps"] == ["20 of 30"] and training["tokens"] == [f"{20 * 16 * 256:,}"]
    assert training["learning rate"][0].startswith("0.002, cosine") and training["initial weights"] == ["earlier"]
    assert training["ranks"][0].startswith("2 ") and training["device"] == ["cpu"]
    # The validation corpus has changed since the run.
    data = table(card, "Data")
    assert data["web"] == ["training", "12", "34,567", "owner/set, en, train, folder, train"]
    assert data["held\\|out"][0] == "validation" and not any(data["held\\|out"][1:])
    metrics = table(card, "Metrics")
    assert metrics["training loss (nats per token)"] == ["3.0000"]
    assert metrics["validation loss (nats per token)"] == ["3.5000"]
    assert metrics["validation perplexity"] == [f"{math.exp(3.5):.4g}"] and metrics["eval/local/acc"] == ["0.25"]
    assert table(card, "Routing")["2"] == ["1.05", "0.5", ""]  # the mean of 0.1 to 2.0
    assert table(card, "Versions")["torch"] == ["2.99"]
    assert str(tmp_path) not in card and "/home" not in card


def test_what_is_unknown_is_left_out(trained, tmp_path):
    recipe, checkpoint = trained
    checkpoint.path = tmp_path / "step-00000020"
    checkpoint.state = {"weights_only": True}
    config = CONFIG | {"auto_map": {}}
    card = model_card(checkpoint, recipe, config, "mine", has_tokenizer=False)
    assert 'from_pretrained("mine", trust_remote_code=True)' in card and "AutoTokenizer" not in card
    assert not {"license", "datasets"} & ModelCard(card).data.to_dict().keys()
    for title in ("Data", "Metrics", "Routing", "Versions"):
        assert f"## {title}" not in card


@pytest.mark.parametrize("license", ["MIT", "", "a b", "a\nb", "-a"])
def test_a_license_is_an_identifier_of_the_hub(license):
    with pytest.raises(UserError, match="--license"):
        check_license(license)
