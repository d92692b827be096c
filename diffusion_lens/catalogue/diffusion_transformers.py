"""Repositories of the diffusion transformers of the literature: MDLM, BD3LM, SEDD and RADD, trained on OpenWebText, and
UDLM, trained on LM1B.

Their texts are those of GPT-2's tokenizer, UDLM's those of "bert-base-uncased". Most of the repositories do not contain
a tokenizer.
"""

from typing import Any

from diffusion_lens.catalogue.entries import Repository

MDLM: dict[str, Any] = {
    "model_type": "mdlm",
    "hidden_dim": 768,
    "n_blocks": 12,
    "n_heads": 12,
    "cond_dim": 128,
    "model_length": 1024,
    "vocab_size": 50258,
    "time_conditioning": False,
}

DIFFUSION_TRANSFORMERS = (
    Repository("mdlm-owt", "kuleshov-group/mdlm-owt", "config seen", MDLM, weight_bytes=4),
    Repository(
        "mdlm-no_flashattn-fp32-owt",
        "kuleshov-group/mdlm-no_flashattn-fp32-owt",
        "config seen",
        MDLM,
        weight_bytes=4,
    ),
    Repository("mdlm-owt-noeos", "kuleshov-group/mdlm-owt-noeos", "name seen"),
    *(
        Repository(
            f"bd3lm-owt-block_size{size}",
            f"kuleshov-group/bd3lm-owt-block_size{size}",
            "config seen",
            {**MDLM, "model_type": "bd3lm", "block_size": size},
            weight_bytes=4,
        )
        for size in (4, 8, 16)
    ),
    Repository(
        "udlm-lm1b",
        "kuleshov-group/udlm-lm1b",
        "name seen",
        {**MDLM, "model_type": "udlm", "model_length": 128, "vocab_size": 30522, "time_conditioning": True},
        weight_bytes=4,
    ),
    Repository("sedd-small", "louaaron/sedd-small", "name seen", family="sedd"),
    Repository("sedd-medium", "louaaron/sedd-medium", "name seen", family="sedd"),
    Repository("radd-lambda-dce", "JingyangOu/radd-lambda-dce", "name seen", family="radd"),
    Repository("radd-t-dce", "JingyangOu/radd-t-dce", "name seen", family="radd"),
    Repository("radd-lambda-dce-medium", "JingyangOu/radd-lambda-dce-medium", "name seen", family="radd"),
    Repository("radd-t-dce-medium", "JingyangOu/radd-t-dce-medium", "name seen", family="radd"),
)
