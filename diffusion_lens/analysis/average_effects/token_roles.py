"""Roles of the tokens of a query: the rows over which traces of many facts are averaged.

    before_subject   tokens before the subject, a prepended BOS among them
    subject_first    the subject's first token, if it has several
    subject_middle   those between its first and its last
    subject_last     its last token, or its only one
    after_first      the first token after the subject
    after_further    the others of the prompt
    prompt_last      the last token of the prompt, which a causal model reads the answer from
    answer           the positions of the answer: masked, or on a causal canvas the tokens that are there already
    other_masks      masked positions that are no part of the answer

and at a denoising step

    answer_revealed  positions of the answer that are revealed; "answer" are then those that are still masked, and under
                     uniform noise all of them at every step
    not_reached      positions that are not on the canvas yet; they have no effect and count in no average

These are the rows of the average figures of ROME (Meng et al. 2022, arXiv 2202.05262, figure 2) and three more. There a
token counts in every row that fits it: a subject of one token is its first and its last. Here each position has one
role, so that no state is counted twice: the last token of a subject is `subject_last` even where it is the only one or
ends the prompt, and a single token after the subject is `prompt_last`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.config import reached
from diffusion_lens.facts import Query
from diffusion_lens.hook_names import nearest

ROLES = (
    "before_subject",
    "subject_first",
    "subject_middle",
    "subject_last",
    "after_first",
    "after_further",
    "prompt_last",
    "answer",
    "other_masks",
)
STEP_ROLES = (*ROLES, "answer_revealed")
NOT_REACHED = "not_reached"


def token_roles(query: Query) -> list[str]:
    """The role of each position. The prompt ends at the first position of the answer behind the subject."""
    n_pos = len(query.tokens)
    start, stop = query.subject
    end = min([position for position in query.answer_positions if position >= stop], default=n_pos)
    # A later line of this table overrules an earlier one.
    painted: tuple[tuple[str, Sequence[int]], ...] = (
        ("other_masks", range(end, n_pos)),
        ("before_subject", range(start)),
        ("after_further", range(stop, end)),
        ("after_first", range(stop, end)[:1]),
        ("prompt_last", range(stop, end)[-1:]),
        ("subject_middle", range(start, stop)),
        ("subject_first", (start,)),
        ("subject_last", (stop - 1,)),
        ("answer", [position for position in query.answer_positions if position < n_pos]),
    )
    role_of = {position: role for role, positions in painted for position in positions}
    return [role_of[position] for position in range(n_pos)]


def step_roles(query: Query, canvas: Int[Tensor, "pos"], is_open: Bool[Tensor, "pos"]) -> list[str]:
    """The role of each position at a step.

    Args:
        canvas: Canvas before the step.
        is_open: Whether a step may still write the position.
    """
    # A causal canvas also contains the last token of the answer, which the query does not.
    at_step = zip(token_roles(query), reached(canvas).tolist(), is_open.tolist(), strict=False)
    return [
        NOT_REACHED if not on_canvas else "answer_revealed" if role == "answer" and not is_open_here else role
        for role, on_canvas, is_open_here in at_step
    ]


def mean_by_role(
    values: Float[Tensor, "pos layer"], roles: Sequence[str], selected: Sequence[str]
) -> Float[Tensor, "role layer"]:
    """Mean over the positions of each role, NaN where there is none.

    Args:
        roles: Role of each row of `values`.
        selected: Roles to return, in this order.
    """
    by_role = [[row for row, role in enumerate(roles) if role == wanted] for wanted in selected]
    return torch.stack([values[rows].mean(dim=0) for rows in by_role])


def pick_roles(roles: Sequence[str] | None, among: Sequence[str] = ROLES) -> list[str]:
    """The selected roles, in their usual order; by default all."""
    roles = among if roles is None else roles
    if isinstance(roles, str) or not roles:
        raise ValueError(f"roles={roles!r}; give a list of some of {', '.join(among)}")
    if unknown := [role for role in roles if role not in among]:
        raise ValueError(
            f"there is no role {unknown[0]!r}, nearest is {nearest(unknown[0], among, 1)}; they are {', '.join(among)}"
        )
    return [role for role in among if role in roles]
