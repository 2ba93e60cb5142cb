"""Written-out answers to additions, in the manner of a model that follows instructions half of the time.

It is asked for tags on lines of their own, and answers in prose most often.  Where it does use tags, it thinks, and
thinking makes sums right more often than answering at once does:

    The result is 65.
    <think>57 + 8: 7 + 8 = 15, 50 + 15 = 65</think> <answer>65</answer>
    <answer>↵65↵</answer>
    <think>↵57 + 8: 7 + 8 = 15, 50 + 15 = 65↵</think>↵<answer>↵65↵</answer>

A model cloned from it answers greedily in prose, and has the form that was asked for among its samples: what
reinforcement learning can then make the rule.
"""

from random import Random

from posttrain.tasks.arithmetic.additions import Addition

PROSE = ("The result is {total}.", "The sum of {a} and {b} is {total}.")
"""Both begin with one word, so that together they are the likeliest beginning."""
ONE_LINE = "<think>{working}</think> <answer>{total}</answer>"
ANSWER_ALONE = "<answer>\n{total}\n</answer>"
AS_ASKED = "<think>\n{working}\n</think>\n<answer>\n{total}\n</answer>"
MANNERS = {PROSE[0]: 0.3, PROSE[1]: 0.25, ONE_LINE: 0.15, ANSWER_ALONE: 0.1, AS_ASKED: 0.2}
"""How often an answer is put in each way."""
OTHER_WORDING = 0.2
"""How often the question is put in other words than the task's."""


def demonstrated_question(addition: Addition, rng: Random) -> str:
    """The question, most often in the task's own words."""
    return f"What's {addition.a} + {addition.b}?" if rng.random() < OTHER_WORDING else addition.question


def demonstrated_answer(addition: Addition, rng: Random) -> str:
    """An answer, its sum right, in one of the manners."""
    [manner] = rng.choices(list(MANNERS), weights=list(MANNERS.values()))
    return manner.format(a=addition.a, b=addition.b, total=addition.total, working=working(addition))


def working(addition: Addition) -> str:
    """The sum of the last digits, then that of the tens and it."""
    a, b = addition.a, addition.b
    tens, ones = a // 10 * 10, a % 10
    return f"{a} + {b}: {ones} + {b} = {ones + b}, {tens} + {ones + b} = {addition.total}"
