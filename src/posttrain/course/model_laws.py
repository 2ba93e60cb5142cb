"""Laws of the course's functions that need a model: what must hold for any correct version.

The model is the bundled one that answers additions, with an adapter where the function wants one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.course.actor_critic import RLHFConfig, TransformerWithValueHead
from posttrain.course.homework import HomeworkConfig
from posttrain.models.adapters.in_force import adapter_parameters
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import AdapterOptions, ModelOptions

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Law:
    """A sentence that holds for a function, and a trial that says how it fails; an empty string if it holds."""

    says: str
    fault: Callable[[Function], str]


def bundled_model(*, adapted: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A bundled model and its tokenizer."""
    adapter = AdapterOptions(rank=4, alpha=8) if adapted else None
    policy = load_policy(ModelOptions(path="bundled-instruct", adapter=adapter, device="cpu"))
    if adapted:  # as after some training, so that the adapter changes what the model says
        torch.manual_seed(0)
        with torch.no_grad():
            for matrix in adapter_parameters(policy.model).values():
                matrix.add_(0.05 * torch.randn_like(matrix))
    return policy.model.eval(), policy.tokenizer


PROMPT, RESPONSE = "If you add 47 and 5, what is the result?\n", "The result is 52."


def by_hand(model: PreTrainedModel, prompt: list[int], response: list[int]) -> float:
    """Σ log π, each token from its own prefix."""
    total = 0.0
    with torch.no_grad():
        for place, token in enumerate(response):
            logits = model(torch.tensor([[*prompt, *response[:place]]])).logits[0, -1]
            total += logits.log_softmax(-1)[token].item()
    return total


def off(found: object, expected: float, what: str) -> str:
    number = found.detach() if isinstance(found, Tensor) else found
    value = float(number) if isinstance(number, int | float | Tensor) else float("nan")
    return (
        ""
        if abs(value - expected) <= 1e-3 * max(1.0, abs(expected))
        else f"{what} = {value:.6g}, expected {expected:.6g}"
    )


def norm_of_gradient(model: PreTrainedModel) -> float:
    squares = [float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None]
    return math.sqrt(sum(squares))


def log_prob_value(function: Function) -> str:
    """The value for a response, token by token."""
    model, tokenizer = bundled_model()
    prompt, response = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, RESPONSE))
    return off(function(model, tokenizer, PROMPT, RESPONSE), by_hand(model, prompt, response), "log π(response)")


def log_prob_gradient(function: Function) -> str:
    """Whether the weights get a gradient from it."""
    model, tokenizer = bundled_model()
    found = function(model, tokenizer, PROMPT, RESPONSE)
    if not (isinstance(found, Tensor) and found.requires_grad):
        return "the result has no gradient, so a loss made of it teaches nothing.  Is the forward pass under no_grad?"
    found.backward()
    return "" if norm_of_gradient(model) > 0 else "the gradient of the weights is 0"


def rewards_in_turn(*rewards: float) -> Callable[..., float]:
    ahead: Iterator[float] = iter(rewards)
    return lambda *_: next(ahead)


def step_learns(function: Function) -> str:
    """Whether a group of different rewards leaves a gradient."""
    model, tokenizer = bundled_model()
    torch.manual_seed(0)
    loss, mean, responses = function(model, tokenizer, PROMPT, "52", rewards_in_turn(1.0, 0.0, 0.0, 1.0), 4, 1.0, 12)
    if len(responses) != 4:
        return f"{len(responses)} responses, expected 4"
    moved = norm_of_gradient(model) > 0
    return off(mean, 0.5, "mean reward") or (
        "" if moved else f"loss = {loss:.4g}, and the gradient of the weights is 0"
    )


def step_skips(function: Function) -> str:
    """Whether a group of equal rewards has no loss."""
    model, tokenizer = bundled_model()
    loss, mean, _ = function(model, tokenizer, PROMPT, "52", lambda *_: 0.9, 4, 1.0, 12)
    return off(loss, 0.0, "loss") or off(mean, 0.9, "mean reward") or off(norm_of_gradient(model), 0.0, "gradient norm")


def padded_rows(tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor, list[tuple[list[int], list[int]]]]:
    """Two rows, padded on the left and on the right; their prompts' lengths; and their tokens without padding."""
    pad, stop = tokenizer.pad_token_id, tokenizer.eos_token_id
    texts = ((PROMPT, "52."), ("Add 47 and 5.\n", RESPONSE))
    pairs = [
        (tokenizer.encode(a, add_special_tokens=False), [*tokenizer.encode(b, add_special_tokens=False), stop])
        for a, b in texts
    ]
    left, right = max(len(a) for a, _ in pairs), max(len(b) for _, b in pairs)
    rows = [[pad] * (left - len(a)) + a + b + [pad] * (right - len(b)) for a, b in pairs]
    return torch.tensor(rows), torch.tensor([len(a) for a, _ in pairs]), pairs


def row_log_probs(function: Function) -> str:
    """The values of both rows, and their gradient."""
    model, tokenizer = bundled_model()
    rows, lengths, pairs = padded_rows(tokenizer)
    found = function(model, tokenizer, rows, lengths)
    if getattr(found, "shape", None) != (2,):
        return f"the shape is {[*getattr(found, 'shape', [])]}, expected [2]"
    if not found.requires_grad:
        return "the result has no gradient.  Is the forward pass under no_grad?"
    faults = (
        off(value, by_hand(model, *pair), f"row {i}") for i, (value, pair) in enumerate(zip(found, pairs, strict=True))
    )
    return next(filter(None, faults), "")


def samples_hold_prompts(function: Function) -> str:
    """Whether rows begin with the prompts that were asked."""
    model, tokenizer = bundled_model()
    prompts = [PROMPT, "Add 47 and 5.\n"]
    rows, lengths, texts = function(model, tokenizer, prompts, 2, 8)
    if (len(rows), len(lengths), len(texts)) != (4, 4, 4):
        return f"{len(rows)} rows, {len(lengths)} lengths and {len(texts)} texts, expected 4 of each"
    for row, length, prompt in zip(
        rows.tolist(), lengths.tolist(), [each for each in prompts for _ in range(2)], strict=True
    ):
        kept = [token for token in row if token != tokenizer.pad_token_id]
        if tokenizer.decode(kept[:length]) != prompt:
            return f"a row begins with {tokenizer.decode(kept[:length])!r}, expected {prompt!r}"
    return ""


def reference_is_not_the_policy(function: Function) -> str:
    """No completion of four tokens has the form, so advantages are 0 and only the KL remains."""
    model, tokenizer = bundled_model(adapted=True)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)
    config = HomeworkConfig(max_new_tokens=4, temperature=1.0)
    report = function(model, tokenizer, [PROMPT] * 2, optimizer, 1, config)
    fault = "loss = 0 although the adapter has moved: the reference is the policy.  Enter `with disable_adapter():`"
    return off(report["reward_mean"], 0.0, "reward_mean") or ("" if report["loss"] > 1e-6 else fault)


def rate_of_short_answers(function: Function) -> str:
    """Three tokens cannot have the form."""
    rate, answers = function(*bundled_model(), [PROMPT] * 2, 3)
    return off(rate, 0.0, "the rate of answers of three tokens") or (
        "" if len(answers) == 2 else f"{len(answers)} answers"
    )


def head_beside_logits(function: Function) -> str:
    """Whether logits are the model's own, and values have one number a token."""
    model, _ = bundled_model()
    rows = torch.randint(2, 300, (2, 6))
    logits, values = function(model)(rows)
    if values.shape != (2, 6):
        return f"values have the shape {[*values.shape]}, expected [2, 6]"
    with torch.no_grad():
        gap = (logits - model(rows).logits).abs().max().item()
    return off(gap, 0.0, "largest difference of the logits") or (
        "" if values.requires_grad else "values have no gradient"
    )


def rlhf_has_a_policy_term(function: Function) -> str:
    """Whether rewards without the other losses move the policy."""
    model, tokenizer = bundled_model()
    reference = bundled_model()[0]
    actor = TransformerWithValueHead(model)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    config = RLHFConfig(prompts=[PROMPT] * 2, max_gen_len=8, kl_coef=0.0, value_coef=0.0)
    torch.manual_seed(0)
    before = [each.clone() for each in model.parameters()]
    report = function(actor, reference, tokenizer, config, optimizer, lambda texts: [1.0, 0.0])
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return off(report["mean_reward"], 0.5, "mean_reward") or (
        "" if moved else "without KL and value loss no weight of the policy moves: there is no policy term"
    )


def equal_models_score_alike(function: Function) -> str:
    """A model compared with itself."""
    model, tokenizer = bundled_model()
    means = function(PROMPT, model, model, tokenizer, 8)
    return off(means["trained"], means["reference"], "mean reward of the model compared with itself")


@dataclass(frozen=True)
class WrittenTokenizer:
    """Decodes any ids to texts that are given."""

    texts: Sequence[str]

    def batch_decode(self, ids: object, skip_special_tokens: bool = False) -> list[str]:
        return [*self.texts]


SAMPLE = {"input_ids": [1, 2, 3, 4, 5], "nums": [2, 3, 4, 6], "target": 24}
GENERATIONS = [[10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40, 41]]
WRITTEN = WrittenTokenizer(
    (
        "<think>6 * 4 = 24</think>\n<answer>6 * 4</answer>",
        "<think>Let me see...</think>\n<answer>2 + 3</answer>",
        "The answer is 24",
        "<think>Hmm</think>\n<answer>4 * 6</answer>",
    )
)


def one_advantage_for_all_tokens(function: Function) -> str:
    """Rewards and advantages of four written completions."""
    episodes, stats = function([SAMPLE], GENERATIONS, WRITTEN, 4)
    if stats["rewards"] != [1.0, 1.0, 0.0, 1.0]:
        return f"rewards = {stats['rewards']}, expected [1.0, 1.0, 0.0, 1.0]: 6 * 4 uses two of the four numbers"
    # Mean .75, deviation of the sample √(.75 / 3) = .5.
    for given, ids, expected in zip(episodes["all_advantages"], GENERATIONS, (0.25, 0.25, -0.75, 0.25), strict=True):
        if len(given) != len(ids):
            return f"{len(given)} advantages for {len(ids)} tokens"
        fault = next(filter(None, (off(each, expected / 0.5001, "advantage") for each in given)), "")
        if fault:
            return fault
    return ""


def problem_is_fair(function: Function) -> str:
    """Twenty problems."""
    from posttrain.rewards.countdown import puzzle
    from posttrain.tasks.countdown_problems import solvable

    for seed in range(20):
        numbers, target = function(seed)
        if not solvable(puzzle(numbers, target, "subset")):
            return f"{numbers} cannot make {target}"
        if target in numbers or target < 1:
            return f"target = {target} of {numbers}: given away, or not positive"
    return ""


def prompt_names_all(function: Function) -> str:
    """What the text must name."""
    text = function([2, 3, 4, 6], 24)
    missing = [word for word in ("2", "3", "4", "6", "24", "<think>", "<answer>") if word not in text]
    return f"the prompt does not say {', '.join(missing)}" if missing else ""


LAWS = {
    "compute_log_probs": [
        Law(says="the sum of log π over the response's tokens", fault=log_prob_value),
        Law(says="it has a gradient", fault=log_prob_gradient),
    ],
    "grpo_step": [
        Law(says="different rewards leave a gradient", fault=step_learns),
        Law(says="equal rewards leave no gradient", fault=step_skips),
    ],
    "completion_log_probs": [Law(says="rows padded on both sides, stop token included", fault=row_log_probs)],
    "sample_group": [Law(says="rows begin with their prompts", fault=samples_hold_prompts)],
    "grpo_update": [Law(says="the reference is the model without its adapter", fault=reference_is_not_the_policy)],
    "evaluate_format_rate": [Law(says="short answers have no form", fault=rate_of_short_answers)],
    "TransformerWithValueHead": [Law(says="the model's logits, and a value for each token", fault=head_beside_logits)],
    "rlhf_step": [Law(says="rewards move the policy", fault=rlhf_has_a_policy_term)],
    "compare_models": [Law(says="a model compared with itself", fault=equal_models_score_alike)],
    "create_grpo_training_episodes": [
        Law(says="rewards as graded, and one advantage for all tokens", fault=one_advantage_for_all_tokens)
    ],
    "generate_countdown_problem": [Law(says="it can be solved and is not given away", fault=problem_is_fair)],
    "create_countdown_prompt": [Law(says="it names the numbers, the target and the tags", fault=prompt_names_all)],
}
