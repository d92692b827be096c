"""Each position has one role, and averages over roles are averages over their positions."""

import pytest
import torch

from diffusion_lens import Fact, Query
from diffusion_lens.analysis.causal_tracing.average_result import ROLES, mean_by_role, pick_roles, token_roles

SHORT = dict(zip("b 1 m L a f p A u".split(), ROLES, strict=True))  # noqa: SIM905


@pytest.mark.parametrize(
    ("n_pos", "subject", "answer", "expected"),
    [
        (12, (2, 6), (10,), "b b 1 m m L a f f p A u"),
        (6, (0, 2), (4, 5), "1 L a p A A"),
        (4, (1, 2), (4,), "b L a p"),  # a subject of one token is its last; the next token is not on the canvas
        (3, (1, 2), (3,), "b L p"),  # a single token after the subject ends the prompt
        (3, (0, 3), (3,), "1 m L"),  # a subject's last token that ends the prompt stays the subject's
        (5, (0, 2), (2,), "1 L A u u"),
        (5, (2, 4), (0,), "A b 1 L p"),  # "[M] is B": the prompt lies behind the answer
        (6, (0, 1), (), "L a f f f p"),
    ],
)
def test_roles_of_a_canvas(n_pos, subject, answer, expected):
    query = Query(torch.zeros(n_pos, dtype=torch.long), subject, answer, (7,) * len(answer))
    assert token_roles(query) == [SHORT[word] for word in expected.split()]


def test_roles_of_a_fact(tiny):
    fact = Fact("people say Gustav Geisser, alias the", "Gustav Geisser", " brave drummer of Rolsen.")
    prompt = "b b 1 L a f p"
    asked_first = fact.to_query(tiny, first_tokens=1, n_masks=7)
    masked = tiny.cfg.has_mask
    assert token_roles(asked_first) == [SHORT[word] for word in (prompt + (" A u u u u u u" if masked else "")).split()]
    # Teacher forcing puts all tokens of the answer but the last on a causal canvas.
    whole = fact.to_query(tiny)
    assert token_roles(whole) == [SHORT[word] for word in (prompt + " A A A A" + (" A" if masked else "")).split()]


def test_means_by_role():
    values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [5.0, 50.0]])
    means = mean_by_role(values, ["other_masks", "answer", "other_masks"], ["answer", "prompt_last", "other_masks"])
    assert means[0].tolist() == [2, 20]
    assert means[1].isnan().all()
    assert means[2].tolist() == [3, 30]


def test_roles_are_picked_in_their_usual_order():
    assert pick_roles(["answer", "subject_last"]) == ["subject_last", "answer"]
    assert pick_roles(None) == list(ROLES)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["subject_lst"], "no role 'subject_lst', nearest is subject_last"),
        ([], r"roles=\[\]; give a list"),
        ("answer", "roles='answer'; give a list"),
    ],
)
def test_bad_roles(roles, message):
    with pytest.raises(ValueError, match=message):
        pick_roles(roles)
