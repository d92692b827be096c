"""The page on your own model runs, unchanged, on small random checkpoints in the formats that it names."""

from pathlib import Path
from typing import Any

import pytest
from small_repositories import dream_words, llada_words, ours, shard
from snippets import run_python, same_output

PAGE = Path(__file__).parents[1] / "docs" / "your_own_model.md"
CHAT_ML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub with LLaDA-8B-Instruct and Dream-v0-Instruct-7B; the result lists the repositories that were asked for."""
    repositories = {
        "GSAI-ML/LLaDA-8B-Instruct": tmp_path / "llada",
        "Dream-org/Dream-v0-Instruct-7B": tmp_path / "dream",
    }
    for family, folder in zip(("llada", "dream"), repositories.values(), strict=True):
        ours(folder, family, n_ctx=512)
        shard(folder)
    llada_words(tmp_path / "llada")
    dream_words(tmp_path / "dream", chat_template=CHAT_ML)
    asked = []

    def snapshot(repo: str, **settings: Any) -> str:
        asked.append(repo)
        return str(repositories[repo])

    monkeypatch.setattr("diffusion_lens.loading.hub.snapshot_download", snapshot)
    return asked


@pytest.mark.usefixtures("undrawn_figures")
def test_the_page_runs_on_small_checkpoints(
    published: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block, said in run_python(PAGE):
        told = said if block.output is None else block.output  # what depends on the weights is not on the page
        assert same_output(said, told), f"line {block.line} prints\n{said}\nand the page says\n{told}"
    assert {*published} == {"GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"}
