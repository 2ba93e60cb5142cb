"""The progress display in a terminal and without one, and the picture of the curves."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from posttrain.runs.curves import draw_curves, draw_held_out, draw_length, draw_measure, running_mean
from posttrain.runs.progress import Progress, duration, forecast, sparkline, visible

DRAWS = True


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool, kind: str = "xterm") -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=120,
        highlight=False,
        legacy_windows=False,
        _environ={"TERM": kind},
    )


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_without_a_terminal_steps_are_plain_lines_with_the_numbers_that_matter() -> None:
    target, clock = console(terminal=False), Clock()
    with Progress(10, console=target, clock=clock) as progress:
        progress.start(["model: tiny [1.2 M]"])
        progress.step(0, {"eval/accuracy_sampled": 0.125})
        clock.now += 30
        progress.step(1, {"reward": 0.25, "completions/mean_length": 47.4, "tokens_per_second": 5210.0, "loss": 3.0})
        clock.now += 30
        progress.step(2, {"reward": 0.5, "kl": 0.01234, "eval/accuracy_sampled": 0.25})
    assert printed(target).splitlines() == [
        "model: tiny [1.2 M]",
        "step 0/10  held-out accuracy 0.125 (first 0.125)  ? left",
        "step 1/10  reward 0.250  length 47  tokens/s 5,210  at least 4:30 left",  # 9 more of 30 s
        "step 2/10  reward 0.500  held-out accuracy 0.250 (first 0.125)  KL to reference 0.0123  at least 4:00 left",
    ]


def test_evaluations_are_shown_beside_the_full_one_before_training() -> None:
    target, clock = console(terminal=False), Clock()
    progress = Progress(10, console=target, clock=clock)
    progress.start([])
    progress.compare_with({"eval/accuracy_sampled": 0.222, "eval/reward": 0.222})
    progress.step(1, {"reward": 0.25})
    progress.step(2, {"eval/accuracy_sampled": 0.32, "eval/reward": 0.4})
    progress.step(3, {"eval/accuracy_sampled": 0.0, "eval/reward": 0.0})
    shown = [line.split("  ")[1:-1] for line in printed(target).splitlines()]
    assert shown[1:] == [["held-out accuracy 0.320 (first 0.222)"], ["held-out accuracy 0.000 (first 0.222)"]]


def test_where_no_answer_is_ever_right_the_held_out_reward_is_shown() -> None:
    target = console(terminal=False)
    progress = Progress(10, console=target, clock=Clock())
    progress.start([])
    progress.compare_with({"eval/accuracy_sampled": 0.0, "eval/reward": -1.5})
    progress.step(5, {"eval/accuracy_sampled": 0.0, "eval/reward": -0.25})
    progress.step(6, {"eval/reward": -0.2})  # the judge had nothing to say
    shown = [line.split("  ")[1:-1] for line in printed(target).splitlines()]
    assert shown == [["held-out reward -0.250 (first -1.500)"], ["held-out reward -0.200 (first -1.500)"]]


def test_quick_steps_share_a_line_but_first_last_and_evaluated_ones_have_their_own() -> None:
    target, clock = console(terminal=False), Clock()
    progress = Progress(20, console=target, clock=clock)
    progress.start([])
    for step in range(1, 21):
        clock.now += 1
        progress.step(step, {"reward": 0.5, **({"eval/accuracy_sampled": 0.5} if step == 8 else {})})
    progress.finish(["done"])
    lines = printed(target).splitlines()
    assert [line.split()[1].split("/")[0] for line in lines[:-1]] == ["1", "6", "8", "13", "18", "20"]
    assert lines[-1] == "done"


def test_the_time_left_of_a_resumed_run_counts_its_own_steps_only_and_ends_at_the_limit() -> None:
    clock = Clock()
    target = console(terminal=False)
    progress = Progress(100, first_step=91, time_limit_seconds=25.0, console=target, clock=clock)
    progress.start([])
    clock.now += 2
    progress.step(91, {})
    clock.now += 12
    progress.step(92, {})
    assert [line.split()[-2] for line in printed(target).splitlines()] == ["0:18", "0:11"]  # 9 x 2 s; 25 - 14 < 8 x 7


def test_the_time_left_of_a_run_that_ends_by_its_tokens_is_that_of_the_tokens_left() -> None:
    target, clock = console(terminal=False), Clock()
    progress = Progress(1_000_000, first_step=3, console=target, clock=clock)
    progress.start([])
    progress.limit_tokens(300, 1_000)
    for step, sampled in ((3, 400), (4, 600), (5, 1_100)):
        clock.now += 6
        progress.step(step, {"completions/mean_length": 4, "num_sampled_tokens": sampled})
    # 600 at 6 s for 100, then 400 at 12 s for 300.
    assert [line.split("  ")[-1] for line in printed(target).splitlines()] == ["0:36 left", "0:16 left", "0:00 left"]


def test_the_time_left_of_a_run_that_ends_before_its_tokens_is_that_of_its_steps() -> None:
    target, clock = console(terminal=False), Clock()
    progress = Progress(3, console=target, clock=clock)
    progress.start([])
    progress.limit_tokens(0, 1_000)
    clock.now += 6
    progress.step(1, {"completions/mean_length": 4, "num_sampled_tokens": 100})
    assert printed(target).endswith("at least 0:12 left\n")


def test_a_long_stage_reports_on_its_way() -> None:
    target, clock = console(terminal=False), Clock()
    progress = Progress(1, console=target, clock=clock)
    with progress.stage("evaluation", 512) as advance:
        for _ in range(4):
            clock.now += 3
            advance(128)
    said = ["512 to do", "256/512, 0:06 left", "done in 12.0 s"]
    assert printed(target).splitlines() == [f"evaluation: {each}" for each in said]


def test_a_stage_of_unknown_length_says_what_is_known_and_how_long_it_takes_at_most() -> None:
    target, clock = console(terminal=False), Clock()
    with Progress(console=target, clock=clock).stage("fit", most=50) as advance:
        clock.now += 2
        advance(says="evaluation 1")
        clock.now += 8
        advance(says="evaluation 2  gradient 0.1")
    with Progress(console=target, clock=clock).stage("phase") as advance:
        clock.now += 6
        advance(0, says="step 3/9  reward \x1b[1m")
    assert printed(target).splitlines() == [
        "fit: evaluation 2  gradient 0.1  at most 4:00 left",  # 48 more of 5 s
        "fit: done in 10.0 s",
        "phase: step 3/9  reward \\x1b[1m",
        "phase: done in 6.0 s",
    ]


def test_a_terminal_is_free_between_the_stages_of_a_command_without_steps() -> None:
    target, clock = console(terminal=True), Clock()
    with Progress(console=target, clock=clock) as progress:
        with progress.stage("completions", 4) as advance:
            clock.now += 1
            advance(1)
            progress._live.refresh()
        assert progress._live is None
    shown = printed(target)
    assert "completions" in shown
    assert "1/4 0:03 left" in " ".join(shown.split())
    assert "0/0" not in shown


def test_the_forecast_follows_steps_that_grow_longer_and_is_the_mean_otherwise() -> None:
    assert forecast([2.0, 4.0], 10) == (30.0, False)
    assert forecast([3.0, 1.0] * 10, 5) == (10.0, False)  # up and down
    assert forecast([3.0 - 0.1 * step for step in range(20)], 10) == (pytest.approx(10 * 2.05), False)
    # Steps of 1, 2, ... 12 s: those that are left take 13, 14 and 15 by the line, and 3 × 11 by the last quarter.
    assert forecast([float(step) for step in range(1, 13)], 3) == (pytest.approx((42 + 33) / 2), True)


def test_the_time_left_counts_the_evaluation_at_the_end_and_not_the_one_before_the_first_step() -> None:
    target, clock = console(terminal=False), Clock()
    progress = Progress(3, console=target, clock=clock)
    progress.start([])
    clock.now += 100  # measured before training
    progress.closing_seconds = 100.0
    clock.now += 2
    progress.step(1, {"step_time": 5.0})  # 3 s of it were before the start
    clock.now += 7
    progress.step(2, {"step_time": 6.0})
    assert [line.split()[-2] for line in printed(target).splitlines()] == ["1:50", "1:46"]  # 2 × 5; (5 + 7) / 2


def show_and_fail(progress: Progress, clock: Clock) -> None:
    with progress:
        progress.start(["plan"])
        clock.now += 10
        progress.step(1, {"reward": 0.25, "completions/mean_length": 47.0})
        progress.step(2, {"reward": 0.75})
        with progress.stage("evaluation", 8) as advance:
            advance(3)
            progress._live.refresh()
            raise InterruptedError


def test_a_terminal_gets_a_live_display_that_is_gone_after_an_error() -> None:
    target, clock = console(terminal=True), Clock()
    with pytest.raises(InterruptedError):
        show_and_fail(Progress(4, console=target, clock=clock), clock)
    shown = printed(target)
    for expected in ("plan", "2/4", "0:10 elapsed, at least 0:10 left", "0.750", "47", "evaluation", "3/8", "▁█"):
        assert expected in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    target = console(terminal=True, kind="dumb")
    with Progress(4, console=target, clock=Clock()) as progress:
        progress.start([])
        progress.step(1, {"reward": 0.25})
    assert printed(target) == "step 1/4  reward 0.250  0:00 left\n"


def test_model_output_cannot_steer_the_terminal_or_the_markup() -> None:
    target = console(terminal=False)
    Progress(1, console=target).finish(["\x1b[2Jgone [bold]x[/bold] é\u202e\r3"])
    assert printed(target) == "\\x1b[2Jgone [bold]x[/bold] é\\u202e\\r3\n"
    assert visible("a\nb\x9b") == "a\nb\\x9b"


def test_a_duration_reads_like_a_clock() -> None:
    shown = {None: "?", 0.0: "0:00", 59.6: "1:00", 61.0: "1:01", 3661.0: "1:01:01"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


def test_a_sparkline_spans_least_to_greatest_and_averages_long_histories() -> None:
    assert sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, 2.0] * 16 + [9.0, 11.0] * 16) == "▁" * 16 + "█" * 16  # 64 values in 32 bars


def test_the_mean_of_noisy_curves_does_not_lag() -> None:
    line = [float(step) for step in range(41)]
    assert running_mean(line)[20] == pytest.approx(20)  # as many steps before as behind; one-sided it would be about 16
    # Weights 1 and .8: (2 + .8 · 4) / 1.8 and (.8 · 2 + 4) / 1.8; a gap counts nothing.
    assert running_mean([2.0, 4.0]) == pytest.approx([5.2 / 1.8, 5.6 / 1.8])
    assert running_mean([2.0, math.nan, 2.0]) == pytest.approx([2.0] * 3)
    assert all(map(math.isnan, running_mean([math.nan])))


def test_what_was_measured_after_training_ends_the_lines_of_the_picture() -> None:
    brief = {"eval/accuracy_sampled": 0.5, "eval/accuracy_sampled_low": 0.4, "eval/accuracy_sampled_high": 0.6}
    full = {"eval/accuracy_sampled": 0.55, "eval/accuracy_sampled_low": 0.5, "eval/accuracy_sampled_high": 0.6}
    lines = [
        {"step": 0, "eval/pass_at_8": 0.6, "eval/reward": 0.1},
        {"step": 9, "reward": 0.3, **brief, "completions/mean_length": 5.0, "completions/clipped_ratio": 0.5},
        {"step": 9, "eval/pass_at_8": 0.9, "eval/reward": 0.4, **full},
    ]
    reward, accuracy, length = Figure().subplots(1, 3)
    draw_measure(reward, lines, "reward", "Reward", "mean reward")
    draw_held_out(accuracy, lines)
    draw_length(length, lines)
    drawn = {line.get_label(): line.get_xydata().tolist() for axes in (reward, accuracy) for line in axes.lines}
    assert drawn["pass@8"] == [[0, 0.6], [9, 0.9]]
    assert drawn["sampled"] == [[9, 0.55]]
    assert drawn["held out"] == [[0, 0.1], [9, 0.4]]
    assert drawn["step"] == [[9, 0.3]]
    named = [axes.get_ylabel() for axes in length.figure.axes]
    assert named == ["mean reward", "share solved", "tokens", "share cut off"]


def test_curves_are_drawn_from_a_journal_with_gaps_nulls_and_a_torn_line(tmp_path: Path) -> None:
    journal, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    lines = [
        {"step": 0, "eval/accuracy_sampled": 0.1, "eval/accuracy_sampled_low": 0.05, "eval/accuracy_sampled_high": 0.2},
        {
            "step": 1,
            "reward": 0.2,
            "grad_norm": None,
            "outcomes/sum/right": 0.2,
            "seconds/update": 1.0,
            "step_time": 1.0,
        },
        {"step": 2, "reward": None, "kl": -0.1, "outcomes/sum/wrong": 1.0, "step_time": 1.0},
    ]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    draw_curves(journal, picture, "a run")
    assert picture.read_bytes().startswith(b"\x89PNG")
    journal.write_text("")
    draw_curves(journal, picture)


def test_curves_and_progress_do_not_load_torch() -> None:
    code = "import posttrain.runs.curves, posttrain.runs.progress, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
