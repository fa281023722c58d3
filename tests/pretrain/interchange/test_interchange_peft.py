"""An export that PEFT adapts in transformers: trained, saved, merged, imported, exported again."""

import pytest
import torch
from compare import assert_close
from forks import only
from huggingface_folders import logits, our_logits, save_random, some_tokens, weights

from pretrain.interchange import export_checkpoint, import_folder

peft = pytest.importorskip("peft", reason="peft is not installed")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_adapters_of_an_export(forks, tmp_path, case):
    import transformers

    save_random(tmp_path / "theirs", case)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")

    def load():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=STACKS)
    torch.manual_seed(0)
    model, tokens = peft.get_peft_model(load(), config).train(), some_tokens()
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)

    model.save_pretrained(tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    import_folder(tmp_path / "merged", tmp_path / "tuned")
    export_checkpoint(tmp_path / "tuned", tmp_path / "again")
    with torch.no_grad():
        adapted = model.eval()(input_ids=tokens).logits
    assert_close(adapted, logits(tmp_path / "again", tokens), 1e-5, "logits of the second export")
    assert_close(only(forks.run(1, our_logits, tmp_path / "tuned", tokens)), adapted, 1e-5, "our logits")
    before, after = weights(tmp_path / "merged"), weights(tmp_path / "again")
    assert before.keys() == after.keys() == weights(tmp_path / "out").keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
