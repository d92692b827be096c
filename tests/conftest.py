"""Fixtures. jaxtyping and beartype check every annotation of the package while the tests run."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
gc.disable()  # until all tests are collected: what modules leave behind when they are imported is not garbage

from figures import blank_figures
from type_checks import begin_test, check_package

check_package("diffusion_lens")

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import typer.testing
from safetensors.torch import load_file
from small_networks import diffusion_gemma

# Without this every invocation of the command line would build all of its commands again.
typer.testing._get_command = cache(typer.testing._get_command)

# Two workers share the machine, and the models are small: more threads only wait for one another.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"
LIT_GPT = [(variant, kind) for variant in ("gqa", "mha") for kind in ("mdm", "ar")]


def hugging_face(model_type: str, **more: Any) -> dict[str, Any]:
    """A small config in the words of Llama's descendants: grouped heads, wider together than the stream."""
    masked = {"mask_token_id": 512} if model_type.startswith(("a2d-", "Dream")) else {}
    not_by_blocks = {"block_size": None} if model_type.startswith("a2d-") else {}
    return {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 512 + len(masked),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        **masked,
        **not_by_blocks,
        **more,
    }


def scaled_by_yarn(**more: Any) -> dict[str, Any]:
    """Frequencies and queries are scaled, the queries from position 6 on."""
    config = hugging_face("nemotron_labs_diffusion", **more)
    numbers = {
        "factor": 4.0,
        "original_max_position_embeddings": 6,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    return {**config, "rope_parameters": {"rope_type": "yarn", "rope_theta": config.pop("rope_theta"), **numbers}}


def mixture_of_experts(**more: Any) -> dict[str, Any]:
    """A small config with four experts, two of them chosen, in the second of three layers."""
    return {
        "model_type": "llada",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "moe_layer_freq": [0, 1, 0],
        "dense_intermediate_size": 40,
        "expert_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "qk_layernorm": True,
        "vocab_size": 513,
        "max_position_embeddings": 128,
        "mask_token_id": 512,
        "rope_theta": 50000.0,
        **more,
    }


def experts_by_blocks(**more: Any) -> dict[str, Any]:
    """A small config of LLaDA2: eight experts in four groups, in the last of three layers."""
    return {
        "model_type": "llada2_moe",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "vocab_size": 513,
        "max_position_embeddings": 128,
        "mask_token_id": 512,
        "block_size": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 600000.0,
        **more,
    }


def diffusion_transformer(model_type: str, **more: Any) -> dict[str, Any]:
    """A small config of the diffusion transformers in the form of Hugging Face."""
    return {
        "model_type": model_type,
        "hidden_dim": 32,
        "n_blocks": 3,
        "n_heads": 4,
        "cond_dim": 8,
        "vocab_size": 513,
        "model_length": 128,
        **more,
    }


def score_network(graph: str, noise: str, **more: Any) -> dict[str, Any]:
    """A small config of SEDD."""
    network = {"hidden_size": 32, "cond_dim": 8, "n_blocks": 3, "n_heads": 4, "length": 128}
    return {
        "tokens": 512,
        "graph": {"type": graph},
        "noise": {"type": noise, **more},
        "model": {"type": "ddit", "scale_by_sigma": graph == "absorb", **network},
    }


def uniform_noise(**more: Any) -> dict[str, Any]:
    """A small model under uniform noise, which has no [MASK]: its canvases hold tokens only."""
    sizes = {
        "n_layers": 3,
        "d_model": 32,
        "n_heads": 4,
        "n_key_value_heads": 2,
        "d_head": 12,
        "d_mlp": 48,
        "n_ctx": 128,
    }
    kind = {"attention_dir": "bidirectional", "readout": "in_place", "mask_token_id": None}
    names = {"family": "diffusion_lens", "name": "uniform"}
    return {**names, **sizes, "d_vocab": 512, "d_vocab_out": 512, **kind, **more}


QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CONFIGS = {
    "llada": {
        "model_type": "llada",
        "d_model": 32,
        "mlp_hidden_size": 48,
        "n_layers": 3,
        "n_heads": 4,
        "vocab_size": 513,
        "max_sequence_length": 128,
        "mask_token_id": 512,
        "rope_theta": 500000.0,
    },
    "llada_moe": mixture_of_experts(),
    "llada_moe-options": mixture_of_experts(
        shared_expert_intermediate_size=16, moe_router_enable_expert_bias=True, clip_qkv=1.5, partial_rotary_factor=0.5
    ),
    "llada2": experts_by_blocks(),
    "llada2-unshared": experts_by_blocks(num_shared_experts=0),
    "dream": hugging_face("Dream", rope_theta=1e6),
    "llama": hugging_face("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "qwen2": hugging_face("qwen2", tie_word_embeddings=True),
    "qwen3": hugging_face("qwen3", head_dim=16, attention_bias=True),
    "a2d-llama": hugging_face("a2d-llama"),
    "a2d-qwen2": hugging_face("a2d-qwen2", tie_word_embeddings=True),
    "a2d-qwen3": hugging_face("a2d-qwen3", head_dim=16),
    "sdar": hugging_face("sdar", mask_token_id=512, vocab_size=513, block_size=4, attention_bias=True, mode="block"),
    "fast_dllm": hugging_face("Fast_dLLM_Qwen", mask_token_id=512, vocab_size=513, bd_size=4),
    "stable_diffcoder": hugging_face(
        "llama", architectures=["StableDiffcoderForCausalLM"], mask_token_id=5, vocab_size=512, block_size=4
    ),
    "rnd1": hugging_face("rnd1", mask_token_id=512, vocab_size=513, **QWEN_EXPERTS),
    "sdar_moe": hugging_face("sdar_moe", mask_token_id=512, vocab_size=513, block_size=4, **QWEN_EXPERTS),
    "diffullama": hugging_face("llama", mode="bidirectional", mask_token_id=512, vocab_size=513),
    "twin": hugging_face("llama", mode="bidirectional", mask_token_id=512, vocab_size=513, causal_first=True),
    "nemotron": scaled_by_yarn(dlm_paradigm="bidirectional", mask_token_id=512, vocab_size=513),
    "nemotron-ar": scaled_by_yarn(dlm_paradigm="autoregressive"),
    "nemotron-block": scaled_by_yarn(dlm_paradigm="block_diff", block_size=4, mask_token_id=512, vocab_size=513),
    "nemotron-prompt": scaled_by_yarn(
        dlm_paradigm="block_diff", block_size=4, mask_token_id=512, vocab_size=513, causal_context=False
    ),
}
DIFFUSION_TRANSFORMERS = {
    "mdlm": diffusion_transformer("mdlm"),
    "bd3lm": diffusion_transformer("bd3lm", block_size=4, time_conditioning=True),
    "udlm": diffusion_transformer("udlm", vocab_size=512),
    "duo": diffusion_transformer("duo", vocab_size=512, causal=False),
    "sedd": score_network("absorb", "loglinear"),
    "sedd-uniform": score_network("uniform", "geometric", sigma_min=1e-4, sigma_max=20.0),
    "radd": {
        "tokens": 512,
        "model": {"type": "ddit_wot", "hidden_size": 32, "n_blocks": 3, "n_heads": 4, "length": 128},
    },
}
# Networks with a part for images, of which ours is the text network.
WITH_IMAGES = {"diffusion_gemma": diffusion_gemma()}
# Architectures that no published family has.
NATIVE = {"uniform": uniform_noise()}
# Between them: both directions, both readouts, every bias, norms of heads, clipped projections, tied and untied heads,
# queries scaled by their position, experts with and without groups and a shared one, attention by blocks to each kind
# of context, a first token that sees only itself, LayerNorms, plain MLPs, networks with time conditioning, log scores,
# and uniform noise.
UNDER_LAW = (
    *("lit_gpt-mdm", "dream", "llama", "qwen2", "nemotron-block", "nemotron-prompt", "fast_dllm", "llada_moe-options"),
    *("llada2", "mdlm", "bd3lm", "sedd", "radd", "uniform", "udlm", "sedd-uniform", "diffusion_gemma", "twin"),
)
START = 4  # of the open block of a model whose tokens do not show it, outside the loop
TIME = 0.6  # which a time-conditioned network hears outside the loop


class OneModel:
    """A small model for tests."""

    model: Any

    @property
    def dense_layers(self) -> list[int]:
        """The layers with one MLP."""
        experts = self.model.cfg.experts
        return [i for i in range(self.model.cfg.n_layers) if experts is None or not experts.layers[i]]

    @property
    def has_shared_expert(self) -> bool:
        """Whether some block has an expert that reads every token, beside those that a router chooses."""
        experts = self.model.cfg.experts
        return experts is not None and bool(experts.d_shared)

    def tell(self, other: Any) -> Any:
        """Another model, such as a copy, at the time of this one."""
        other.clock.time, other.clock.origins = self.model.clock.time, self.model.clock.origins
        return other


class Golden(OneModel):
    """One golden checkpoint: the authors' numbers beside the model loaded from its file."""

    def __init__(self, variant: str, kind: str) -> None:
        from diffusion_lens import HookedDiffusionTransformer

        self.folder = GOLDEN / "lit_gpt" / variant / kind
        self.kind = kind
        self.checkpoint = self.folder / "model.safetensors"
        self.config = self.folder / "lit_config.json"
        self.model = HookedDiffusionTransformer.from_pretrained(self.checkpoint, config=self.config, device="cpu")

    @property
    def tokens(self) -> torch.Tensor:
        """Three rows of 17."""
        return self.tensors("forward")["tokens"]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    def cases(self, name: str) -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = json.loads((self.folder / f"{name}.json").read_text())
        return cases


class Specimen(OneModel):
    """A small random model, as a family's config or a native architecture describes it."""

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
        from weight_conversion import Architecture
        from weight_conversion.registry import recognise

        if config.get("family") == "diffusion_lens":
            architecture = Architecture.from_dict(config)
        else:
            architecture = recognise(config, {}, "the config").read_architecture(config, {})
        cfg = DiffusionConfig.from_architecture(architecture, device="cpu")
        self.kind = {"absorbing": "mdm", "uniform": "uniform", None: "ar"}[architecture.noise]
        self.model = HookedDiffusionTransformer(cfg, tensors=lively_tensors(architecture, seed))
        self.tokens = torch.randint(500, (3, 17), generator=torch.Generator().manual_seed(seed))
        # As inside `model.at_time(TIME)`, but for all tests that share the model.
        self.model.clock.time = TIME if self.model.cfg.time_conditioning else None
        # Likewise as inside `model.at_block(START)`.
        self.model.clock.origins = torch.tensor([START]) if self.model.cfg.self_conditioning else None


def lively_tensors(architecture: Any, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Weights under which attention is far from uniform, and every bias and every norm is felt."""
    from weight_conversion import tensor_shapes

    generator = torch.Generator().manual_seed(seed)
    tensors = []
    # Scores under uniform noise that are far below their mean stand for no probability at all.
    mild = architecture.head == "log_scores" and architecture.noise == "uniform"
    for name, shape in tensor_shapes(architecture).items():
        drawn = torch.randn(shape, generator=generator) * (0.1 if mild and name.startswith("unembed") else 1.0)
        if name.endswith("router.bias"):
            tensors.append((name, 0.05 * drawn))
        elif len(shape) == 1:
            tensors.append((name, 0.3 * drawn if name.endswith(".bias") else 1 + 0.3 * drawn))
        else:
            tensors.append((name, drawn * (0.35 if name == "embed.weight" else 1.5 / shape[1] ** 0.5)))
    return tensors


@cache
def built(family: str) -> Any:
    """The small model of a family, built once for all fixtures that give it."""
    if family.startswith("lit_gpt-"):
        return Golden("gqa", family.removeprefix("lit_gpt-"))
    return Specimen({**CONFIGS, **DIFFUSION_TRANSFORMERS, **WITH_IMAGES, **NATIVE}[family])


@pytest.fixture(scope="session", params=UNDER_LAW)
def every(request: pytest.FixtureRequest) -> Any:
    """One small model a family: for laws that hold whatever the family."""
    return built(request.param)


@pytest.fixture(scope="session", params=[name for name in UNDER_LAW if name != "diffusion_gemma"])
def summed(request: pytest.FixtureRequest) -> Any:
    """Those whose stream is the sum of what their parts write, with an MLP of its own in some layer: for laws of sums,
    of keys and values of an MLP, and of pairs of canvases. DiffusionGemma refuses what they are about
    (`test_what_it_cannot_do_is_said`)."""
    return built(request.param)


@pytest.fixture(scope="session", params=["llada_moe-options", "dream", "llama", "bd3lm", "uniform"])
def several(request: pytest.FixtureRequest) -> Any:
    """Models that predict in place (with experts), shifted by one position, causally, by blocks (conditioned on
    the time), and under uniform noise: for laws that depend on no other property of a family."""
    return built(request.param)


@pytest.fixture(params=CONFIGS)
def family_config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A small config of each family that has a config.json."""
    return dict(CONFIGS[request.param])


@pytest.fixture
def annotations_unchecked() -> Iterator[None]:
    """As for users: the refusals are the package's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def configs() -> dict[str, dict[str, Any]]:
    """All of them by name."""
    return {name: dict(config) for name, config in {**CONFIGS, **DIFFUSION_TRANSFORMERS}.items()}


@pytest.fixture(scope="session")
def specimen() -> type[Specimen]:
    """To build a random model from a config."""
    return Specimen


@pytest.fixture(scope="session", params=["llada", "dream", "llama", "qwen3"])
def own_pad(request: pytest.FixtureRequest) -> Any:
    """A model of each readout and direction whose tokenizer has a padding token that is nothing else."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<unk>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, 512)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )
    model = Specimen(CONFIGS[request.param]).model
    model.set_tokenizer(tokenizer)
    assert model.padding.own_id == 2
    return model


@pytest.fixture(scope="session", params=LIT_GPT, ids=lambda pair: "-".join(pair))
def golden(request: pytest.FixtureRequest) -> Golden:
    """Every golden lit-gpt checkpoint in turn."""
    return Golden(*request.param)


@pytest.fixture(scope="session", params=["mdm", "ar"])
def either(request: pytest.FixtureRequest) -> Golden:
    """Both variants with grouped heads: for laws that hold whatever the numbers."""
    return built(f"lit_gpt-{request.param}")


@pytest.fixture(scope="session", params=["tiny-mdm", "tiny-ar"])
def tiny(request: pytest.FixtureRequest) -> Any:
    """Both bundled models in turn."""
    return bundled_model(request.param)


@cache
def bundled_model(name: str) -> Any:
    """A bundled model, loaded once in a process: pytest sets a fixture up again whenever its parameter changes."""
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained(name, device="cpu")


@pytest.fixture(scope="session", params=["mdm", "ar"])
def small(request: pytest.FixtureRequest) -> Any:
    """Small random models that read the bundled models' words: for laws of texts that need nothing learnt."""
    return small_model(request.param)


@cache
def small_model(kind: str) -> Any:
    """As a bundled model, with two layers of width 32 and random weights."""
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
    from weight_conversion import Architecture

    bundled = bundled_model("tiny-ar" if kind == "uniform" else f"tiny-{kind}")
    same = ("family", "n_ctx", "d_vocab", "d_vocab_out", "attention_dir", "readout", "mask_token_id")
    sizes = dict(n_layers=2, d_model=32, n_heads=4, n_key_value_heads=2, d_head=8, d_mlp=48)
    settings = {name: getattr(bundled.cfg, name) for name in same}
    if kind == "uniform":
        settings |= {"attention_dir": "bidirectional", "readout": "in_place"}
    architecture = Architecture(name=f"small-{kind}", **sizes, **settings)
    cfg = DiffusionConfig.from_architecture(
        architecture, device="cpu", trained_length=bundled.cfg.trained_length, default_prepend_bos=False
    )
    model = HookedDiffusionTransformer(cfg, tensors=lively_tensors(architecture, 0))
    model.set_tokenizer(bundled.tokenizer, default_prepend_bos=False)
    return model


@pytest.fixture(scope="session")
def in_words() -> Any:
    """To build a small random model of a family that reads the bundled models' words."""

    @cache
    def build(family: str) -> Any:
        tokenizer = bundled_model("tiny-mdm").tokenizer
        n_tokens, config = len(tokenizer), {**CONFIGS, **DIFFUSION_TRANSFORMERS, **NATIVE}[family]
        # SEDD and RADD do not count [MASK], the last token.
        sizes = {"vocab_size": n_tokens, "tokens": n_tokens - 1, "d_vocab": n_tokens, "d_vocab_out": n_tokens}
        if config.get("mask_token_id") is not None:
            sizes["mask_token_id"] = tokenizer.mask_token_id
        model = Specimen(config | {name: size for name, size in sizes.items() if name in config}).model
        model.clock.time = None
        model.set_tokenizer(tokenizer, default_prepend_bos=False)
        return model

    return build


@pytest.fixture
def token_layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context that counts the work of a network: rows times positions, summed over every block that runs."""
    from diffusion_lens.model.block import Block

    @contextmanager
    def counting() -> Iterator[list[int]]:
        counted, forward = [0], Block.forward

        def count(self: Any, resid: torch.Tensor, *args: Any) -> torch.Tensor:
            counted[0] += resid.shape[0] * resid.shape[1]
            return forward(self, resid, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Block, "forward", count)
            yield counted

    return counting


def pytest_collection_finish() -> None:
    """Collects no object that the modules made, which is most of what there is."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # cycles of garbage are few: most tests leave none
    gc.enable()


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of the explorer average two samples instead of ten: for tests of what is shown, not of numbers."""
    monkeypatch.setattr("diffusion_lens.explorer.live_run.SAMPLES", 2)


@pytest.fixture
def undrawn_figures() -> Iterator[None]:
    """Saved figures are blank files. Each of their panels must show something."""
    with blank_figures():
        yield


def parameters_of(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """As `module.parameters()`, which makes names too and takes several times as long."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module._modules.values():
        yield from parameters_of(child)


# The fixtures that give a model to many tests.
SHARED_MODELS = ("golden", "either", "every", "several", "tiny", "small", "own_pad")


@cache
def begin_tests_of(test: str, models: tuple[Any, ...]) -> None:
    """Checks the types of the next call of every function: once for each test function, whatever its parameters, and
    once in each file for each shared model."""
    begin_test()


@pytest.fixture
def families() -> Iterator[None]:
    """A page may list a family of its own; the others must not meet it."""
    from weight_conversion.registry import FAMILIES

    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Any:
    """After every test: no hook on a shared model, no step lent, no parameter frozen, the grad mode as before."""
    file, _, function = request.node.nodeid.partition("[")[0].partition("::")
    models = [name for name in SHARED_MODELS if name in request.fixturenames]
    params = getattr(request.node, "callspec", None)
    begin_tests_of(file + function, ())
    begin_tests_of(file, tuple(params.params.get(name) for name in models) if params else ())
    yield
    assert torch.is_grad_enabled()
    for name in models:
        value = request.getfixturevalue(name)
        model = getattr(value, "model", value)
        assert not model.list_hooks()
        assert model.clock.step is None
        assert all(parameter.requires_grad for parameter in parameters_of(model))
