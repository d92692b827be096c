"""The logit lens: what the network would predict if it ended after each layer, at each step of the loop.

The state h of the residual stream at a layer is read through the last norm and the unembedding, logits = W_U ln(h), as
if no block followed (nostalgebraist 2020, "interpreting GPT: the logit lens"). In the denoising loop every step reads
another canvas, so the predictions are a table by step, layer and position.

The states of early layers are in other bases than the last norm expects. A tuned lens (Belrose et al. 2023, arXiv
2303.08112) reads W_U ln(h + h W + b) instead, with an affine map for each layer that `fit_translators` fits.

Layer l is the state that enters block l ("0_pre", "1_pre", ...), and layer `n_layers` is the state after the last block
("final_post"), whose logits are those of the network. The labels are those of TransformerLens's lens.

Positions are those of the predicted tokens. Where the state is, in the row of the position itself or in the row
before, depends on the model's readout.
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.analysis.inputs import Inputs, Readable
from diffusion_lens.analysis.lens.canvases import NOTHING, Canvases
from diffusion_lens.analysis.lens.readings import require_plain_readout
from diffusion_lens.analysis.lens.result import LogitLens
from diffusion_lens.analysis.lens.tables import Tables
from diffusion_lens.analysis.lens.translators import Translators
from diffusion_lens.hook_names import FwdHooks
from diffusion_lens.identity import run_of
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least, naming_the_nearest, pick_indices, whole_number, whole_numbers

Targets = str | int | Sequence[str | int] | Tensor | None


@naming_the_nearest
@torch.no_grad()
def logit_lens(
    model: DiffusionTransformer,
    inputs: Readable,
    *,
    layers: Iterable[Whole] | None = None,
    positions: Iterable[Whole] | None = None,
    steps: Iterable[Whole] | None = None,
    branch: str = "conditional",
    top_k: Whole = 5,
    targets: Targets = None,
    translators: Translators | None = None,
    attention_mask: Tensor | None = None,
    fwd_hooks: FwdHooks = (),
    max_bytes: int = 2**30,
    progress: bool = False,
) -> LogitLens:
    """What each layer predicts at each position, and at each step of a trajectory.

    A trajectory is read on its recorded canvases, as in a forced replay: hooks that are attached to the model, or given
    as `fwd_hooks`, see the step and the whole canvas, and change what is read after them. Without hooks, steps with the
    same canvas share a forward pass; a causal model takes a single one. The unembedding goes over blocks of rows, and
    only the states that are read are stored, for one pass at a time.

    Probabilities, entropy and KL are those of all logits of the network. Ranks and likeliest tokens are among the
    tokens that the model can write, that is, without [MASK].

    Args:
        model: Model, of either variant.
        inputs: A trajectory, read at every step; or texts, tokens, queries or facts, read in one pass outside the
            loop.
        layers: Layers to read, 0 to `n_layers` (see the module); negative ones count from the end.
        positions: Positions of the predicted tokens; by default all that the model predicts. On a causal model these
            begin at 1. After texts and tokens, they include the position after the last token, to which -1 refers.
        steps: Steps of the trajectory; by default all.
        branch: Branch of guidance, "conditional" or "unconditional". KL compares a layer with the last layer of the
            same branch, not with guided logits.
        top_k: Number of likeliest tokens.
        targets: Tokens whose rank and probability are read. A token or several, as text or id, are read at every
            position; Int[batch selected] has one for each selected position, -1 for none. By default the token at each
            position: of a trajectory the one that it ends with, of a query the answer's, otherwise the input's own.
        translators: Maps of a tuned lens; by default the lens is direct.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        fwd_hooks: Pairs (hook point or predicate, function), attached to every pass.
        max_bytes: Memory to use in addition to the weights. With less memory the lens unembeds smaller blocks and,
            where the states of a canvas do not fit, takes several passes.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A layer, position, step, branch or target does not exist; a hook is attached to the last norm or the
            unembedding; the translators were fitted on other weights; or the budget is too small.

    Warns:
        UserWarning: Another network wrote the trajectory.
    """
    given = Inputs.of(model, inputs, attention_mask=attention_mask, fwd_hooks=fwd_hooks)
    with run_of(model, fwd_hooks):
        require_plain_readout(model, fwd_hooks)
        canvases = Canvases.of(given, steps, branch)
        selected, n_layers = canvases.pick_positions(positions), model.cfg.n_layers
        picked = pick_indices("layers", None if layers is None else whole_numbers("layers", layers), n_layers + 1)
        n_writable = int(model.cfg.writable(torch.arange(model.cfg.d_vocab_out)).sum())
        if translators is not None:
            translators.require_for(model, picked)
        n_top = min(at_least(1, "top_k", top_k), n_writable)
        tables = Tables(canvases, selected, picked, _targets(canvases, targets, selected), n_top, translators)
        tables.fill(fwd_hooks, max_bytes, progress)
        record = {
            "branch": branch,
            "targets": "at each position" if targets is None or isinstance(targets, Tensor) else targets,
            "steps": canvases.steps,
            "forward_passes": tables.forward_passes,
            "blank": None if model.cfg.rewrites else model.cfg.blank,
            "translators": None if translators is None else translators.record,
            "cfg_scale": None if given.trajectory is None else given.trajectory.record["cfg_scale"],
            "inputs": given.describe(),
            **provenance(model, model.cfg),
        }
        return tables.result(record)


def _targets(canvases: Canvases, targets: Targets, positions: list[int]) -> Int[Tensor, "batch selected target"]:
    """The target tokens at each position; -1 for none.

    Raises:
        ValueError: A token that the model cannot write, or a tensor of another shape.
    """
    model, known = canvases.model, canvases.known[:, positions]
    if targets is None:
        return known[..., None]
    if isinstance(targets, Tensor):
        if targets.shape != known.shape or targets.is_floating_point():
            raise ValueError(
                f"targets are {targets.dtype} {list(targets.shape)}; a tensor has one token for each row and selected "
                f"position, Int{list(known.shape)}. Give ids that apply to every position as a list"
            )
        chosen = targets.to(known)[..., None]
    else:
        several = [targets] if isinstance(targets, str | int) else targets
        ids = [model.to_single_token(x) if isinstance(x, str) else whole_number("targets", x) for x in several]
        if not ids or NOTHING in ids:
            raise ValueError(f"targets={targets!r}; give at least one token, and none below 0")
        chosen = torch.tensor(ids, device=known.device).expand(*known.shape, -1)
    if outside := chosen[(chosen != NOTHING) & ~model.cfg.writable(chosen)].unique().tolist():
        raise ValueError(
            f"{model.cfg.model_name!r} cannot write the target tokens {outside}; only 0 to d_vocab_out - 1, and never "
            "[MASK]"
        )
    return chosen
