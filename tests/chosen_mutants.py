"""Mistakes that a person would make in the maths, the table of algorithms and the loop; some test must fail for each.

tests/mutants.py changes every operator and number of the maths; this adds exchanged arguments, lost options, wrong
defaults and guards left out.  Each is tried in a copy of the sources, with the tests of its file, by a child of one
process that has already imported torch.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 — before the fork, so that no child pays for it
from chosen_mutant_tests import TESTS
from other_policy_mutants import OTHER_POLICIES

ROOT = Path(__file__).parents[1]

# (file, text, its replacement, which of its occurrences: 0 is the first)
MUTANTS: list[tuple[str, str, str, int]] = [
    *OTHER_POLICIES,
    ("algorithms/advantages.py", " & (weights != 0)[:, None, None]", "", 0),
    ("algorithms/advantages.py", "weights[:, None, None] * z", "z", 0),
    ("algorithms/advantages.py", "total.abs() > ROUNDING * unit", "total == total", 0),
    ("algorithms/advantages.py", "counted.any(dim=0).sum()", "total.numel() + 0 * counted.sum()", 0),
    ("algorithms/advantages.py", "deviation=deviation, epsilon=epsilon) for", "epsilon=epsilon) for", 0),
    ("algorithms/advantages.py", "grades.clipped[grades.weights != 0]", "grades.clipped", 0),
    ("algorithms/advantages.py", "grades.clipped[grades.weights != 0]", "grades.scores[grades.weights != 0]", 0),
    ("rewards/grading/call_log.py", "self.close()\n", "pass\n", 0),
    ("rewards/grading/call_log.py", "self.over = True", "pass", 0),
    ("rewards/grading/call_log.py", "if not math.isnan(number):", "if True:", 0),
    ("rewards/grading/gates.py", "terms.gate in found", "True", 0),
    ("rewards/grading/gates.py", "if grades.num_failures:", "if False:", 0),
    ("rewards/grading/gates.py", "or bool(terms.weight_to)", "", 0),
    ("algorithms/reward_shaping.py", "~truncated & ", "", 0),
    ("algorithms/reward_shaping.py", "stopped.min()", "stopped.mean()", 0),
    ("algorithms/reward_shaping.py", "if cap and len(stopped)", "if len(stopped)", 0),
    ("algorithms/ppo.py", "deviation >= LEAST_DEVIATION", "deviation > 0", 0),
    (
        "algorithms/reward_shaping.py",
        "statistics.deviation >= LEAST_DEVIATION",
        "statistics.deviation > 0",
        0,
    ),
    ("training/credited_step.py", "variance >= LEAST_DEVIATION**2", "variance > 0", 0),
    ("training/credited_step.py", " and state.fitted", "", 0),
    ("training/optimizer.py", "if int(number) in places:", "if True:", 0),
    ("training/pair_updates.py", "0 if prompt in prompts else len(prompt)", "len(prompt)", 0),
    ("algorithms/advantages.py", "torch.where(rewards.isnan(), 0.0, rewards)", "rewards", 0),
    ("algorithms/advantages.py", "rewards.reshape(1, -1)", "rewards", 0),
    ("algorithms/advantages.py", "torch.inf).amin", "0.0).amin", 0),
    ("algorithms/advantages.py", "amin(dim=1, keepdim=True)", "amin()", 0),
    ("algorithms/advantages.py", "/ scored.sum(dim=1, keepdim=True)", "/ scored.shape[1]", 0),
    ("algorithms/advantages.py", "torch.where(scored, above - mean, 0.0)", "above - mean", 0),
    ("algorithms/advantages.py", '= "population"', '= "sample"', 0),
    (
        "algorithms/advantages.py",
        "centred.abs().amax(dim=1, keepdim=True)",
        "centred.amax(dim=1, keepdim=True) * 0 + 1",
        0,
    ),
    ("algorithms/advantages.py", "(~rewards.isnan()).sum(dim=1, keepdim=True)", "rewards.shape[1]", 0),
    (
        "algorithms/advantages.py",
        "(scaled.square().sum(dim=1, keepdim=True) / degrees).sqrt()",
        "scaled.abs().mean(1, True)",
        0,
    ),
    ("algorithms/advantages.py", "/ degrees).sqrt()", "/ degrees)", 0),
    ("algorithms/advantages.py", "scaled / (spread + epsilon / largest)", "scaled / (spread + epsilon + 1e-8)", 0),
    ("algorithms/advantages.py", "(largest > 0, scaled / (spread", "(largest == largest, scaled / (spread", 0),
    ("algorithms/advantages.py", "(~rewards.isnan()).sum(dim=1, keepdim=True)", "rewards.shape[1] + 0 * rewards", 1),
    ("algorithms/advantages.py", "num_scored > 1", "num_scored > 0", 0),
    ("algorithms/advantages.py", "* num_scored / (num_scored - 1)", "* 1.0", 0),
    ("algorithms/advantages.py", "group_centred(rewards) != 0", "group_centred(rewards) > 1", 0),
    ("algorithms/losses.py", "torch.where(scored, lengths, 0).sum()", "lengths.sum()", 0),
    ("algorithms/losses.py", "torch.where(scored, lengths, 0).sum()", "lengths", 0),
    ("algorithms/losses.py", "scored.sum() * lengths", "len(scored) * lengths", 0),
    ("algorithms/losses.py", "scored.sum() * lengths", "lengths", 0),
    (
        "algorithms/losses.py",
        "_shares(scored, scored.sum())",
        "_shares(scored, scored.sum() * 0 + len(scored))",
        0,
    ),
    ("algorithms/losses.py", "scored.sum() * max_completion_tokens", "scored.sum() * lengths.max()", 0),
    ("algorithms/losses.py", "scored.sum() * max_completion_tokens", "len(scored) * scored.sum()", 0),
    (
        "algorithms/losses.py",
        "torch.where(scored & (divisor > 0), 1 / divisor.double(), 0.0)",
        "1 / divisor.double() * scored",
        0,
    ),
    ("algorithms/losses.py", "divisor.double()", "divisor.float()", 0),
    ("algorithms/kl.py", "return logprobs - reference_logprobs", "return reference_logprobs - logprobs", 0),
    ("algorithms/kl.py", ".square() / 2", ".square()", 0),
    ("algorithms/kl.py", "reference_logprobs - logprobs\n", "logprobs - reference_logprobs\n", 0),
    ("algorithms/kl.py", "torch.expm1(toward_reference)", "(torch.exp(toward_reference) - 1)", 0),
    ("models/logprobs.py", "logits.log_softmax(dim=-1)", "logits", 0),
    ("models/logprobs.py", "reference_logits.log_softmax(dim=-1)", "reference_logits", 0),
    ("models/logprobs.py", "logprobs.exp() * (", "reference_logprobs.exp() * (", 0),
    ("algorithms/kl.py", '"k2": k2', '"k2": k3', 0),
    ("algorithms/losses.py", "math.log1p(-self.low)", "-math.log1p(self.low)", 0),
    ("algorithms/losses.py", "else -math.inf", "else -1.0", 0),
    ("algorithms/losses.py", "math.log1p(self.high)", "self.high", 0),
    ("algorithms/losses.py", "ClipRange(low=1.0, high=math.inf)", "ClipRange(low=0.9, high=math.inf)", 0),
    ("algorithms/losses.py", "ClipRange(low=1.0, high=math.inf)", "ClipRange(low=1.0, high=10.0)", 0),
    ("algorithms/losses.py", 'level: RatioLevel = "token"', 'level: RatioLevel = "sequence_mean"', 0),
    ("algorithms/losses.py", 'level: RatioLevel = "token"', 'level: RatioLevel = "sequence_mean"', 1),
    ("algorithms/losses.py", 'level: RatioLevel = "token"', 'level: RatioLevel = "sequence_mean"', 2),
    ("algorithms/losses.py", "own = logprobs - behaviour_logprobs", "own = behaviour_logprobs - logprobs", 0),
    ("algorithms/losses.py", "total / lengths", "total / len(rollout)", 0),
    ("algorithms/losses.py", "torch.where(unwanted, clip.log_lowest, -inf)", "inf * 0 + clip.log_lowest", 0),
    ("algorithms/losses.py", "inf.clamp(max=clip.log_dual)", "inf", 0),
    (
        "algorithms/losses.py",
        "torch.where(unwanted, inf.clamp(max=clip.log_dual), clip.log_highest)",
        "torch.where(advantages <= 0, inf, 0.2)",
        0,
    ),
    ("algorithms/losses.py", "unwanted, clip.log_lowest", "~unwanted, clip.log_lowest", 0),
    ("algorithms/losses.py", "clip.log_lowest, -inf", "-clip.log_highest, -inf", 0),
    ("algorithms/losses.py", "log_dual), clip.log_highest", "log_dual), -clip.log_lowest", 0),
    ("algorithms/losses.py", "-bounded.exp() * advantages", "-(1 + bounded) * advantages", 0),
    ("algorithms/losses.py", ".exp().detach()", ".exp()", 0),
    ("algorithms/losses.py", "ratio.clamp(clip.log_lowest, clip.log_highest)", "ratio.clamp(max=clip.log_highest)", 0),
    ("algorithms/losses.py", "ratio.clamp(clip.log_lowest, clip.log_highest)", "ratio.clamp(min=clip.log_lowest)", 0),
    ("algorithms/losses.py", "-weight * advantages * logprobs", "-weight * advantages * ratio", 0),
    ("algorithms/losses.py", "log_ratio > clip.log_highest", "log_ratio > -clip.log_lowest", 0),
    ("algorithms/losses.py", "log_ratio < clip.log_lowest", "log_ratio < -clip.log_highest", 0),
    ("algorithms/losses.py", "ratio.sum()", "ratio.median()", 0),
    ("algorithms/losses.py", "ratio.min()", "ratio.max()", 0),
    ("algorithms/losses.py", "ratio.max()", "ratio.mean()", 0),
    ("algorithms/losses.py", "torch.expm1(log_ratio.double()) - ", "torch.expm1(log_ratio.double()) + ", 0),
    ("algorithms/credit.py", "shaping(rewards, evidence.lengths", "shaping(rewards, evidence.lengths * 0", 0),
    ("algorithms/credit.py", "part[0] if bool((part == part[0]).all()) else part.mean()", "part.mean()", 0),
    ("algorithms/credit.py", "else part.mean()", "else part[0]", 0),
    ("algorithms/terms.py", "clip=clip, level=level)", "clip=clip)", 0),
    ("algorithms/terms.py", "view.rollout, level=level)", "view.rollout)", 0),
    ("algorithms/terms.py", "vanishes_without_advantage=True", "vanishes_without_advantage=False", 0),
    ("algorithms/terms.py", "Need.FULL_KL if full else", "Need.FULL_KL if not full else", 0),
    (
        "algorithms/algorithm.py",
        "term.coefficient * term.losses(view, owner=owner)",
        "term.losses(view, owner=owner)",
        0,
    ),
    ("algorithms/terms.py", 'return self.metric or f"loss/{self.name}"', "return self.name", 0),
    ("algorithms/terms.py", "function(view.seen_with(self.needs))", "function(view)", 0),
    ("algorithms/terms.py", 'f"columns.{ratio_to}_logprobs"', '"columns.behaviour_logprobs"', 0),
    ("algorithms/terms.py", "value.shape == (length,)", "len(value) == length", 0),
    ("algorithms/algorithm.py", " & (weights >= 0)", "", 0),
    ("algorithms/algorithm.py", "int(evidence.rollout[token])", "token", 0),
    ("algorithms/algorithm.py", "sum(others, ", "sum(others[:1], ", 0),
    ("algorithms/algorithm.py", "({Need.REFERENCE_LOGPROBS} if self.kl_penalty is not None else set())", "set()", 0),
    ("algorithms/algorithm.py", "{Need.REFERENCE_LOGPROBS, Need.FULL_KL}", "{Need.FULL_KL}", 0),
    ("algorithms/algorithm.py", "{Need.REFERENCE_LOGPROBS, Need.FULL_KL}", "{Need.REFERENCE_LOGPROBS}", 0),
    ("algorithms/table.py", "kl_penalty=None if in_loss else kl", "kl_penalty=None", 0),
    ("algorithms/reward_shaping.py", "lengths.to(rewards.dtype)", "lengths", 0),
    ("algorithms/reward_shaping.py", "into_buffer.clamp(0, 1)", "into_buffer.clamp(max=1)", 0),
    ("algorithms/reward_shaping.py", "overlong.penalty * into", "into", 0),
    ("algorithms/reward_shaping.py", "overlong.buffer * max_completion_tokens", "overlong.buffer", 0),
    ("algorithms/reward_shaping.py", "Le(1)] = 0.2", "Le(1)] = 0.25", 0),
    ("algorithms/reward_shaping.py", "penalty: PositiveFloat = 1.0", "penalty: PositiveFloat = 0.5", 0),
    (
        "algorithms/table.py",
        "credit_at(credit, advantages.group_centred,",
        "credit_at(credit, advantages.group_zscore,",
        0,
    ),
    ("algorithms/advantages.py", "deviation=deviation, epsilon=epsilon", "epsilon=epsilon", 0),
    ("algorithms/table.py", "clip_high: NonNegative = 0.28", "clip_high: NonNegative = 0.2", 0),
    ("algorithms/table.py", "clip_low: Share = 3e-4", "clip_low: Share = 5e-4", 0),
    ("algorithms/table.py", "clip_high: NonNegative = 4e-4", "clip_high: NonNegative = 6e-4", 0),
    ("algorithms/table.py", "clip_high: NonNegative = 4.0", "clip_high: NonNegative = 5.0", 0),
    ("algorithms/table.py", "clip_low: Share = 1.0", "clip_low: Share = 0.9", 0),
    ("algorithms/table.py", '"sequence_mean" if sequence_ratio == "mean"', '"sequence_mean" if True', 0),
    *[
        ("algorithms/table.py", "ClipRange(low=clip_low, high=clip_high", "ClipRange(low=clip_high, high=clip_low", i)
        for i in range(5)
    ],
    *[("algorithms/table.py", ", ratio_to=ratio_to)", ")", i) for i in range(5)],
    ("algorithms/table.py", "group_zscore, shaping=shaping)", "group_zscore)", 0),
    *[("algorithms/table.py", "        kl=kl,\n", "        kl=None,\n", i) for i in range(7)],
    ("algorithms/table.py", "token_weights=losses.constant_length", "token_weights=losses.sum_over_sequence", 0),
    ("algorithms/table.py", "token_weights=losses.mean_over_tokens", "token_weights=losses.mean_over_sequences", 0),
    ("algorithms/table.py", "token_weights=losses.mean_over_sequences", "token_weights=losses.mean_over_tokens", 0),
    ("algorithms/table.py", "token_weights=losses.mean_over_tokens", "token_weights=losses.mean_over_sequences", 1),
    ("algorithms/table.py", "resample=resample,\n", "\n", 0),
    ("binding.py", "value is None and option.default is REQUIRED", "False", 0),
    ("binding.py", 'raise UserError(f"{before}{error}") from None', "raise", 0),
    ("schemas.py", "strict=True", "strict=False", 0),
    ("schemas.py", 'ConfigDict(extra="forbid")', "ConfigDict()", 0),
    ("schemas.py", "None if value is None else check(value)", "check(value)", 0),
    ("schemas.py", "best >= 0.6", "best >= 0.0", 0),
    ("schemas.py", "best >= 0.6", "best >= 0.9", 0),
    ("algorithms/table.py", 'kl is not None and kl.place == "loss"', "kl is not None", 0),
    ("generation/sampling.py", "inside = torch.where(position < vocab, inside, 0.0)", "inside = inside + 0.0", 0),
    ("models/shared_prompt/families.py", "activation not in family.activations", "False", 0),
    ("models/shared_prompt/attention.py", "scale=kind.scale", "scale=None", 0),
    ("models/shared_prompt/families.py", 'windows="one"', 'windows="none"', 0),
    ("models/shared_prompt/families.py", 'windows="one"', 'windows="none"', 1),
    ("models/shared_prompt/families.py", "soft_cap=True", "soft_cap=False", 0),
    ("models/shared_prompt/families.py", "soft_cap=False", "soft_cap=True", 0),
    ("models/shared_prompt/families.py", 'scale="config"', 'scale="usual"', 0),
    ("models/shared_prompt/families.py", 'angles="by layer"', 'angles="same"', 0),
    ("models/shared_prompt/families.py", 'angles="some layers"', 'angles="same"', 0),
    ("models/shared_prompt/families.py", "norm_offset=1.0", "norm_offset=0.0", 0),
    ("models/shared_prompt/families.py", 'query_key_norm="whole"', 'query_key_norm="none"', 0),
    (
        "models/shared_prompt/decoder.py",
        "self.eps: float = getattr(config, self.family.norm_eps)",
        "self.eps: float = 1e-6",
        0,
    ),
    ("models/logprobs.py", "logits.amax(dim=1, keepdim=True)", "logits[:, :1].clone()", 0),
    (
        "models/logprobs.py",
        "torch.zeros_like(hidden, dtype=normalisers.dtype)",
        "torch.zeros_like(hidden, dtype=head.dtype)",
        0,
    ),
    (
        "rewards/grading/gates.py",
        "isinstance(base, Score) and not math.isnan(base.value)",
        "isinstance(base, Score)",
        0,
    ),
    (
        "options/reward.py",
        "min(1.0, max(0, step - 1) / self.over_steps)",
        "max(0, step - 1) / self.over_steps",
        0,
    ),
    ("runs/checkpoint.py", "os.fsync(content.fileno())", "pass", 0),
    ("runs/checkpoint.py", "files.sync_folder(folder)", "pass", 0),
    ("runs/checkpoint.py", "files.sync_folder(folder)", "pass", 1),
    ("runs/checkpoint.py", "sorted(scores)[-keep_last:]", "list(steps)[-keep_last:]", 0),
    ("runs/checkpoint.py", "if each < step and not files.damage(steps[each])", "if each < step", 0),
    ("runs/checkpoint.py", "for step in scores.keys() - kept", "for step in steps.keys() - kept", 0),
    ("runs/files.py", 'if content.get("sha256") != content_hash(rest)', "if False", 0),
    ("runs/files.py", ' or f"step-{step:06d}" != name', "", 0),
    ("runs/files.py", "if name and path.is_dir()", "if name", 0),
    ("runs/files.py", "file == Path(file).name", "True", 0),
    ("runs/files.py", "return dict(sorted(steps.items()))", "return steps", 0),
    ("records.py", "self.num_failures + other.num_failures", "self.num_failures", 0),
    ("records.py", "tuple(each[i] for i in chosen)", "each[: len(chosen)]", 0),
    ("records.py", '"" if kind == "outcomes" else None', "None", 0),
    ("training/collector.py", "drawn += missing", "pass", 0),
    ("training/evaluation.py", "self.scores >= 1)", "self.scores > 0)", 0),
    ("training/evaluation.py", "engine.stop_ids if probe.endless else ()", "()", 0),
    ("runs/files.py", "os.fsync(file.fileno())", "pass", 0),
    ("runs/files.py", "os.fsync(file.fileno())", "pass", 1),
    ("runs/files.py", "os.fsync(file.fileno())", "pass", 2),
    ("runs/files.py", "sync_folder(path.parent)", "pass", 0),
    ("training/learner.py", "step % every == 0", "step % (every + 1) == 0", 0),
    ("training/credited_step.py", "value_range=credit.value_range, ", "", 0),
    ("training/credited_step.py", 'known.pop("final_values", None)', "pass", 0),
    ("training/credited_step.py", "if Need.REFERENCE_LOGPROBS in models.needs", "if True", 0),
    ("rewards/process_rewards.py", "counts[place + 1] - 1", "counts[place]", 0),
    ("batch.py", "if sum(self.lengths) == len(self.rollout)", "if True", 0),
    ("training/learner.py", "(step - 1) * self.passes.updates + index", "step - 1 + index", 0),
    ("training/optimizer.py", 'rate * group.get("rate_scale", 1.0)', "rate", 0),
    ("training/optimizer.py", "setdefault(module, [])", "setdefault(POLICY, [])", 0),
    ("training/optimizer.py", "if limit is None]", "]", 0),
    (
        "training/optimizer.py",
        "(by_module[module], limit, norms[module])",
        "(by_module[module], shared_limit, norms[module])",
        0,
    ),
    ("training/optimizer.py", "else gradient_norm(parameters)", "else norms[sharing[0]]", 0),
    (
        "training/metrics.py",
        "report.sums[name] for report in reports) / num_tokens",
        "report.sums[name] / report.num_tokens for report in reports) / len(reports)",
        0,
    ),
    ("training/metrics.py", "first.sums[FIRST_ALONE] / first.num_tokens", "means[FIRST_ALONE]", 0),
    ("training/metrics.py", "reports[-1].learning_rate", "first.learning_rate", 0),
    ("batch.py", "replace(credited.columns, weights", "replace(batch.columns, weights", 0),
    ("batch.py", "return self.map_named(lambda _, column: change(column))", "return self", 0),
    ("batch.py", "[self.columns.advantages != 0]", "[self.columns.advantages > 0]", 0),
    ("runs/harness.py", "report.step == self.options.run.num_steps", "False", 0),
    ("runs/harness.py", "report.step % every == 0", "report.step % (every + 1) == 0", 0),
    ("runs/run_folder.py", "files.sync_folder(folder)", "pass", 0),
    (
        "runs/run_folder.py",
        'rollout_file.without_evaluation(ended, "after")',
        'rollout_file.without_evaluation(ended, "")',
        0,
    ),
    ("runs/folder.py", "sync_folder(self.path)\n", "pass\n", 0),
    ("training/update.py", "total += share.item()", "total = share.item()", 0),
]


def mutated(source: str, old: str, new: str, occurrence: int) -> str:
    parts = source.split(old)
    assert len(parts) > occurrence + 1, f"{old!r} is not there {occurrence + 1} times: mend tests/chosen_mutants.py"
    return old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])


def tests_pass(folder: Path, tests: list[str]) -> bool:
    """Run the tests on the sources in `folder`, in a child whose output is dropped."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.chdir(folder)
    sys.dont_write_bytecode = True  # a mutant of the same size and second would pass for the one before
    sys.path.insert(0, str(folder / "src"))
    os.environ["PYTHONPATH"] = str(folder / "src")  # for the processes that tests start
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)])
    os._exit(int(code))


def main() -> int:
    started, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignore = shutil.ignore_patterns("__pycache__", "assets")
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", folder)
        chosen = [mutant for mutant in MUTANTS if len(sys.argv) == 1 or mutant[0] in sys.argv[1:]]
        assert tests_pass(folder, sorted({test for mutant in chosen for test in TESTS[mutant[0]]})), "fails unchanged"
        for file, old, new, occurrence in chosen:
            path = folder / "src" / "posttrain" / file
            original = path.read_text(encoding="utf-8")
            path.write_text(mutated(original, old, new, occurrence), encoding="utf-8")
            if tests_pass(folder, TESTS[file]):
                survivors.append(f"{file}: {old!r} -> {new!r} ({occurrence})")
                print("survives:", survivors[-1], flush=True)
            path.write_text(original, encoding="utf-8")
    seconds = time.monotonic() - started
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants die, in {seconds:.0f} seconds")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
