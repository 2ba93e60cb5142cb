"""The page as one file with its style and scripts; its policy allows only these, by their digests."""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from posttrain.viewer.exported.module_bundle import bundled_script

PAGE = Path(str(files("posttrain") / "server" / "viewer_page"))
STYLE = re.compile(r'<link rel="stylesheet" href="/page/([\w./-]+)">\n')
SCRIPT = re.compile(r'<script src="/page/([\w./-]+)" (defer|type="module")></script>\n')
ENDS_ELEMENT = re.compile(r"</(?=script|style)|<!--", re.IGNORECASE)
"""Text that would end a script or style, or change how the rest is parsed."""
ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def page_html(responses: Mapping[str, str], shared: Iterable[str] = ()) -> str:
    """The page with responses by address and the values that they share, each as JSON text of `embedded_json`."""
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    styles = [safe_inside((PAGE / name).read_text(encoding="utf-8")) for name in STYLE.findall(index)]
    scripts = [script(name, kind) for name, kind in SCRIPT.findall(index)]
    inside = "".join(f"<style>{style}</style>\n" for style in styles)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy(styles, scripts)}">\n'
    head, _, rest = SCRIPT.sub("", STYLE.sub("", index)).partition("</head>")
    body, _, end = rest.partition("</body>")
    data = ",".join(f"{embedded_json(path)}:{response}" for path, response in responses.items())
    data = f'{{"shared":[{",".join(shared)}],"responses":{{{data}}}}}'
    embedded = f'<script type="application/json" id="responses">{data}</script>\n'
    code = "".join(f"<script>{each}</script>\n" for each in scripts)
    opened, charset, more = head.partition('<meta charset="utf-8">\n')
    return f"{opened}{charset}{meta}{more}{inside}</head>{body}{embedded}{code}</body>{end}"


def script(name: str, kind: str) -> str:
    if kind == "defer":
        return safe_inside((PAGE / name).read_text(encoding="utf-8"))
    modules = {file.stem: file.read_text(encoding="utf-8") for file in PAGE.glob("*.js")}
    return safe_inside(bundled_script(modules, Path(name).stem))


def safe_inside(code: str) -> str:
    """Code that cannot end its tag: in strings and patterns of scripts, `\\/` and `\\!` are the same characters."""
    return ENDS_ELEMENT.sub(lambda found: f"{found[0][0]}\\{found[0][1:]}", code)


def policy(styles: list[str], scripts: list[str]) -> str:
    """The content-security policy: these styles and scripts, pictures inside the file, and no request."""
    allowed = [" ".join(f"'sha256-{digest(each)}'" for each in part) for part in (styles, scripts)]
    return (
        f"default-src 'none'; style-src {allowed[0]}; script-src {allowed[1]}; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def digest(code: str) -> str:
    return b64encode(sha256(code.encode()).digest()).decode()


def embedded_json(value: object) -> str:
    """JSON that is safe inside a script element: ASCII, so halves of surrogate pairs survive, without tags."""
    text = ENCODER.encode(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
