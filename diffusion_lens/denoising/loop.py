"""The denoising loop: from a canvas of blanks to text.

A step takes the canvas x_t at time t to x_s at s < t by the reverse process of Nie et al. 2024 (arXiv 2410.18514,
section 2): the network predicts all masked tokens at once, p(x_0 | x_t), and some of the predictions are written. The
sampler plans which, and how many. Hook points, all over the whole canvas, in the order in which they pass:

    denoise.hook_tokens      Int[batch pos]                the canvas going in
    denoise.hook_logits      Float[batch pos d_vocab_out]  after guidance, by place; zeros where nothing is proposed
    denoise.hook_candidates  Int[batch pos]                the tokens proposed; the canvas's own elsewhere
    denoise.hook_confidence  Float[batch pos]              how sure the model is of them; zero elsewhere. By this they
                                                           are ranked: their probability, unless the sampler's
                                                           `proposal` says otherwise
    denoise.hook_reveal      Bool[batch pos]               the places revealed in this step

What a hook returns there is what the loop uses; only masked places can be revealed, and one where [MASK] itself is
proposed stays masked. Logits that are NaN or +inf, or -inf for every token that may be written, are refused at any
place where a token is proposed, and so are ids that are no tokens: they would pass for confident text. While anything
is hooked, the network runs at every step and tokens are proposed at every masked place (on a causal model: at the next
one), so that a hook may change the order; otherwise a step that reveals nothing costs nothing.

With a `script`, the canvases of an earlier run, the run is forced: the network and its hooks see those canvases, their
tokens are revealed (nothing passes `hook_candidates` and `hook_reveal`), and what changes under a hook is how probable
they are.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tqdm.auto import tqdm

from diffusion_lens.denoising.run import Run


def run_loop(
    run: Run,
    first_step: int = 0,
    *,
    fwd_hooks: Sequence[tuple[Any, Any]] = (),
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Take every step from `first_step` on; returns what the record keeps of it.

    Args:
        around: a context for each step, such as one that caches.

    Raises:
        RuntimeError: another run of the loop is under way on this model.
    """
    begun = time.perf_counter()
    model, steps = run.model, range(first_step, len(run.times) - 1)
    with torch.no_grad(), model.clock.running(model.cfg.model_name), model.hooks(fwd_hooks=list(fwd_hooks)):
        model.require_set_up()
        for index in tqdm(steps, desc="denoise", unit="step", disable=not progress):
            with around(index) if around else nullcontext():
                # 1. Enter: the canvas x_t, which a hook may rewrite; `hook.step` says t, s and what is masked.
                state = run.enter(index)

                # 2. Plan: at which places a token is proposed, and how many are revealed between t and s.
                plan = run.plan(state)
                places = run.proposed_places(state, plan)

                if places is not None:
                    # 3. Predict: logits of p(x_0 | x_t) at these places, guided if asked (eq. 9 of the paper).
                    logits = run.predict(state, places)

                    # 4. Propose: one token for each place, the likeliest or drawn at the temperature.
                    candidates = run.propose(state, places, logits)

                    # 5. Rank: how sure the model is of each.
                    confidence, ranking = run.rank(state, places, logits, candidates)

                    # 6. Reveal: the planned number of the most confident are written.
                    run.reveal(state, plan, places, candidates, confidence, ranking)

                # 7. Remask: what the plan takes back. Then the canvas is x_s.
                run.remask(plan)
                run.leave()
    seconds = time.perf_counter() - begun
    return {"first_step": first_step, "forward_passes": run.predictor.passes, "seconds": seconds}
