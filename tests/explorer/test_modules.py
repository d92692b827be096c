"""`pages.page`: the explorer's ES modules as the one module of a page."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffusion_lens.pages import page as modules

EXPLORER = Path(modules.__file__).parent / "explorer"
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the modules of another explorer, by name without the ending; "/" in a name is "__"."""
    monkeypatch.setattr(modules, "files", lambda package: tmp_path)

    def write(**texts: str) -> None:
        for name, text in {"explorer.css": "", **{f"{name}.js": text for name, text in texts.items()}}.items():
            path = tmp_path / "explorer" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        modules.explorer_files.cache_clear()

    yield write
    modules.explorer_files.cache_clear()


def test_modules_stand_after_those_that_they_import_and_once(write: Write) -> None:
    write(
        mount='import { b } from "./b.js";\nimport { c } from "./views/c.js";\nexport const mount = () => b + c;\n',
        b='import { a } from "./a.js";\nexport const b = a;\n',
        views__c='import { a } from "../a.js";\nimport { b } from "../b.js";\nexport const c = a + b;\n',
        a="export const a = 1;\n",
        unused="export const unused = 1;\n",
    )
    module, _ = modules.explorer_files()
    assert re.findall(r"const (\w+)", module) == ["a", "b", "c", "mount"]


def test_two_modules_that_define_one_name_are_refused(write: Write) -> None:
    write(
        mount='import { a } from "./a.js";\nimport { b } from "./b.js";\nimport { c } from "./c.js";\n'
        "const same = a + b + c;\n",
        a="export const a = 1;\nfunction same() {}\n",
        b="/** @type {number} */ let again = 1;\nexport const b = again;\n",
        c="/** @type {number[]} */ const again = [1];\nexport const c = again;\n",
    )
    with pytest.raises(ValueError, match=r"define same, again; rename all but one"):
        modules.explorer_files()


@pytest.mark.parametrize("tag", ["</script>", "</STYLE>", "<!-- "])
def test_a_module_that_would_end_its_element_is_refused(write: Write, tag: str) -> None:
    write(mount=f'const tag = "{tag}";\n')
    with pytest.raises(ValueError, match="would end its element"):
        modules.explorer_files()


def test_an_import_of_several_lines_and_an_export_of_each_kind_are_taken_out() -> None:
    text = (
        'import {\n  a,\n  b,\n} from "./a.js";\nexport async function f() {}\nexport function* g() {}\n'
        'export class C {}\nexport let x = "export const";\nexport const y = 1;\n'
        "/** @type {{n: number}} */ export const z = {};\nexport {};\n"
    )
    assert modules.standing_alone(text) == (
        'async function f() {}\nfunction* g() {}\nclass C {}\nlet x = "export const";\nconst y = 1;\n'
        "/** @type {{n: number}} */ const z = {};\n"
    )


def test_the_explorer_is_all_of_its_modules_without_imports_and_exports() -> None:
    module, style = modules.explorer_files()
    assert re.findall(r"^import\b.*", module, re.MULTILINE) == []
    assert {
        line for line in re.findall(r"^export\b.*", module, re.MULTILINE) if not line.startswith("export default")
    } == set()
    for path in EXPLORER.rglob("*.js"):
        text = modules.standing_alone(path.read_text(encoding="utf-8")).strip()
        assert (text in module) == (path.name != "types.js"), path.name
    assert style == (EXPLORER / "explorer.css").read_text(encoding="utf-8")
