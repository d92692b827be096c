"""The denoising loop: from a masked canvas to text.

A canvas is the token sequence that a run fills: the prompt, and masked positions to write. A step turns the canvas x_t
into x_s, with s < t since time runs from 1 to 0, by the reverse process of Nie et al. 2024 (arXiv 2410.18514, section
2): the network predicts all masked tokens at once, p(x_0 | x_t), and the loop writes some of the predictions. The
sampler plans which, and how many. A step passes these hook points, in this order:

    denoise.hook_tokens      Int[batch pos]                the canvas x_t
    denoise.hook_logits      Float[batch pos d_vocab_out]  logits after guidance; 0 where no token is proposed
    denoise.hook_candidates  Int[batch pos]                the proposed tokens; the canvas's own tokens elsewhere
    denoise.hook_confidence  Float[batch pos]              the scores by which positions are ranked; 0 elsewhere. They
                                                           are the probabilities of the proposed tokens, unless the
                                                           sampler's `proposal` says otherwise
    denoise.hook_reveal      Bool[batch pos]               the positions revealed in this step

The loop uses what a hook returns there. It reveals masked positions only, and a position where [MASK] itself is
proposed stays masked. Under uniform noise no position is masked: the canvas starts from random tokens, and every
position that was not given may be written in every step. Where a token is proposed, the loop refuses logits that are
NaN or +inf, or -inf for every token that may be written, and it refuses ids that are no tokens, because they would look
like confident predictions. If anything is hooked, every step takes a forward pass and proposes tokens at every masked
position (on a causal model: at the next one), so that a hook may change the order. Otherwise a step that reveals
nothing takes no forward pass.

A run with a `script`, the canvases of an earlier run, is forced: the network and its hooks see those canvases, the loop
reveals their tokens (`hook_candidates` and `hook_reveal` do not pass), and a hook changes only their probabilities.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tqdm.auto import tqdm

from diffusion_lens.denoising.run import Run
from diffusion_lens.hook_names import FwdHooks


def run_loop(
    run: Run,
    first_step: int = 0,
    *,
    stop: int | None = None,
    fwd_hooks: FwdHooks = (),
    around: Callable[[int], AbstractContextManager[Any]] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Take every step from `first_step` on, and return the costs for the record.

    Args:
        stop: Index of the first step that is not taken; by default all are.
        around: Function from a step's index to a context manager that is open during the step, such as one that caches.

    Raises:
        RuntimeError: Another denoising run is in progress on this model.
    """
    begun = time.perf_counter()
    model, steps = run.model, range(first_step, len(run.times) - 1 if stop is None else stop)
    with torch.no_grad(), model.clock.running(model.cfg.model_name), model.hooks(fwd_hooks=list(fwd_hooks)):
        model.require_set_up()
        for index in tqdm(steps, desc="denoise", unit="step", disable=not progress):
            with around(index) if around else nullcontext():
                # 1. Enter: set `hook.step`; a hook may rewrite the canvas x_t.
                state = run.enter(index)

                # 2. Plan: how many positions to reveal by time s, and at which positions a token is proposed. The
                #    default reveals a share 1 - s/t of the masked ones (ML-GSAI/SMDM `diff_sample`, alg="greddy").
                plan = run.plan(state)
                positions = run.open_positions(state, plan)

                if positions is not None:
                    # 3. Predict: compute the logits of p(x_0 | x_t) at these positions, guided by eq. 9 of Nie et al.
                    prediction = run.predict(state, positions)

                    # 4. Propose: take the likeliest token at each position, or sample one at the temperature by
                    #    Gumbel-max (ML-GSAI/SMDM `add_gumbel_noise`). A sampler of transitions draws x_s itself.
                    tokens = run.propose(state, positions, prediction)

                    # 5. Rank: score each proposed token. By default the score is its probability (`diff_sample`;
                    #    Nie et al. 2025, LLaDA, arXiv 2502.09992, `generate.py`).
                    candidates = run.rank(state, positions, prediction, tokens)

                    # 6. Reveal: write the planned number of the most confident tokens.
                    run.reveal(state, plan, candidates)

                # 7. Remask: return revealed positions to [MASK] where the plan says so (Wang et al. 2025, ReMDM,
                #    arXiv 2503.00307). The canvas is now x_s.
                run.remask(plan)

                # 8. Leave: append the canvas to the history.
                run.leave(state)
    seconds = time.perf_counter() - begun
    return {"first_step": first_step, "forward_passes": run.predictor.passes, "seconds": seconds}
