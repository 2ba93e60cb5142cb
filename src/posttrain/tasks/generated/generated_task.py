"""Problems of a generator of reasoning-gym (extra `gym`): puzzles, logic, algorithms and arithmetic without end.

**What the prompt looks like.**  The generator's question, word for word; `task.system` may ask for `<answer>` tags.

**What earns what.**  The reward `generated` (posttrain.rewards.generated_reward): 1 for a right answer.

**Which problems are trained on.**  As in posttrain.tasks.dataset: equal questions stay together, and a share of the
different ones, chosen by a hash, is held out.  The rows are those of the generator's own seed, whatever the run's is.

**Data source and licence.**  reasoning-gym, Apache-2.0; problems are made on this machine.
"""

from posttrain.rewards.generated_reward import GeneratedReward
from posttrain.rewards.grading.function import RewardFunction
from posttrain.tasks.dataset import DatasetTask


class GeneratedTask(DatasetTask):
    """Rows of one generator."""

    name = "generated"
    reward_functions: tuple[RewardFunction, ...] = (
        RewardFunction(name="generated", call=GeneratedReward(), text_only=True, bounded=True),
    )
