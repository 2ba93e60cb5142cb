"""SFTTrainer: TRL's constructor and methods on `posttrain.train_sft`."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, cast

from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

from posttrain.config import SftConfig
from posttrain.errors import UserError
from posttrain.options.training import SftOptions
from posttrain.records import Example
from posttrain.runs.reports import Run
from posttrain.tasks.row_files.rows import GivenRows
from posttrain.training.sft.example_maker import LABELS, MASKS, NOT_LEARNED, TOKENS
from posttrain.training.sft.learned_rows import RowExamples
from posttrain.training.sft.sft_run import example_source, held_out_loss, train_sft
from posttrain.trl.base_trainer import BaseTrainer
from posttrain.trl.configs.recipe import NO_LIMIT, RunLength, adamw_options
from posttrain.trl.configs.trainer_configs import SFTConfig
from posttrain.trl.log_entries import Entry
from posttrain.trl.model_source import Dataset, Given, Optimizers, PeftConfig, Row


class TokenRows(Sequence[dict[str, list[int]]]):
    """The rows as tokens with labels, made at the first read; a column by its name."""

    column_names = (TOKENS, LABELS)

    def __init__(self, make: Callable[[], Sequence[Example]], *, learned_whole: bool) -> None:
        """With `learned_whole`, the label of the first token, which nothing predicts, is the token, as in TRL."""
        self.make, self.learned_whole = make, learned_whole

    @cached_property
    def examples(self) -> Sequence[Example]:
        return self.make()

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self.row(example) for example in self.examples)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [self.row(example)[key] for example in self.examples]
        found = self.examples[key]
        return self.row(found) if isinstance(found, Example) else [self.row(each) for each in found]

    def row(self, example: Example) -> dict[str, list[int]]:
        ids = [*example.tokens]
        masked = [token if each else NOT_LEARNED for token, each in zip(ids, example.sampled, strict=True)]
        return {TOKENS: ids, LABELS: ids if self.learned_whole else masked}


class SFTTrainer(BaseTrainer[SFTConfig]):
    """Trains a model on rows, with the interface of TRL's class; the loop is `posttrain.train_sft`."""

    config_class = SFTConfig
    only_default: ClassVar[Mapping[str, str]] = {
        **BaseTrainer.only_default,
        "compute_loss_func": "the loss is -log π of what is learned",
    }
    logged = (*BaseTrainer.logged, "entropy", "mean_token_accuracy")
    given_rows: Dataset | None
    _shown: TokenRows | None

    def __init__(
        self,
        model: str | nn.Module,
        args: SFTConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[Any] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig = None,
        formatting_func: Callable[[Row], str] | None = None,
        **not_here: object,
    ) -> None:
        """`formatting_func` makes the text of a row.  `not_here` are arguments that only accept their default."""
        self.require_defaults({"data_collator": data_collator, **not_here})
        self.formatting_func = formatting_func
        source = model, processing_class, peft_config, quantization_config
        given = Given(*source, callbacks, train_dataset, eval_dataset, optimizers)
        super().__init__(args, given)
        held_out = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        for name, rows in (("train_dataset", self.given_rows), *(("eval_dataset", each) for each in held_out)):
            if isinstance(rows, Sized) and len(rows) > 0 and not isinstance(rows, Mapping):
                self.rows(list(islice(cast(Dataset, rows), 1)), name)
        self._finish_init()

    @property
    def train_dataset(self) -> Dataset | None:
        """The rows as they are learned, with `input_ids` and `labels`; a stream is returned unchanged."""
        given = self.given_rows
        if given is None or not hasattr(given, "__len__"):
            return given
        if self._shown is None:
            rows = self.train_rows()
            learned_whole = self.described(rows)[0].sft.loss_on == "all"
            self._shown = TokenRows(lambda: self._examples(rows), learned_whole=learned_whole)
        return self._shown

    @train_dataset.setter
    def train_dataset(self, given: Dataset | None) -> None:
        """Other rows to learn."""
        self.given_rows, self._shown = given, None

    def train_rows(self) -> list[Row]:
        return self.rows(self.given_rows, "train_dataset")

    def recipe(self, rows: list[Row], length: RunLength) -> SftConfig:
        return SftConfig(sft=self.options(rows, length), **self.sections(length))

    def options(self, rows: Sequence[Row], length: RunLength) -> SftOptions:
        args, longest = self.args, self.policy.max_positions
        given = args.max_seq_length or args.max_length
        limit = min(given or longest, longest)
        # As in TRL, completions are learned without their prompts, and all of messages and text.
        everything = args.completion_only_loss is False if "completion" in rows[0] else not args.assistant_only_loss
        return SftOptions(
            **adamw_options(args, self.model_options, length.updates),
            loss_on="all" if everything and TOKENS not in rows[0] else "assistant",
            measure_entropy=True,
            max_length=limit,
            long_rows="error" if given is None else "cut",
            rows_per_batch=args.rows_per_update,
            tokens_per_batch=NO_LIMIT,
            tokens_per_microbatch=max(2, args.per_device_train_batch_size * limit),
        )

    def _examples(self, rows: list[Row]) -> list[Example]:
        source = example_source(self.described(rows)[0], self.policy, GivenRows(rows=rows))
        assert isinstance(source, RowExamples)
        return [each.unpacked() for each in source.trained]

    def _fit(self, config: SftConfig, **given: Any) -> Run:
        return train_sft(config, **given)

    def _measured(self, rows: list[Row]) -> Entry:
        budget = self.described(rows)[0].sft.tokens_per_microbatch
        measured = held_out_loss(self.policy, self._examples(rows), budget)
        return {name: measured[name] for name in ("loss", "entropy", "mean_token_accuracy")}

    def rows(self, given: Dataset | None, name: str) -> list[Row]:
        """The rows with the columns that are learned."""
        rows, args, text = super().rows(given, name), self.args, self.formatting_func
        column = args.dataset_text_field
        if TOKENS in rows[0]:
            completion, assistant = args.completion_only_loss is not False, args.assistant_only_loss
            read = {"completion_mask": completion, "assistant_masks": assistant}
            rows = [{key: value for key, value in row.items() if read.get(key, key not in MASKS)} for row in rows]
        elif text is not None:
            rows = [{"text": text(row)} for row in rows]
        elif column in rows[0] and (column != "text" or not {"messages", "completion"} & rows[0].keys()):
            rows = [{"text": row[column]} for row in rows]  # only this one: others may be of a format that we read
        require_learned_part(args, rows[0], name)
        return rows


def require_learned_part(args: SFTConfig, row: Row, name: str) -> None:
    """Reject a loss on a part of rows if the rows do not mark this part: otherwise all of each would be learned."""
    of_tokens = TOKENS in row and LABELS not in row
    text = "text" in row and "completion" not in row
    parts = {
        "completion_only_loss": (
            args.completion_only_loss is True,
            "completion_mask" not in row if of_tokens else TOKENS not in row and "completion" not in row,
            "a separate completion.  Give rows with `prompt` and `completion`",
        ),
        "assistant_only_loss": (
            args.assistant_only_loss,
            "assistant_masks" not in row if of_tokens else text,
            "turns.  Give rows with `messages`",
        ),
    }
    for field, (is_set, lacks, remedy) in parts.items():
        if is_set and lacks:
            raise UserError(f"SFTConfig: {field} = True, and {name} has rows of {', '.join(row)} without {remedy}.")
    if args.assistant_only_loss and args.completion_only_loss is False and "completion" in row:
        raise UserError(
            "SFTConfig: assistant_only_loss = True with completion_only_loss = False needs rows with `messages`, and"
            " these have `prompt` and `completion`.  Leave one of them out."
        )
