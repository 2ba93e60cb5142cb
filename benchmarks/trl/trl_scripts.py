"""Runs benchmarks/trl/scripts/*.py with TRL, as they are, and keeps what they log in tests/data/trl_scripts.json.

python benchmarks/trl/trl_scripts.py                     # in TRL's environment, which gets peft and bitsandbytes for it
python benchmarks/trl/trl_scripts.py --python PYTHON     # in one of your own

The suite runs the same scripts with one line changed: `from trl import` to `from posttrain.trl import`.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from _trl_tests_stand_in import save_model
from _vs_trl_environment import python_with_peft
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE / "scripts").glob("*.py"))
NAMES = HERE.parents[1] / "tests" / "data" / "trl_scripts.json"
RUN = """
import json, os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))  # as `python SCRIPT` has it
made = runpy.run_path(sys.argv[1])
print("LOGGED", json.dumps([sorted(entry) for entry in made["trainer"].state.log_history]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter with TRL, peft and bitsandbytes")
    python = parser.parse_args().python or python_with_peft()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "models" / "policy", Qwen2ForCausalLM)
        save_model(Path(folder) / "models" / "scorer", Qwen2ForSequenceClassification)
        for script in SCRIPTS:
            results[script.stem] = result(python, script, folder)
            print(script.stem, results[script.stem], flush=True)
    NAMES.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def result(python: Path, script: Path, folder: str) -> dict[str, object]:
    """The names in each entry of the log, or the error that ends the script."""
    command = [str(python), "-c", RUN, str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    logged = [line for line in done.stdout.splitlines() if line.startswith("LOGGED ")]
    if logged:
        return {"logged": json.loads(logged[0].removeprefix("LOGGED "))}
    return {"error": done.stderr.strip().splitlines()[-1]}


if __name__ == "__main__":
    main()
