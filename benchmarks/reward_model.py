"""Pairs of Countdown answers of which the true reward prefers one, and how long a reward model takes to learn them.

    python benchmarks/reward_model.py --write pairs.jsonl          20,000 pairs, made and written, nothing trained
    python benchmarks/reward_model.py                              the same pairs learned once: seconds, accuracy
    python benchmarks/reward_model.py --writer bundled --write own.jsonl --num-pairs 4000

The chosen answer solves its problem and the rejected one does not.  A search says by `!` that it has found the target;
here a full stop stands in its place, for a reward model reads nothing else where that is enough.  `demonstrator`
writes searches as the bundled model was taught them, with their mistakes, in seconds; `bundled` has the bundled model
sample at temperature 1, which takes longer.  Problems are those of `recipes/countdown-tiny.yaml` that are trained on:
numbers that are held out there are in no pair.  The same arguments give the same pairs.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from random import Random
from time import perf_counter, process_time

import posttrain
from posttrain.config import RewardModelConfig
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions
from posttrain.options.task import CountdownOptions, Demonstrator
from posttrain.rewards.countdown import Outcome, countdown_outcome
from posttrain.tasks.countdown_task import CountdownTask, demonstrate

TRIES = 8
"""Answers to a problem, of which pairs are made."""
PER_PROBLEM = 2
"""Most pairs of a problem."""
AT_ONCE = 256
"""Problems that the bundled model is asked together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writer", default="demonstrator", choices=["demonstrator", "bundled"])
    parser.add_argument("--num-pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", metavar="FILE", default="")
    given = parser.parse_args()
    began = perf_counter()
    rows = list(islice(pairs(given.writer, given.seed), given.num_pairs))
    print(f"{len(rows)} pairs of {len({row['prompt'] for row in rows})} problems in {perf_counter() - began:.0f} s")
    if given.write:
        Path(given.write).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        print(learned(rows, Path(folder) / "run"))


def pairs(writer: str, seed: int) -> Iterator[Mapping[str, str]]:
    """Rows without end: a right answer and a wrong one to one problem."""
    policy = load_policy(ModelOptions())
    task = CountdownTask(CountdownOptions(prompt_style="compact"), TokenizerRenderer(policy.tokenizer), seed=seed)
    for first in count(step=AT_ONCE):
        problems = [task.training_problem(index) for index in range(first, first + AT_ONCE)]
        prompts = [task.prompt(problem, "").text for problem in problems]
        if writer == "bundled":
            groups = posttrain.generate(policy, prompts, group_size=TRIES, seed=seed + first, max_completion_tokens=200)
            answers = [[rollout.text for rollout in group.rollouts] for group in groups]
        else:
            drawn = (Random(f"pairs {seed} {index}") for index in range(first, first + AT_ONCE))
            answers = [
                [demonstrate(problem, random, Demonstrator()) for _ in range(TRIES)]
                for problem, random in zip(problems, drawn, strict=True)
            ]
        for problem, prompt, said in zip(problems, prompts, answers, strict=True):
            said = [text.replace("!", ".") for text in said]
            found = {text: countdown_outcome(problem, text) is Outcome.CORRECT for text in said}
            right, wrong = ([text for text in found if found[text] is each] for each in (True, False))
            for chosen, rejected in islice(zip(right, wrong, strict=False), PER_PROBLEM):
                yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def learned(rows: list[Mapping[str, str]], folder: Path) -> str:
    """What one epoch takes and gives, by the recipe."""
    config = posttrain.load_recipe(
        "reward-model-countdown",
        kind=RewardModelConfig,
        task={"path": "", "held_out_share": 0.05},
        run={"folder": str(folder)},
    )
    began, worked = perf_counter(), process_time()
    after = posttrain.train_reward_model(config, rows=rows).summary["after"]
    assert isinstance(after, dict)
    low, high = after["accuracy_interval"]
    taken = f"{perf_counter() - began:.0f} s in all, {process_time() - worked:.0f} s of processor"
    return (
        f"{taken}: {after['accuracy']:.3f} [{low:.3f}, {high:.3f}] of {after['num_pairs']} held-out pairs in the right"
        f" order, calibration error {after['calibration_error']:.3f}"
    )


if __name__ == "__main__":
    main()
