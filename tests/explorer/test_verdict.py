"""A page marks an answer right or wrong, by the text up to the end token."""

import pytest

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.analysis import trace_trajectory
from diffusion_lens.denoising import Trajectory
from diffusion_lens.explorer import Session
from diffusion_lens.explorer.page_of_run import recorded_by, verdict_of, written_by

PROMPT, RIGHT, WRONG = "the sailor of Kaurgate is", " Plerrick Baupling.", " Mondall Rorrick."


@pytest.fixture(scope="module", params=["site-mdm", "site-ar"])
def model(request):
    return HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")


@pytest.fixture(scope="module")
def run(model):
    prompt = PROMPT if not model.cfg.is_autoregressive else "Plerrick Baupling is the"
    return model.denoise(prompt, length=16, steps=8)


def test_the_text_ends_at_the_end_token(model, run, tmp_path):
    words = run.str_canvases()[-1]
    end = words.index("<eos>")
    wrote = model.to_string(run.tokens[0, int(run.given[0].sum()) : end])
    assert written_by(model, run) == recorded_by(run, 0) == (end, wrote)
    assert recorded_by(Trajectory.load(run.save(tmp_path / "run.safetensors")), 0) == (end, wrote)
    assert wrote.endswith(".")
    assert "<eos>" not in wrote


def test_a_text_without_an_end_is_whole(model):
    prompt = "the sailor of Kaurgate is"
    run = model.denoise(prompt, length=7, steps=2)
    assert written_by(model, run) == recorded_by(run, 0) == (None, run.completion[0])


def test_a_run_is_right_where_its_text_contains_the_answer(model, run):
    wrote = written_by(model, run)[1]
    for answer, right in ((f" {wrote}", True), (wrote.upper(), True), (WRONG, False)):
        (entry,) = run.explore(answer=answer).manifest["runs"]
        assert entry["verdict"] == {"right": right, "wrote": wrote, "answer": answer}
        assert entry["end"] == run.str_canvases()[-1].index("<eos>")
    assert run.explore().manifest["runs"][0]["verdict"] is None
    assert Session([model]).run({"prompt": PROMPT, "length": 16})["verdict"] is None


@pytest.mark.parametrize(
    ("answer", "wrote", "right"),
    [
        (" Ann", "Annabel Lee", False),
        (" Rome", "Jerome", False),
        (" 4", "42", False),
        (" Ann", "it was ANN's, not Annabel's", True),
        (" Ann", "Annabel, or Ann", True),
        (" Ann Lee.", "ann lee.", True),
        (" (Ann)", "so(ann)", True),
        (" C++", "in C++", True),
        ("巴黎", "首都是巴黎的", True),
        (" René", "Renée", False),
    ],
)
def test_an_answer_is_right_as_whole_words(answer, wrote, right):
    assert verdict_of(answer, wrote)["right"] is right


@pytest.mark.parametrize(("answer", "right"), [(RIGHT, True), (WRONG, False)])
def test_a_traced_fact_gives_the_answer(answer, right):
    model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
    fact = Fact(PROMPT, "sailor of Kaurgate", answer)
    run = model.denoise(PROMPT, length=16, steps=8)
    trace = trace_trajectory(model, fact, trajectory=run, layers=[0], positions=[1], samples=1, noise=0.5)
    verdict = run.explore(trace=trace).manifest["runs"][0]["verdict"]
    assert (verdict["right"], verdict["wrote"]) == (right, RIGHT.strip())
    assert verdict["answer"].replace(" ", "") == answer.replace(" ", "")
    assert run.explore(trace=trace, answer=RIGHT).manifest["runs"][0]["verdict"]["right"] is True
