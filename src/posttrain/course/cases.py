"""Worked examples of the course's functions: arguments, and the result of the equation.

The tests try ours on them, and `posttrain course check` a reader's own.  Expected values are derived in the comments.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call and what it returns."""

    says: str
    arguments: tuple[object, ...]
    options: Mapping[str, object]
    expected: object
    slope_of: int | None = None
    """The argument that the result, or the first of its parts, is differentiated by."""
    slope: object = None


def case(
    says: str,
    *arguments: object,
    expected: object,
    slope_of: int | None = None,
    slope: object = None,
    **options: object,
) -> Case:
    return Case(says=says, arguments=arguments, options=options, expected=expected, slope_of=slope_of, slope=slope)


def case_numbers(*values: object) -> torch.Tensor:
    return torch.tensor(values)


# Probabilities 3/4, 1/4 and 1/2, 1/2.
PAIR = torch.tensor([[[math.log(3.0), 0.0], [0.0, 0.0]]])
# KL(3/4, 1/4 ‖ 1/2, 1/2) = 3/4 ln(3/2) + 1/4 ln(1/2), and 0 at the second position.
FIRST_KL = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
# d KL/d logit_v = π(v) (log π(v) - log ref(v) - KL), under the weight .1 / 2 of a mean over two positions.
KL_SLOPE = 0.05 * 0.75 * (math.log(1.5) - FIRST_KL)

# Token 0 at the first position (3/4, reference 1/2), token 1 at the second (1/2, reference 1/2), none at the third.
LOSS_LOGITS = torch.cat([PAIR, PAIR[:, :1]], dim=1)
LOSS_LABELS = torch.tensor([[0, 1, IGNORED]])
LOSS_ADVANTAGES = torch.tensor([[0.5, -1.0, 9.0]])
POLICY_LOSS = -(0.5 * math.log(0.75) - math.log(0.5)) / 2
K3 = (2 / 3 - 1 + math.log(1.5)) / 2
# d/dlogit of -A log π / 2 is -A (onehot - π) / 2; of .1 k3 / 2 it is .1 (1 - ref/π) (onehot - π) / 2.
FIRST_SLOPE, SECOND_SLOPE = (-0.5 + 0.1 * (1 - 2 / 3)) / 2 * 0.25, 1.0 / 2 * 0.5

NEW, REFERENCE = torch.log(case_numbers(0.6, 0.4, 0.7, 0.3)), torch.log(case_numbers(0.5, 0.5, 0.6, 0.4))
SEQUENCE_ADVANTAGES = case_numbers(1.2, -0.4, 0.5, -1.0)
# Ratios 1.1, .9, 13/12, .875 are in bounds: dL/dx = (-ρ A + β (1 - 1/ρ)) / 4.
INSIDE = torch.log(case_numbers(0.55, 0.45, 0.65, 0.35))
RATIOS = (1.1, 0.9, 13 / 12, 0.875)
INSIDE_SLOPE = [(-r * a + 0.05 * (1 - 1 / r)) / 4 for r, a in zip(RATIOS, (1.2, -0.4, 0.5, -1.0), strict=True)]


def sequence_loss(ratios: Sequence[float], advantages: Sequence[float], beta: float) -> float:
    """The equation for ratios inside the clip range: mean of -ρ A + β (1/ρ - 1 + ln ρ)."""
    terms = [-r * a + beta * (1 / r - 1 + math.log(r)) for r, a in zip(ratios, advantages, strict=True)]
    return sum(terms) / len(terms)


FORMULA_CASES = {
    "compute_advantages": [
        # The tokens after a prompt of two are tried at values 1, 2 and 4, and led to 2, 4 and the reward.
        case(
            "the next value less this one, and the reward at the end",
            torch.tensor([[0.5, 1.0, 2.0, 4.0, 8.0]]),
            case_numbers(10.0),
            2,
            expected=torch.tensor([[1.0, 2.0, 6.0]]),
        ),
        case(
            "one advantage for each generated token",
            torch.zeros(2, 10),
            case_numbers(1.0, -1.0),
            3,
            expected=torch.tensor([[0.0] * 6 + [1.0], [0.0] * 6 + [-1.0]]),
        ),
    ],
    "calc_kl_penalty": [
        case(
            "the mean over positions of the KL of whole distributions",
            PAIR,
            torch.zeros(1, 2, 2),
            expected=0.1 * FIRST_KL / 2,
            slope_of=0,
            slope=torch.tensor([[[KL_SLOPE, -KL_SLOPE], [0.0, 0.0]]]),
        ),
        case("0 between equal distributions", PAIR, PAIR, 1.0, expected=0.0),
    ],
    "compute_grpo_advantages": [
        # Mean 2/5; squares 2 · .36 + 3 · .16 = 1.2, over 4.
        case(
            "above the mean, in sample deviations",
            case_numbers(1.0, 1.0, 0.0, 0.0, 0.0),
            expected=case_numbers(*[0.6 / (math.sqrt(0.3) + 1e-4)] * 2, *[-0.4 / (math.sqrt(0.3) + 1e-4)] * 3),
        ),
        # Squares .5625 + 3 · .0625 = .75, over 3.
        case(
            "one standout",
            case_numbers(1.0, 0.0, 0.0, 0.0),
            expected=case_numbers(0.75 / 0.5001, *[-0.25 / 0.5001] * 3),
        ),
        case(
            "equal rewards are exactly 0, though their mean is rounded",
            case_numbers(*[0.9] * 3),
            expected=torch.zeros(3),
        ),
        case("a group of one is 0", case_numbers(1.0), expected=torch.zeros(1)),
    ],
    "compute_group_advantages": [
        # 1 and 0 are .5 from their mean, 2 and 4 are 1 from theirs: each pair is ±1.
        case(
            "group by group, in population deviations",
            case_numbers(1.0, 0.0, 2.0, 4.0),
            2,
            expected=case_numbers(1.0, -1.0, -1.0, 1.0),
        ),
        case("equal rewards are exactly 0", case_numbers(*[0.9] * 3), 3, expected=torch.zeros(3)),
    ],
    "compute_grpo_loss": [
        case(
            "a mean over the tokens that have a label",
            LOSS_LOGITS,
            torch.zeros(1, 3, 2),
            LOSS_ADVANTAGES,
            LOSS_LABELS,
            0.1,
            expected=(
                torch.tensor(POLICY_LOSS + 0.1 * K3),
                {"pg_loss": POLICY_LOSS, "kl_penalty": K3, "kl_loss": 0.1 * K3},
            ),
            slope_of=0,
            slope=torch.tensor([[[FIRST_SLOPE, -FIRST_SLOPE], [-SECOND_SLOPE, SECOND_SLOPE], [0.0, 0.0]]]),
        ),
        case(
            "a coefficient of 0 still reports the KL",
            LOSS_LOGITS,
            torch.zeros(1, 3, 2),
            LOSS_ADVANTAGES,
            LOSS_LABELS,
            0.0,
            expected=(torch.tensor(POLICY_LOSS), {"pg_loss": POLICY_LOSS, "kl_penalty": K3, "kl_loss": 0.0}),
        ),
    ],
    "grpo_sequence_loss": [
        # The homework's own number: the first ratio, 1.2, is on the bound, and the last three are inside.
        case("the homework's value", NEW, REFERENCE, SEQUENCE_ADVANTAGES, 0.1, 0.2, expected=-0.2233469),
        case(
            "the gradient of ratios in the range",
            INSIDE,
            REFERENCE,
            SEQUENCE_ADVANTAGES,
            0.05,
            0.2,
            expected=sequence_loss(RATIOS, (1.2, -0.4, 0.5, -1.0), 0.05),
            slope_of=0,
            slope=torch.tensor(INSIDE_SLOPE),
        ),
        # 1.5 times as likely as under the reference, and better than its siblings: the clip keeps 1.2, the KL pulls.
        case(
            "beyond the bound only the KL has a gradient",
            case_numbers(math.log(1.5)),
            torch.zeros(1),
            torch.ones(1),
            0.05,
            0.2,
            expected=-1.2 + 0.05 * (1 / 1.5 - 1 + math.log(1.5)),
            slope_of=0,
            slope=case_numbers(0.05 * (1 - 1 / 1.5)),
        ),
    ],
}

ANSWERS = (
    "<think>6 * 4 = 24</think>\n<answer>6 * 4</answer>",
    "<think>Let me see...</think>\n<answer>2 + 3</answer>",
    "The answer is 24",
    "<think>Hmm</think>\n<answer>twenty-four</answer>",
    "<think>twice</think>\n<answer>6 * 4 * (3 - 2)</answer>",
)
BEHIND = "<think>\na\n</think>\n<answer>\n1\n</answer>"

TEXT_CASES = {
    "reward_fn_period_count": [case("full stops of each text", ["a. b.", ""], expected=case_numbers(2.0, 0.0))],
    "format_reward": [
        case("tags on separate lines", [BEHIND, "<think>missing"], expected=case_numbers(1.0, 0.0)),
        case("text after the answer earns nothing", [f"{BEHIND}\nmore"], expected=case_numbers(0.0)),
    ],
    "format_reward_func": [
        case("arithmetic in its tags", ANSWERS[0], expected=1.0),
        case("no tags", ANSWERS[2], expected=0.0),
        case("an answer that is not arithmetic", ANSWERS[3], expected=0.5),
    ],
    "equation_reward_func": [
        case("all numbers, once each", ANSWERS[4], [2, 3, 4, 6], 24, expected=1.0),
        case("two of four numbers", ANSWERS[0], [2, 3, 4, 6], 24, expected=0.0),
        case("another value", ANSWERS[1], [2, 3], 24, expected=0.0),
        case("a power is not allowed in the game", "<think></think><answer>2**3</answer>", [2, 3], 8, expected=0.0),
    ],
    "compute_total_reward": [
        case("format and equation", ANSWERS[4], [2, 3, 4, 6], 24, expected=2.0),
        case("format alone", ANSWERS[0], [2, 3, 4, 6], 24, expected=1.0),
        case("nothing", ANSWERS[2], [2, 3, 4, 6], 24, expected=0.0),
    ],
    "simple_math_reward_func": [
        case(
            "some of the numbers, with the tag that the prompt began",
            [" 8 * 2 - 1 = 15 </think>\n<answer> 8 * 2 - 1 </answer>", " ... </think>\n<answer> 8 + 4 - 2 </answer>"],
            ["15", "15"],
            [[4, 8, 2, 1]] * 2,
            expected=[1.0, 0.0],
        ),
        case(
            "a number that is used more often than it is given",
            [" ... </think>\n<answer> 4 + 4 + 4 </answer>"],
            ["12"],
            [[4, 3]],
            expected=[0.0],
        ),
    ],
}


@dataclass(frozen=True)
class Move:
    """A step of a walk."""

    s_from: int
    action: int
    s_to: int


@dataclass(frozen=True)
class Walk:
    """A walk as the homework's functions take it."""

    moves: tuple[Move, ...]

    def transitions(self) -> list[Move]:
        return [*self.moves]

    def state_sequence(self) -> np.ndarray:
        return np.array([each.s_from for each in self.moves] + [each.s_to for each in self.moves[-1:]])


WALKS = [Walk((Move(0, 0, 1), Move(1, 0, 2))), Walk((Move(0, 0, 0), Move(0, 0, 1)))]
CHAIN = np.zeros((3, 3, 1))
CHAIN[[0, 1, 2], [1, 2, 2], 0] = 1.0
# State 0 leads straight to the end 2, or over 1.  The end continues too, so Z_1 = e^{r(1)} 2 Z_2 and Z_2 = e^{r(2)} 2
# Z_2 one sweep earlier: the share that goes over 1 is e^{r(1)} / (e^{r(1)} + e^{r(2)}).
FORK = np.zeros((3, 3, 2))
FORK[[0, 1, 2], [1, 2, 2], 0] = 1.0
FORK[[0, 1, 2], [2, 2, 2], 1] = 1.0

IRL_CASES = {
    "feature_expectation_from_trajectories": [
        # States 0, 1, 2 and 0, 0, 1: (1 + 2) / 2, (1 + 1) / 2, 1 / 2.
        case("visits of each state, averaged", np.eye(3), WALKS, expected=np.array([1.5, 1.0, 0.5]))
    ],
    "initial_probabilities_from_trajectories": [
        case("both begin in state 0", 3, WALKS, expected=np.array([1.0, 0.0, 0.0]))
    ],
    "compute_expected_svf": [
        case(
            "a chain is walked through once",
            CHAIN,
            np.array([1.0, 0.0, 0.0]),
            [2],
            np.zeros(3),
            expected=np.array([1.0, 1.0, 1.0]),
        ),
        # e^{ln 3} / (e^{ln 3} + 1).
        case(
            "the partition weighs two roads",
            FORK,
            np.array([1.0, 0.0, 0.0]),
            [2],
            np.array([0.0, math.log(3.0), 0.0]),
            expected=np.array([1.0, 0.75, 1.0]),
        ),
    ],
    "maxent_irl": [
        # The walk 0, 2 visits (1, 0, 1); at weights of 1 half of the policy's walks go over 1.  One step of .2 changes
        # that weight by the factor e^{-.2 · .5}, which is less than a tolerance of 1.
        case(
            "one step of the exponentiated gradient",
            FORK,
            np.eye(3),
            [2],
            [Walk((Move(0, 1, 2),))],
            0.2,
            1.0,
            expected=np.array([1.0, math.exp(-0.1), 1.0]),
        ),
        case(
            "weights stay at 1 where the features are matched",
            CHAIN,
            np.eye(3),
            [2],
            WALKS[:1],
            expected=np.array([1.0, 1.0, 1.0]),
        ),
    ],
}
