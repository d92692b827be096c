"""Berglund's file of celebrities and their parents, a few rows of our own in its form."""

import pytest
from huggingface_hub import cached_assets_path, constants

from diffusion_lens.data import celebrities, parent_child
from diffusion_lens.data.fact_files import open_source

HEADER = "child,parent,parent_type,child_prediction,can_reverse"
ROWS = ["Ada Marsh,Berta Kerner,mother,,False", '"Emil Tunton","Hugo Skolden, Sr.",father,Emil Tunton,True']


@pytest.fixture
def save(tmp_path):
    def write(*lines):
        path = tmp_path / "pairs.csv"
        path.write_text("".join(f"{line}\r\n" for line in lines), encoding="utf-8")
        return path

    return write


def test_every_row_is_two_questions(save):
    mother, child, _, senior = parent_child(save(HEADER, *ROWS))
    assert (mother.prompt, mother.subject, mother.answer) == ("Ada Marsh's mother is", "Ada Marsh", " Berta Kerner.")
    assert (child.prompt, child.subject, child.answer) == ("Berta Kerner's child is", "Berta Kerner", " Ada Marsh.")
    assert (mother.id, child.id) == ("parent-child-0000-p2d", "parent-child-0000-d2p")
    assert not mother.is_reverse
    assert child.is_reverse
    assert senior.prompt == "Hugo Skolden, Sr.'s child is"
    for fact in (mother, child, senior):
        assert fact.template.replace("<subject>", fact.subject) == fact.prompt
        assert fact.prompt[slice(*fact.subject_span)] == fact.subject
    assert (child.person, child.description) == (mother.person, mother.description) == ("Ada Marsh", "Berta Kerner")


def test_the_file_is_a_source_with_a_pair_for_each_child_and_parent(save):
    source = open_source(str(save(HEADER, *ROWS, ROWS[0])))
    assert [fact.asked for fact in source.facts] == ["p2d", "d2p"] * 3
    assert source.length is None
    pairs = source.fact_pairs()
    assert [(forward.id[-8:], reverse.id[-8:]) for forward, reverse in pairs] == [
        ("0000-p2d", "0000-d2p"),
        ("0001-p2d", "0001-d2p"),
    ]
    assert {forward.person for forward, _ in pairs} == {"Ada Marsh", "Emil Tunton"}  # the group of a pair: the child
    with pytest.raises(ValueError, match="no person is trained d2p only and has both"):
        source.fact_pairs("d2p")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "line 1: the header lacks child, parent, parent_type"),
        (("child,parent", "a,b"), "line 1: the header lacks parent_type"),
        ((HEADER,), "contains no pairs"),
        ((HEADER, ROWS[0], "Ada Marsh,,father,,"), "line 3: child 'Ada Marsh', parent ''"),
        ((HEADER, "Ada Marsh,Berta Kerner,aunt,,"), "line 2: .*parent_type 'aunt'; .* is mother or father"),
        ((HEADER, "Ada Marsh"), "line 2: child 'Ada Marsh', parent '', parent_type ''"),
    ],
)
def test_other_files_are_refused(save, lines, message):
    with pytest.raises(ValueError, match=message):
        parent_child(save(*lines))


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere\.csv; it should be a copy of https"):
        parent_child(tmp_path / "nowhere.csv")
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"parent_child_pairs\.csv is not in the cache.*parent_child\(path\)"):
        parent_child()


def test_the_published_file_is_verified(save, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    host, folder = "raw.githubusercontent.com", celebrities.URL.split("/", 3)[3].rpartition("/")[0]
    kept = cached_assets_path("diffusion_lens", host, folder, assets_dir=str(tmp_path)) / "parent_child_pairs.csv"
    save(HEADER, *ROWS).rename(kept)
    with pytest.raises(ValueError, match=r"is not the published .*expected 59d18161"):
        parent_child()
    monkeypatch.setattr("diffusion_lens.data.download.sha256_of_file", lambda path: celebrities.SHA256)
    assert len(parent_child()) == 4
