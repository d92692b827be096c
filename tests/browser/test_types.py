"""The types that the explorer's modules state in JSDoc, checked by TypeScript."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TSC = ROOT / ".venv" / "axe" / "node_modules" / "typescript" / "bin" / "tsc"
EXPLORER = ROOT / "diffusion_lens" / "pages" / "explorer"
HOW = (
    "--noEmit --allowJs --checkJs --target es2022 --lib es2023,dom,dom.iterable --module es2022 "
    "--moduleResolution bundler --noImplicitThis --noUnusedLocals"
)


def complaints(*files: Path) -> list[str]:
    assert TSC.exists(), f"TypeScript is not at {TSC}: run `make browser`, which installs it with npm"
    command = ["node", str(TSC), *HOW.split(), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300).stdout.splitlines()


def test_the_modules_have_the_types_that_they_state() -> None:
    assert complaints(*sorted(EXPLORER.rglob("*.js"))) == []


def test_a_wrong_type_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.js"
    wrong.write_text(
        f'import {{ shorten }} from "{EXPLORER}/words.js";\n/** @type {{number}} */ export const n = shorten("a", 1);\n'
    )
    (complaint,) = complaints(wrong)
    assert "Type 'string' is not assignable to type 'number'" in complaint
