"""Out again: transformers and peft go on from what `export_hf` writes."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from diffusion_lens import HookedDiffusionTransformer

TEXT = "The Rhine belongs to the continent of Europe"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads what transformers renames
def test_transformers_and_peft_go_on(smollm, tmp_path):
    folder = smollm.model.export_hf(tmp_path / "exported")
    network, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    given = words(TEXT, return_tensors="pt")
    assert given["input_ids"][0].tolist() == smollm.model.encode(TEXT)
    assert words.chat_template == smollm.words.chat_template
    logits = smollm.model(given["input_ids"])
    with torch.no_grad():
        assert (network(**given).logits - logits).abs().max() < 2e-5 * logits.abs().max()

    adapted = get_peft_model(network, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert 0 < sum(weight.numel() for weight in trained) < 1e6
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = adapted(**given, labels=given["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]


def test_the_twin_goes_on_in_transformers(smollm, tmp_path):
    twin = HookedDiffusionTransformer.from_pretrained("smollm2-135m-mdm", device="cpu")
    canvas = torch.tensor([smollm.model.encode(TEXT) + [twin.cfg.mask_token_id] * 5])
    with pytest.warns(UserWarning, match="sees only itself"):
        network = AutoModelForCausalLM.from_pretrained(twin.export_hf(tmp_path / "twin"))
    logits, mask = twin(canvas), torch.zeros(1, 1, canvas.shape[1], canvas.shape[1])
    mask[:, :, 0, 1:] = -torch.inf
    with torch.no_grad():
        assert (network(canvas, attention_mask=mask).logits - logits).abs().max() < 2e-5 * logits.abs().max()
    again = HookedDiffusionTransformer.from_pretrained(tmp_path / "twin", device="cpu")
    assert torch.equal(again(canvas), logits)
