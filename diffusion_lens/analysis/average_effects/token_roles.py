"""What each token of a query is to its subject: the rows over which traces of many facts are averaged.

    before_subject   tokens before the subject, a prepended BOS among them
    subject_first    the subject's first token, if it has several
    subject_middle   those between its first and its last
    subject_last     its last token, or its only one
    after_first      the first token after the subject
    after_further    the others of the prompt
    prompt_last      the last token of the prompt, which a causal model reads the answer from
    answer           the places of the answer: masked, or on a causal canvas the tokens that stand there already
    unasked          masked places that the question does not ask for

and at a denoising step

    answer_revealed  places of the answer whose token stands there already; "answer" are then those still open

These are the rows of the average figures of ROME (Meng et al. 2022, arXiv 2202.05262, figure 2) and three more. There a
token counts in every row that fits it: a subject of one token is its first and its last. Here each place has one role,
so that no state is counted twice: the last token of a subject is `subject_last` even where it is the only one or ends
the prompt, and a single token after the subject is `prompt_last`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

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
    "unasked",
)
STEP_ROLES = (*ROLES, "answer_revealed")


def token_roles(query: Query) -> list[str]:
    """The role of each place of the canvas. The prompt ends at the first place of the answer behind the subject."""
    n_pos = len(query.tokens)
    start, stop = query.subject
    end = min([place for place in query.answer_positions if place >= stop], default=n_pos)
    # A later line of this table overrules an earlier one.
    painted: tuple[tuple[str, Sequence[int]], ...] = (
        ("unasked", range(end, n_pos)),
        ("before_subject", range(start)),
        ("after_further", range(stop, end)),
        ("after_first", range(stop, end)[:1]),
        ("prompt_last", range(stop, end)[-1:]),
        ("subject_middle", range(start, stop)),
        ("subject_first", (start,)),
        ("subject_last", (stop - 1,)),
        ("answer", [place for place in query.answer_positions if place < n_pos]),
    )
    role_of = {place: role for role, places in painted for place in places}
    return [role_of[place] for place in range(n_pos)]


def step_roles(query: Query, canvas: Sequence[int], blank: int) -> list[str]:
    """The role of each place at a step.

    Args:
        canvas: the canvas before the step.
        blank: what places hold that are still to be revealed.
    """
    return [
        "answer_revealed" if role == "answer" and token != blank else role
        for role, token in zip(token_roles(query), canvas, strict=False)  # a causal canvas also holds the last token
    ]


def mean_by_role(
    values: Float[Tensor, "pos layer"], roles: Sequence[str], wanted: Sequence[str]
) -> Float[Tensor, "role layer"]:
    """Mean over the places of each role, NaN where there is none.

    Args:
        roles: the role of each row of `values`.
        wanted: the roles to return, in this order.
    """
    rows = [[row for row, role in enumerate(roles) if role == each] for each in wanted]
    return torch.stack([values[row].mean(dim=0) for row in rows])


def pick_roles(asked: Sequence[str] | None, among: Sequence[str] = ROLES) -> list[str]:
    """The roles asked for, in their usual order; by default all."""
    asked = among if asked is None else asked
    if isinstance(asked, str) or not asked:
        raise ValueError(f"roles={asked!r}; give a list of some of {', '.join(among)}")
    if unknown := [role for role in asked if role not in among]:
        raise ValueError(
            f"there is no role {unknown[0]!r}, nearest is {nearest(unknown[0], among, 1)}; they are {', '.join(among)}"
        )
    return [role for role in among if role in asked]
