"""Run EleutherAI's lm-evaluation-harness on a model of this library, of either variant.

    pip install lm-eval
    cd examples
    python -m lm_evaluation.adapter --model smdm-1028m --tasks lambada_openai arc_easy --limit 100

The harness asks three things of a model. A causal model answers the first two exactly. For a masked diffusion model an
answer's log-likelihood is that of its tokens revealed from left to right; `monte_carlo_nll` would give the bound on the
mean over all orders, with noise.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm.auto import tqdm

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.evaluation import chain_rule_nll, rank_answer


class DiffusionLensLM(LM):
    """A model as the harness sees it. `steps` is the number of denoising steps of a generated text."""

    def __init__(self, model: HookedDiffusionTransformer, steps: int | None = None) -> None:
        super().__init__()
        self.model, self.steps = model, steps
        self.longest = model.cfg.trained_length or model.cfg.n_ctx
        tokenizer = model.tokenizer
        # A causal model predicts the first token of a text from a token that precedes texts.
        self.first: int = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether its tokens are the likeliest."""
        answers = []
        for context, continuation in tqdm([request.args for request in requests], disable=None):
            before, both = self._encode(context), self._encode(context + continuation)
            answer = both[len(before) :]
            before = before[max(0, len(before) + len(answer) - self.longest) :]
            ranks = rank_answer(self.model, self._prompt(before), torch.tensor(answer), top_k=1).rank
            answers.append((self._log_likelihood(before, answer), not ranks.any()))
        return answers

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """The log-likelihood of each text, in windows as long as the model reads, each after the token before it."""
        answers = []
        for (text,) in tqdm([request.args for request in requests], disable=None):
            windows = get_rolling_token_windows(self._encode(text), self.first, self.longest - 1, context_len=1)
            parts = [self._log_likelihood(*make_disjoint_window(window)) for window in windows]
            answers.append(sum(parts))
        return answers

    def generate_until(self, requests: list[Any]) -> list[str]:
        """What the model writes after each context, up to the first of the texts at which it is to stop."""
        answers = []
        for context, options in tqdm([request.args for request in requests], disable=None):
            # The context comes first; of one that fills the canvas, the beginning is cut.
            most = int(options.get("max_gen_toks", 256))
            tokens = self._encode(context)[-max(self.longest - most, self.longest // 2) :]
            n_new, prompt = min(most, self.longest - len(tokens)), torch.tensor([tokens])
            run = self.model.denoise(
                prompt,
                max_new_tokens=n_new,
                steps=self.steps,
                temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0.0,
            )
            text, until = run.completion[0], options.get("until") or []
            for stop in filter(None, [until] if isinstance(until, str) else until):
                text = text.split(stop)[0]
            answers.append(text)
        return answers

    def _encode(self, text: str) -> list[int]:
        return self.model.encode(text, prepend_bos=False)

    def _prompt(self, before: list[int]) -> torch.Tensor:
        """The tokens that a continuation follows. A masked diffusion model needs none."""
        none = self.model.cfg.has_mask and before in ([], [self.first])
        return torch.tensor([] if none else before or [self.first], dtype=torch.long)

    def _log_likelihood(self, before: list[int], answer: list[int]) -> float:
        return -chain_rule_nll(self.model, self._prompt(before), torch.tensor(answer)).item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="tiny-mdm", help="name or path (default: tiny-mdm)")
    parser.add_argument("--tasks", nargs="+", required=True, help="tasks of the harness, or files that describe one")
    parser.add_argument("--limit", type=int, help="requests of each task (default: all)")
    parser.add_argument("--steps", type=int, help="denoising steps of a generated text")
    args = parser.parse_args(argv)
    adapter = DiffusionLensLM(HookedDiffusionTransformer.from_pretrained(args.model), args.steps)
    found = lm_eval.simple_evaluate(model=adapter, tasks=args.tasks, limit=args.limit)
    print(json.dumps(found["results"], indent=2))


if __name__ == "__main__":
    main()
