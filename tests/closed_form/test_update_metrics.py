"""A step's metrics from the reports of several updates, worked out by hand: sums over tokens, divided once."""

from posttrain.training.update_metrics import FIRST_ALONE, UpdateReport, update_metrics


def report(num_tokens: int, gap: float, kl: float, lowest: float, highest: float) -> UpdateReport:
    return UpdateReport(
        loss=kl,
        grad_norms={"policy": 10 * kl, "critic": kl},
        learning_rate=num_tokens / 1000,
        num_micro_batches=num_tokens // 4,
        num_tokens=num_tokens,
        sums={FIRST_ALONE: gap, "kl": kl},
        ratio_range=(lowest, highest),
        largest_gap=gap / 2,
    )


FIRST, SECOND = report(4, 1.0, 2.0, 0.5, 1.5), report(12, 30.0, 10.0, 0.75, 3.0)


def test_means_are_over_the_tokens_of_all_updates_and_the_gap_over_those_of_the_first() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert metrics["kl"] == 12 / 16  # a mean of means would be (2 / 4 + 10 / 12) / 2 = 2 / 3
    assert metrics["tokens/trained"] == 16
    assert metrics[FIRST_ALONE] == 1 / 4
    assert metrics["sampling/sampling_logp_difference/max"] == 1 / 2


def test_extremes_are_over_all_updates_in_whatever_order_they_came() -> None:
    for reports in ([FIRST, SECOND], [SECOND, FIRST]):
        metrics = update_metrics(reports)
        assert (metrics["ratio/min"], metrics["ratio/max"]) == (0.5, 3.0)


def test_loss_and_norms_are_means_over_updates_passes_add_up_and_the_rate_is_the_last_one() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert (metrics["loss"], metrics["grad_norm"], metrics["grad_norm/critic"]) == (6, 60, 6)
    assert metrics["num_micro_batches"] == 1 + 3
    assert metrics["learning_rate"] == 12 / 1000


def test_a_step_without_an_update_has_no_such_metrics() -> None:
    assert update_metrics([]) == {}
