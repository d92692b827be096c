"""Edits by the number of tokens of the new object, and answers that are written token by token."""

from dataclasses import replace
from statistics import mean

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis import CanvasLayout, EditSettings, EditStudy, ValueSettings, edit_study
from diffusion_lens.analysis.engine.answer import clean_logits
from diffusion_lens.analysis.rome.edit import judge, judge_by_token
from diffusion_lens.data import EditRequest, toy_facts
from diffusion_lens.facts.fact import Probe

PEOPLE = {fact.id: fact for fact in toy_facts.load().facts("both")}
SEARCH = ValueSettings(steps=2, lr=0.1, kl_factor=0.0)


def predicted(model, canvas, positions):
    """Likeliest token that may be written at each position of one canvas, and its probability."""
    logits = model(canvas[None], logits_at=model.readout.rows(positions))[0]
    wide = clean_logits(model, logits, canvas[positions] if model.head.needs_canvas else None).float()
    never = ~model.cfg.writable(torch.arange(wide.shape[-1]))
    tokens = wide.masked_fill(never, -torch.inf).argmax(-1)
    return tokens, wide.softmax(-1)[range(len(tokens)), tokens]


def decoded(model, prompt, n):
    """The tokens that the model writes after a prompt at `n` positions, one at a time, and the one written last."""
    if model.cfg.is_autoregressive:
        canvas = prompt
        for _ in range(n):
            token, _ = predicted(model, canvas, torch.tensor([len(canvas)]))
            canvas = torch.cat([canvas, token])
        return canvas[len(prompt) :].tolist(), n - 1
    canvas, left = blank(model, prompt, n), list(range(len(prompt), len(prompt) + n))
    while left:
        tokens, confidence = predicted(model, canvas, torch.tensor(left))
        best = int(confidence.argmax())
        canvas[left[best]] = tokens[best]
        last = left.pop(best)
    return canvas[len(prompt) :].tolist(), last - len(prompt)


def blank(model, prompt, n):
    """A prompt and `n` positions to fill: masked, or with noise."""
    filling = torch.arange(60, 60 + n) if model.cfg.uniform_noise else torch.full((n,), model.cfg.blank)
    return torch.cat([prompt, filling])


def query_of(model, prompt, answer):
    ar = model.cfg.is_autoregressive
    canvas = torch.cat([prompt, torch.tensor(answer[:-1])]).long() if ar else blank(model, prompt, len(answer))
    return Query(canvas, (1, 3), tuple(range(len(prompt), len(prompt) + len(answer))), tuple(answer))


@torch.no_grad()
def test_written_is_what_the_model_writes_one_token_at_a_time(summed):
    model = summed.model
    probes, expected, shares = [], [], []
    for row, n_prompt, n in ((0, 5, 3), (1, 7, 4), (2, 6, 1)):
        prompt = summed.tokens[row, :n_prompt] % 500
        answer, last = decoded(model, prompt, n)
        other = [*answer]
        other[last] = 31 if answer[last] != 31 else 32
        for tokens, is_written in ((answer, 1.0), (other, 0.0)):
            query = query_of(model, prompt, tokens)
            probes.append(Probe(query, query_of(model, prompt, [33])))
            expected.append(is_written)
            likeliest, _ = predicted(model, query.tokens, torch.tensor(query.answer_positions))
            shares.append(mean(float(a == b) for a, b in zip(likeliest.tolist(), tokens, strict=True)))
    scores = judge_by_token(model, probes, max_batch=4)
    torch.testing.assert_close(scores[:2], judge(model, probes))
    assert scores[2].tolist() == pytest.approx(shares)
    assert scores[3].tolist() == expected
    if model.cfg.is_autoregressive:
        assert (scores[2] == 1).tolist() == [bool(written) for written in expected]


def test_a_long_answer_takes_only_the_passes_that_it_needs(either):
    """One more for each token after the first, of the answers that are right so far; none on a causal model."""
    model, prompt = either.model, either.tokens[0, :5]
    right, _ = decoded(model, prompt, 3)
    wrong = [token + 1 for token in right]
    rows: list[int] = []
    handle = model.embed.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    judge_by_token(model, [Probe(query_of(model, prompt, answer)) for answer in (right, wrong)])
    handle.remove()
    assert rows == ([2] if model.cfg.is_autoregressive else [2, 1, 1])


def request_about(person, n_words):
    """A request to write so many words of somebody else's description, each one token."""
    true, theirs, other = (PEOPLE[f"toy1-{number:03d}-p2d-held-out-0"] for number in (person, person + 1, person + 2))
    answer = " " + " ".join(theirs.answer.split()[:n_words])
    again = PEOPLE[f"toy1-{person:03d}-p2d-held-out-1"]
    half_right = replace(other, answer=f" {other.answer.split()[0]} {true.answer.split()[1]}")
    return EditRequest(
        true=true,
        new=replace(true, answer=answer, id=f"person-{person}"),
        paraphrases=(replace(again, answer=answer),),
        neighbours=(half_right,) if n_words == 2 else (),
    )


REQUESTS = [request_about(40 + 4 * i, n) for i, n in enumerate((2, 1, 2, 1, 1))]
SETTINGS = EditSettings(1, SEARCH, layout=CanvasLayout(14))


@pytest.fixture(scope="module")
def whole(tiny):
    return edit_study(tiny, REQUESTS, SETTINGS)


def test_each_length_is_a_study_of_its_own(tiny, whole):
    by_length = whole.by_target_length()
    assert {length: study.ids for length, study in by_length.items()} == {
        n: [request.id for request in REQUESTS if len(request.new.answer.split()) == n] for n in (1, 2)
    }
    frame = whole.to_dataframe()
    for length, study in by_length.items():
        rows = frame[frame.target_tokens == length]
        for scored in ("wins", "tokens", "written"):
            for group, score in study.table(scored=scored).items():
                for state in ("before", "after"):
                    own = rows[rows.group == group].groupby("request")[f"{scored}_{state}"].mean()
                    assert getattr(score, state) == pytest.approx(own.mean())
                assert score.requests == len(own)
    assert by_length[1].table(scored="tokens") == by_length[1].table(scored="written")
    assert "neighbourhood" not in by_length[1].table()
    assert by_length[2].table(scored="tokens")["neighbourhood"].before == 0.5
    assert by_length[2].table(scored="written")["neighbourhood"].before == 0
    ax = whole.plot_by_target_length(scored="written")
    assert [line.get_label() for line in ax.containers] == ["efficacy", "paraphrase", "neighbourhood"]
    assert ax.get_xticks().tolist() == [1, 2]
    heights = [container.lines[0].get_ydata()[-1] for container in ax.containers]
    assert heights == [score.after for score in by_length[2].table(scored="written").values()]


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_studies_of_earlier_versions_have_no_lengths(tiny, whole, tmp_path):
    old = replace(whole, tokens=None, written=None, target_tokens=None)
    again = EditStudy.load(old.save(tmp_path / "old.safetensors"))
    assert again.table() == whole.table()
    assert "target_tokens" not in again.to_dataframe()
    mixed = EditStudy.of({**whole.by_fact(), REQUESTS[0].id: old.by_fact()[REQUESTS[0].id]}, whole.record)
    for study in (again, mixed):
        with pytest.raises(ValueError, match="this study has no target_tokens: an earlier version made it"):
            study.by_target_length()
        with pytest.raises(ValueError, match="this study has no written"):
            study.table(scored="written")
    with pytest.raises(ValueError, match="scored='writen'; it must be 'wins', 'tokens' or 'written'"):
        whole.table(scored="writen")
