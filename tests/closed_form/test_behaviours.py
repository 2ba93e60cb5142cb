"""The table of behaviours: every pattern with what it finds and what it leaves, and shares worked out by hand."""

import re
from pathlib import Path

import pytest
import regex

from posttrain.behaviours.behaviour_reader import BehaviourReader
from posttrain.behaviours.behaviour_table import TABLE, PatternRow, chosen_rows, read_search
from posttrain.options.training import BehaviourOptions
from posttrain.records import Group, Prompt
from posttrain.rewards.countdown import Countdown
from tests.support.pages import blocks, documented, write_files
from tests.support.refusals import refused
from tests.support.sequences import spoken

# Row -> for each of its patterns, in order, (what it finds, what it leaves).
PROSE = {
    "verification": [
        ("Let me double-check that: 25 * 4.", "Let me see the check you wrote."),
        ("Double checking the sum.", "A double cheque."),
        ("Check: 75 + 25 = 100.", "Checkers: a game"),
        ("Yes, this is correct!", "Is this correctly typed"),
        ("25 * 4 = 100 ✓", "25 * 4 = 100"),
    ],
    "backtracking": [
        ("Wait, that uses 5 twice.", "Wait for me, that bus is late."),
        ("Oops. 12 again.", "oopsy"),
        ("Actually, I can use 3.", "It is actually 3."),
        ("That's not right.", "That is right."),
        ("This doesn't work.", "This works, doesn't it"),
        ("I made a mistake above.", "They made mistakes."),
    ],
    "several_attempts": [
        ("First attempt: 25 * 4.", "The first number"),
        ("Let's try 3 + 4.", "They try 3 + 4."),
        ("Trying again with 5.", "He tried"),
        ("Or alternatively: 25 * 4", "an alternative"),
        ("What if I add first?", "What is it if not that"),
    ],
    "explanation": [
        ("It is 100, because 25 fits.", "The cause is known."),
        ("This means we are done.", "These means"),
        ("Since the target is even, add.", "Since Monday"),
    ],
    "meta_reasoning": [
        ("Actually, the problem says use all.", "No problem, she says."),
        ("I need to make 100 from these.", "I need a coffee."),
        ("Each number can be used once.", "A number is each."),
        ("My goal is 36.", "A goal in the last minute"),
    ],
    "reflection": [
        ("Hmm, but I have 75 left.", "Hamm is a town."),
        ("Let me think about it.", "Let me go."),
        ("I should reconsider the order.", "considerable"),
    ],
    "uncertainty": [
        ("Maybe 75 + 25?", "It may be May."),
        ("I'm not sure about 12.", "I'm sure about 12."),
        ("I think that is it.", "Think!"),
    ],
}
PATTERNS = {name: row for name, row in TABLE.items() if isinstance(row, PatternRow)}
PUZZLE = Countdown((17, 5, 3), 36, "all")
ONE = "17+5=22,22-3=19."
HIT = "17-5=12,12*3=36!"
# Row -> (a search that shows it, how many signs that has), and one that does not.
SEARCHES = {
    "several_tries": ((f"{ONE}\n{HIT}", 2), HIT),
    "right_steps": ((f"{ONE}\n{HIT}", 4), f"{ONE}\n17-5=13,13*3=39."),
    "right_verdicts": ((f"{ONE}\n{HIT}", 2), f"17+5=22,22-3=19!\n{HIT}"),  # the first is no hit
    "checked_again": ((f"{ONE}\n{HIT}\n5+17=22,22-3=19.", 1), f"{ONE}\n{HIT}"),
    "went_back": ((f"{ONE}\n5+17=22,22*3=66.\n{HIT}", 1), f"{ONE}\n{ONE}\n{HIT}"),
    "gave_up": ((f"{ONE}\n</think>\n<answer>17+5-3</answer>", 1), f"{HIT}\n</think>"),
}


@pytest.mark.parametrize(
    ("name", "index"), [(name, index) for name, row in PATTERNS.items() for index in range(len(row.patterns))]
)
def test_every_pattern_finds_what_it_is_for_and_leaves_what_reads_alike(name: str, index: int) -> None:
    pattern = regex.compile(PATTERNS[name].patterns[index], regex.IGNORECASE)
    finds, leaves = PROSE[name][index]
    assert pattern.search(finds)
    assert not pattern.search(leaves)


def test_examples_are_of_all_rows_and_of_no_other() -> None:
    assert {name: len(pairs) for name, pairs in PROSE.items()} == {
        name: len(row.patterns) for name, row in PATTERNS.items()
    }
    assert set(SEARCHES) == set(TABLE) - set(PATTERNS)


@pytest.mark.parametrize("name", SEARCHES)
def test_every_row_of_the_notation_reads_what_a_search_does(name: str) -> None:
    (shows, count), does_not = SEARCHES[name]
    found = TABLE[name].read(read_search(PUZZLE, f"<think>{shows}"))
    assert (found.shown, found.count) == (True, count)
    for text in (f"<think>{does_not}", "no search at all"):
        assert not TABLE[name].read(read_search(PUZZLE, text)).shown


def test_a_search_that_is_cut_off_has_not_given_up() -> None:
    assert not TABLE["gave_up"].read(read_search(PUZZLE, f"<think>{ONE}\n")).shown


def test_the_texts_of_a_course_show_the_behaviours_that_it_names() -> None:
    text = (
        "<think>\nI have [25, 4, 75, 1] to make 100.\nFirst attempt: 25 * 4 = 100\nHmm, but I also have 75 and 1"
        " unused.\nActually, the problem says use the given numbers, not all.\nSo 25 * 4 = 100 is correct!\n</think>"
    )
    read = BehaviourReader(TABLE).read(text, {})
    assert {name for name, signs in read.items() if signs.shown} == {"backtracking", "meta_reasoning", "reflection"}
    assert read["several_attempts"].count == 1, "one attempt is not several"
    early = BehaviourReader(TABLE).read("<think>25 * 4 = 100</think>\n<answer>25 * 4</answer>", {})
    assert not any(signs.shown for signs in early.values())


@pytest.mark.parametrize(
    ("text", "name", "count", "shown"),
    [
        # "let me try", "try another" and "another way" are of one attempt, "what if" is of a second.
        ("Let me try another way.", "several_attempts", 1, False),
        ("Let me try another way. What if I add?", "several_attempts", 2, True),
        ("Let me double-check. Double-check!", "verification", 2, True),
    ],
)
def test_words_that_several_patterns_know_are_one_sign(text: str, name: str, count: int, shown: bool) -> None:
    read = BehaviourReader(TABLE).read(text, {})[name]
    assert (read.count, read.shown) == (count, shown)


def group(columns: dict[str, object], *texts: tuple[str, int]) -> Group:
    prompt = Prompt(id="p", text="? Hmm.", tokens=(1,), prefill="Hmm.", columns=columns)
    said = (spoken(text, num_tokens, sample=sample) for sample, (text, num_tokens) in enumerate(texts))
    return Group(prompt=prompt, draw=0, rollouts=tuple(said))


def test_metrics_are_shares_of_completions_and_signs_per_1000_of_their_tokens() -> None:
    reader = BehaviourReader(chosen_rows(BehaviourOptions(measure=("reflection", "several_tries"))))
    puzzle: dict[str, object] = {"numbers": (17, 5, 3), "target": 36}
    groups = [
        group(puzzle, ("Hmm, wait. Hmm.", 10), (f"{ONE}\n{HIT}", 30)),
        group({}, ("aha", 4), (f"{ONE}\n{HIT}", 6)),  # no puzzle: no search is read
    ]
    # Reflection: 3 signs, 0, 1, 0 in 50 tokens, the prefill not counted; searches: 0 and 2 tries in 40.
    assert reader.metrics(groups) == {
        "behaviour/reflection": 2 / 4,
        "behaviour_signs/reflection": pytest.approx(1000 * 4 / 50),
        "behaviour/several_tries": 1 / 2,
        "behaviour_signs/several_tries": pytest.approx(1000 * 2 / 40),
    }
    assert all(documented(name) and documented(f"eval/{name}") for name in reader.metrics(groups))


def test_nothing_chosen_measures_nothing() -> None:
    reader = BehaviourReader(chosen_rows(BehaviourOptions()))
    assert reader.metrics([group({}, ("Hmm", 1))]) == {}
    assert reader.probes() == {}


def test_a_kind_names_all_its_rows_and_a_name_one_in_the_order_of_the_table() -> None:
    assert list(chosen_rows(BehaviourOptions(measure=("gave_up", "prose")))) == [*PROSE, "gave_up"]
    everything = chosen_rows(BehaviourOptions(measure=("prose", "search")))
    assert everything == TABLE


def test_rows_of_ones_own_come_from_the_recipe_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("says_done: {any: ['\\bdone\\b'], at_least: 2, within: thinking, says: is done}\n")
    options = BehaviourOptions(patterns={"counts": {"any": ["\\bone\\b", "\\btwo\\b"]}}, file=str(file))
    rows = chosen_rows(options)
    assert [row.says for row in rows.values()] == ["counts", "is done"]
    read = BehaviourReader(rows).read("One, TWO, done, done</think> done", {})
    assert (read["counts"].count, read["says_done"].count, read["says_done"].shown) == (2, 2, True)
    assert not BehaviourReader(rows).read("done</think> done", {})["says_done"].shown


def test_the_guide_has_every_row_and_its_own_patterns_are_such(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "behaviours.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", page, flags=re.MULTILINE)
    assert rows == [(name, row.kind) for name, row in TABLE.items()]
    write_files(blocks(page), tmp_path)
    own = chosen_rows(BehaviourOptions(file=str(tmp_path / "my_behaviours.yaml")))
    read = BehaviourReader(own).read("One, two or three?", {})
    assert [signs.shown for signs in read.values()] == [True, True]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"measure": ("verificatoin",)}, ["behaviours.measure", "`verificatoin`", "Did you mean `verification`?"]),
        ({"patterns": {"verification": {"any": ["x"]}}}, ["behaviours", "`verification`", "another name"]),
        ({"patterns": {"says hmm": {"any": ["x"]}}}, ["behaviours.patterns: says hmm", "Use letters"]),
        ({"patterns": {"mine": "hmm"}}, ["behaviours.patterns: mine = 'hmm'", "{any: ["]),
        ({"patterns": {"mine": {}}}, ["behaviours.patterns: mine.any"]),
        ({"patterns": {"mine": {"any": []}}}, ["behaviours.patterns: mine: any = []", "at least one"]),
        ({"patterns": {"mine": {"any": ["x"], "least": 2}}}, ["patterns: mine", "Did you mean `at_least`?"]),
        ({"file": "nowhere.yaml"}, ["behaviours.file = nowhere.yaml"]),
    ],
)
def test_a_mistake_names_the_option_the_value_and_the_remedy(options: dict[str, object], names: list[str]) -> None:
    with refused(*names):
        chosen_rows(BehaviourOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "should be a mapping"), ("a: [", "is not YAML"), ("x: {any: ['y']}\n", "`x` is in the recipe and")],
)
def test_a_mistake_in_a_file_of_patterns_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with refused(message, file):
        chosen_rows(BehaviourOptions(patterns={"x": {"any": ["z"]}}, file=str(file)))


@pytest.mark.parametrize("pattern", ["(a", "a{99999999999999999999}", "a?"])
def test_a_pattern_that_is_wrong_or_matches_nothing_is_refused_with_its_name(pattern: str) -> None:
    with refused(f"behaviours: mine: {pattern!r} "):
        BehaviourReader(chosen_rows(BehaviourOptions(patterns={"mine": {"any": [pattern]}})))
