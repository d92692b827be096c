"""peft reads the folder of a delta, onto the model of transformers that is its base, and writes one that we read."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.loading.delta import Base, Delta, LowRank, base_sha256


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("with_row", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_peft_computes_what_the_delta_does(
    with_row: bool, family: str, specimen: Any, configs: Any, tmp_path: Any
) -> None:
    folder = specimen(configs[family]).model.export_hf(tmp_path / "base")
    model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    generator = torch.Generator().manual_seed(0)
    factors = {
        name: LowRank(
            torch.randn(3, weight.shape[1], generator=generator), torch.randn(len(weight), 3, generator=generator) / 9
        )
        for name, weight in model.named_parameters()
        if name.startswith("blocks.") and weight.dim() == 2
    }
    base = Base(str(folder), base_sha256(model.named_parameters(), model.cfg.d_vocab), model.cfg.d_vocab)
    row = torch.randn(model.cfg.d_model, generator=generator) if with_row else None
    architecture = replace(model.cfg.architecture, name="a causal delta", mask_token_id=77 if with_row else None)
    delta = Delta(factors, architecture, base, alpha=6.0, mask_row=row)
    peft_model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), str(delta.save(tmp_path / "d"))
    )
    tokens = torch.randint(500, (2, 9), generator=generator)
    tokens[:, 4] = 77
    with torch.no_grad(), delta.on(model):
        ours = model(tokens)
        assert torch.allclose(peft_model(tokens).logits, ours, atol=1e-3, rtol=1e-4)
    peft_model.save_pretrained(tmp_path / "d")
    again = Delta.load(tmp_path / "d")
    assert again.sha256 == delta.sha256
