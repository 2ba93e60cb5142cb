"""Every generator of reasoning-gym through the reward `generated`: is its own answer paid, and which tricks are?

    python benchmarks/gym_scoring.py [GENERATOR ...]

For each generator a line: how it is scored, how many of its rows' own answers are paid, how many of the tricks, and
which.  The last lines count them, with the seconds that it took.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping

from posttrain.rewards.generated_reward import GeneratedReward, dataset_key
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.resources import Resources
from posttrain.tasks.row_files.generator_rows import rows_or_error

REQUEST = {"options": {}, "seed": 0, "size": 3}
COLUMNS = ("generator", "scorer", "answer", "entry")
SPREAD = '__import__("os").system("true")'


def tricks(answer: str, question: str) -> dict[str, str]:
    """Texts that deserve nothing."""
    return {
        "nothing in tags": "<answer></answer>",
        "a full stop": "<answer>.</answer>",
        "zero": "<answer>0</answer>",
        "no": "<answer>No</answer>",
        "a word": "<answer>banana</answer>",
        "empty list": "<answer>[]</answer>",
        "empty object": "<answer>{}</answer>",
        "the question": f"<answer>{question}</answer>",
        "the answer among words": f"<answer>It may be {answer} or banana</answer>",
        "the answer twice": f"<answer>{answer} {answer}</answer>",
        "code": f"<answer>{SPREAD}</answer>",
        "a format string": "<answer>{0.__class__}</answer>",
        "not a number": "<answer>nan</answer>",
        "infinity": "<answer>inf</answer>",
        "a tower": "<answer>9**9**9**9</answer>",
        "four numbers": "<answer>6*4*1*1</answer>",
    }


def known_generators() -> list[str]:
    """Their names, in order."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})


def paid(
    texts: Mapping[str, str], row: Mapping[str, object], reward: GeneratedReward, resources: Resources
) -> set[str]:
    """The texts that earn a full reward."""
    columns = {name: [row[name]] * len(texts) for name in COLUMNS}
    verdicts = reward.scores(
        resources, completions=list(texts.values()), finish_reasons=["stop"] * len(texts), **columns
    )
    said = zip(texts, verdicts, strict=True)
    return {name for name, verdict in said if isinstance(verdict, Graded) and (verdict.score or 0) >= 1}


def tricks_paid(row: Mapping[str, object], reward: GeneratedReward, resources: Resources) -> set[str]:
    """The tricks that earn a full reward, but for one that is the row's own answer."""
    own = f"<answer>{row['answer']}</answer>"
    given = tricks(str(row["answer"]), str(row["prompt"]))
    return paid({trick: text for trick, text in given.items() if text != own}, row, reward, resources)


def main() -> None:
    """Print the table."""
    totals: Counter[str] = Counter()
    began = time.perf_counter()
    reward = GeneratedReward(cpu_seconds=1.0)
    made_of = {name: list(rows_or_error({**REQUEST, "generator": name})) for name in sys.argv[1:] or known_generators()}
    refused = {name: rows[0] for name, rows in made_of.items() if "error" in rows[0]}
    rows_of = {name: rows for name, rows in made_of.items() if name not in refused}
    with Resources() as resources:
        resources.memory(reward, set[str]).update(dataset_key(name, {}) for name in rows_of)  # one server for all
        for name, rows in rows_of.items():
            own = [row for row in rows if isinstance(row["answer"], str)]
            answers = [paid({"own": f"<answer>{row['answer']}</answer>"}, row, reward, resources) for row in own]
            right = sum(map(bool, answers))
            found = set().union(*(tricks_paid(row, reward, resources) for row in rows))
            scorer = str(rows[0]["scorer"])
            totals.update({"generators": 1, scorer: 1, "own": len(own), "own paid": right, "tricks paid": len(found)})
            named = ", ".join(sorted(found)) or "-"
            print(f"{name:26} {scorer:11} {right}/{len(own)} own answers paid; tricks: {named}", flush=True)
    for name, said in refused.items():
        print(f"{name:26} refused: {said.get('says')}")
    print(f"{dict(totals)}, {len(refused)} refused, in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
