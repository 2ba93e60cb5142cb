"""The viewer's page as files: vendored libraries are what npm ships, modules bundle in order, and texts stay texts."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from posttrain.viewer.rollout_page import AFTER_UPDATES, GAPS, OF_ROLLOUT, OF_UPDATE

PAGE = Path(__file__).parents[1] / "src" / "posttrain" / "server" / "viewer_page"
MODULES = sorted(PAGE.glob("*.js"))
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)

FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|dangerously|style=\"|https?://"
)


def vendored() -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((PAGE / "vendor" / "VENDORED.json").read_text())
    return found


def test_each_vendored_file_is_the_one_of_its_npm_package_and_comes_with_its_licence() -> None:
    for entry in vendored():
        content = (PAGE / "vendor" / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], entry["file"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", entry["version"])
        licence = (PAGE / "vendor" / entry["licence_file"]).read_text()
        assert {"MIT": "MIT License", "Apache-2.0": "Apache License"}[entry["licence"]].lower() in licence.lower()
    named = {entry["file"] for entry in vendored()} | {entry["licence_file"] for entry in vendored()}
    assert {path.name for path in (PAGE / "vendor").iterdir()} == named | {"VENDORED.json"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module_imports_names_that_exist_and_never_puts_text_in_as_markup(module: Path) -> None:
    content = module.read_text()
    assert len(content.splitlines()) <= 400
    imports = re.findall(r"^\s*import\b|\bimport\(", content, re.MULTILINE)
    assert len(imports) == len(IMPORT.findall(content)), "only `import { a } from`"
    assert len(re.findall(r"^export\b", content, re.MULTILINE)) == len(EXPORT.findall(content))
    for names, file in IMPORT.findall(content):
        exported = EXPORT.findall((PAGE / file).read_text())
        missing = set(names.split(", ")) - set(exported)
        assert not missing, f"{file} does not export {missing}"
    assert re.findall(FORBIDDEN, content) == []


def test_each_fixed_scale_is_of_a_quantity_that_the_server_sends() -> None:
    content = (PAGE / "colours.js").read_text().partition("const SCALES = {")[2].partition("\n};")[0]
    named = set(re.findall(r"(\w+): (?:[A-Z]+|\{)", content))
    sent = {each.column for each in (*OF_ROLLOUT, *OF_UPDATE, *AFTER_UPDATES.values())} | {
        f"{column}_gap" for column, _ in GAPS
    }
    assert named - sent == {"reward", "advantage"}  # of whole completions
    assert {f"{column}_gap" for column, _ in GAPS} <= named


def test_only_one_module_fetches() -> None:
    assert [path.name for path in MODULES if "fetch(" in path.read_text()] == ["api.js"]


def test_the_modules_import_one_another_in_one_order() -> None:
    imports = {path.name: {file for _, file in IMPORT.findall(path.read_text())} for path in MODULES}
    placed: set[str] = set()
    while left := {name for name, needs in imports.items() if name not in placed and needs <= placed}:
        placed |= left
    assert placed == set(imports), f"a cycle among {set(imports) - placed}"


def test_the_page_itself_has_no_script_and_no_style_of_its_own() -> None:
    content = (PAGE / "index.html").read_text()
    assert re.findall(r"<script[^>]*>(?!</script>)|<style|style=|\son\w+=", content) == []
    addresses = re.findall(r'(?:src|href)="([^"]+)"', content)
    for address in addresses:
        assert address == "data:," or (PAGE / address.removeprefix("/page/")).is_file(), address
