"""A chat template of the user's own in place of the model's."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError


def with_chat_template(tokenizer: PreTrainedTokenizerBase, file: str) -> PreTrainedTokenizerBase:
    """The tokenizer with the template in a file, which is then saved with it; as it is where no file is named."""
    if file:
        try:
            tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"model.chat_template = {file}: cannot be read as text in UTF-8 ({error}).  Give the file of a Jinja"
                " template."
            ) from error
    return tokenizer
