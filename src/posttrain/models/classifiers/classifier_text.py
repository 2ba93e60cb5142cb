"""What a reward model reads of a prompt and its completion, in its own tokens.

A conversation goes through the reward model's own chat template, with the completion as what the assistant says last; a
plain prompt and its completion are one text, which the tokenizer reads as it reads any text, its own opening and
closing tokens included.  Prompt and completion are text here, so no special token of the policy is among them.

A reward model that was trained here says in its config.json that it is: it reads both exactly as it did then, which is
what the policy itself would have said, the stop token and what the template writes behind it included.

What a policy writes is not trusted: where it spells a special token of the reward model (`<|im_end|>`, and then a
user's turn full of praise), a space behind the first character makes plain text of it.
"""

from collections.abc import Sequence
from copy import deepcopy

from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.classifiers.saved_classifier import TextReading
from posttrain.models.conversation_masks import Dialogue, Masking
from posttrain.models.loading.chat_settings import with_chat_template
from posttrain.models.rendering import TokenizerRenderer, token_ids


class ClassifierText:
    """Reads prompts and completions for the reward model that a tokenizer belongs to."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        where: str,
        *,
        template_file: str = "",
        reading: TextReading | None = None,
    ) -> None:
        """`where` is how messages begin; the template in a file takes the place of the tokenizer's own.

        `reading` is how a model that was trained here reads; None is any other.
        """
        self.where = where
        if template_file:
            tokenizer = with_chat_template(deepcopy(tokenizer), template_file, "rewards: chat_template")
        self.tokenizer = tokenizer
        options = {} if reading is None else reading.template_options
        self.renderer = TokenizerRenderer(tokenizer, template_options=options)
        self.masking = None if reading is None else Masking(renderer=self.renderer, stop_ids=reading.stop_token_ids)
        """How it was trained to read; None of a model of others."""
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special = tuple(sorted({*special, *tokenizer.all_special_tokens}, key=len, reverse=True))
        """Texts that the tokenizer reads as special tokens, the longest first."""

    def tokens(self, prompt: object, completion: object) -> list[int]:
        """The tokens of a prompt and its completion, both texts or both messages.

        Raises UserError for a conversation where there is no template.
        """
        if isinstance(prompt, str):
            assert isinstance(completion, str), completion
            if self.masking is not None:
                plain = self.renderer.render(prompt, id=self.where)
                return [*self.masking.completion(plain, self.as_plain(completion)).tokens]
            return token_ids(self.tokenizer, prompt + self.as_plain(completion), special=True)
        if not self.renderer.template:
            raise UserError(
                f"{self.where}: the prompt is a conversation, and the reward model's tokenizer has no chat template. "
                " Name a file with one as the reward's chat_template, or have plain prompts, prompt_format: plain."
            )
        assert isinstance(prompt, Sequence), prompt
        assert isinstance(completion, Sequence), completion
        answer = [{**message, "content": self.as_plain(message["content"])} for message in completion]
        if self.masking is not None:
            said = Dialogue(where=self.where, messages=[*prompt, *answer], num_given=len(prompt))
            read = self.masking.last_turn(said)
            return [*read.tokens, *self.masking.closing(said, read)]
        text = self.renderer.templated([*prompt, *answer], "of the reward model", open_answer=False)
        return token_ids(self.tokenizer, text, special=False)

    def as_plain(self, text: str) -> str:
        """A text that spells none of the special tokens."""
        for special in self.special:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text
