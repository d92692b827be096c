"""Causal traces, keys and values of 20 known facts, as ROME's code computes them.

The slow version runs transformers' network with hooks of PyTorch, one restored state or one prompt at a time.
"""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from diffusion_lens.analysis import causal_trace
from diffusion_lens.analysis.rome import ValueSettings, compute_keys, optimize_values, query_with_prefixes

SAMPLES, WINDOW = 2, 10
PREFIXES = ["The weather was fine. "]
LAYERS = (3, 12, 22)  # of keys and values
SEARCH = dict(lr=0.1, steps=3, essence_at="subject_last")


@contextmanager
def hooked(module, change):
    """`change` replaces the module's output, the first of several."""

    def hook(_module, _given, out):
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class Prompt:
    """Tokens of a prompt, and those in which its subject stands."""

    def __init__(self, words, text, subject, start=None):
        start = text.index(subject) if start is None else start
        given = words(text, return_offsets_mapping=True)
        self.tokens = torch.tensor([given["input_ids"]])
        inside = [i for i, (a, b) in enumerate(given["offset_mapping"]) if a < start + len(subject) and b > start]
        self.first, self.last, self.end = inside[0], inside[-1], self.tokens.shape[1] - 1


class Rome:
    """ROME's procedures (Meng et al. 2022) on a network of transformers."""

    def __init__(self, network, words):
        self.network, self.words, self.layers = network, words, network.model.layers

    def module(self, kind, layer):
        block = self.layers[layer]
        return {"resid": block, "mlp": block.mlp, "attn": block.self_attn}[kind]

    def trace(self, prompt, answer, cells):
        """`trace_with_patch`: p(answer) clean, corrupted, and with each cell (kind, position, layer) restored."""
        answer = self.words(answer)["input_ids"][0]
        embeddings = self.network.model.embed_tokens
        subject = slice(prompt.first, prompt.last + 1)
        noise = 3 * embeddings(prompt.tokens[0, subject]).std()
        drawn = np.random.RandomState(1).randn(SAMPLES, prompt.last + 1 - prompt.first, embeddings.embedding_dim)

        def corrupt(embedded):
            embedded = embedded.clone()
            embedded[1:, subject] += (noise * torch.from_numpy(drawn)).to(embedded)
            return embedded

        def scores(kind=None, position=None, layers=()):
            def restore(states):
                states = states.clone()
                states[1:, position] = states[0, position]
                return states

            with ExitStack() as hooks:
                hooks.enter_context(hooked(embeddings, corrupt))
                for layer in layers:
                    hooks.enter_context(hooked(self.module(kind, layer), restore))
                logits = self.network(prompt.tokens.expand(1 + SAMPLES, -1)).logits[:, -1]
            return logits.softmax(-1)[:, answer]

        both = scores()
        restored = []
        for kind, position, layer in cells:
            around = range(max(0, layer - WINDOW // 2), min(len(self.layers), layer + WINDOW // 2))
            restored.append(float(scores(kind, position, [layer] if kind == "resid" else around)[1:].mean()))
        return float(both[0]), float(both[1:].mean()), restored

    def key(self, prompts, layer):
        """The mean over the prompts of the down-projection's input at the subject's last token."""
        found = []
        for prompt in prompts:
            down = self.layers[layer].mlp.down_proj
            handle = down.register_forward_pre_hook(lambda _, given, at=prompt.last: found.append(given[0][0, at]))
            self.network(prompt.tokens)
            handle.remove()
        return torch.stack(found).mean(0)

    def value(self, prompts, answer, essence, layer, settings):
        """`compute_v`: the losses before each update, and v*."""
        target = torch.tensor([self.words(answer)["input_ids"]])
        delta = torch.zeros(self.network.config.hidden_size, requires_grad=True)
        optimizer = torch.optim.Adam([delta], lr=settings.lr)
        initial, before, losses = [], [], []

        def log_probs(tokens, position):
            def add(out):
                initial.append(out[0, position].detach().clone())
                moved = torch.zeros_like(out)
                moved[0, position] = 1
                return out + moved * delta

            with hooked(self.layers[layer].mlp, add):
                return self.network(tokens).logits[0].log_softmax(-1)

        for step in range(settings.steps):
            nll = torch.zeros(())
            for prompt in prompts:
                rows = log_probs(torch.cat([prompt.tokens, target[:, :-1]], dim=1), prompt.last)[-target.shape[1] :]
                nll = nll - rows.gather(1, target.T).mean() / len(prompts)
            now = log_probs(essence.tokens, essence.last)[essence.last]
            before.append(now.detach())
            kl = settings.kl_factor * (now.exp() * (now - before[0])).sum()
            decay = settings.weight_decay * delta.norm() / initial[0].norm() ** 2
            total = nll + kl + decay
            losses.append([float(part.detach()) for part in (total, nll, kl, decay)])
            if total < settings.stop_below or step == settings.steps - 1:
                break
            optimizer.zero_grad()
            [delta.grad] = torch.autograd.grad(total, [delta])
            optimizer.step()
            with torch.no_grad():
                most = settings.clamp_norm_factor * initial[0].norm()
                if delta.norm() > most:
                    delta.mul_(most / delta.norm())
        return torch.tensor(losses), initial[0] + delta.detach()


@pytest.fixture(scope="module")
def rome(smollm):
    return Rome(smollm.network, smollm.words)


@torch.no_grad()
def test_traces_of_known_facts(smollm, rome, facts):
    """Early and late states of the subject and the last token; then every position, for one fact."""
    grids = [
        ("resid", lambda p: (p.last, p.end), (8, 24)),
        ("mlp", lambda p: (p.last,), (6,)),
        ("attn", lambda p: (p.end,), (20,)),
    ]
    assert len(facts) == 20
    shortest = min(facts, key=lambda fact: len(fact.prompt))
    asked = [(fact, *grid) for fact in facts for grid in grids]
    for fact, kind, positions, layers in [*asked, (shortest, "resid", lambda p: range(p.end + 1), (0, 10, 20))]:
        prompt = Prompt(smollm.words, fact.prompt, fact.subject)
        cells = [(kind, position, layer) for position in positions(prompt) for layer in layers]
        clean, corrupted, restored = rome.trace(prompt, fact.answer, cells)
        trace = causal_trace(
            smollm.model,
            fact.to_query(smollm.model, first_tokens=1),
            kind=kind,
            window=WINDOW,
            samples=SAMPLES,
            positions=positions(prompt),
            layers=layers,
        )
        assert trace.known, fact.prompt
        found = torch.tensor([trace.clean, trace.corrupted, *trace.scores.flatten()])
        assert_close(found, torch.tensor([clean, corrupted, *restored]), rtol=1e-3, atol=2e-5)


def test_keys_and_values_of_known_facts(smollm, rome, facts):
    model, settings = smollm.model, ValueSettings(**SEARCH)
    for number, layer in enumerate(LAYERS):
        some = facts[number :: len(LAYERS)]
        requests = [query_with_prefixes(model, fact, PREFIXES) for fact in some]
        keys, values = compute_keys(model, requests, layer), optimize_values(model, requests, layer, settings=settings)
        for fact, key, value in zip(some, keys, values, strict=True):
            prompts = [
                Prompt(smollm.words, prefix + fact.prompt, fact.subject, len(prefix) + fact.subject_span[0])
                for prefix in ("", *PREFIXES)
            ]
            with torch.no_grad():
                expected = rome.key(prompts, layer)
            assert (key.vector - expected).norm() < 1e-4 * expected.norm()
            essence = Prompt(smollm.words, f"{fact.subject} is a", fact.subject)
            losses, vector = rome.value(prompts, fact.answer, essence, layer, settings)
            assert_close(value.losses, losses, rtol=1e-3, atol=1e-4)
            assert (value.vector - vector).norm() < 1e-3 * vector.norm()
