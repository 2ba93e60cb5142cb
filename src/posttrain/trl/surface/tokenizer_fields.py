"""eos_token and chat_template_path: what a script's arguments change of the tokenizer before anything is read."""

from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from posttrain.errors import UserError
from posttrain.models.policy import Policy, stop_ids
from posttrain.trl.fields.training_fields import TrainingFields


def with_tokenizer_fields(policy: Policy, args: TrainingFields) -> Policy:
    """The policy with the stop token and the chat template that the arguments name; its tokenizer is changed."""
    owner, given = type(args).__name__, vars(args)
    template, eos_token = given.get("chat_template_path"), given.get("eos_token")
    if template is not None:
        copy_template(policy, str(template), owner)
    if eos_token is None:
        return policy
    tokenizer, model = policy.tokenizer, policy.model
    if eos_token not in tokenizer.get_vocab():
        raise UserError(f"{owner}: eos_token = {eos_token!r} is not a token of the tokenizer.  Name one that it has.")
    tokenizer.eos_token = eos_token
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return replace(policy, stop_ids=stop_ids(model, tokenizer))


def copy_template(policy: Policy, path: str, owner: str) -> None:
    """Have the tokenizer write chats as a Jinja file says, or the tokenizer of a folder or of the hub."""
    if path.endswith((".jinja", ".j2")):
        if not Path(path).is_file():
            raise UserError(f"{owner}: chat_template_path = {path!r}: there is no such file.")
        policy.tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        return
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{owner}: chat_template_path = {path!r}: no tokenizer can be read there.  Give a .jinja file or a folder"
            " with a tokenizer."
        ) from error
    if not other.chat_template:
        raise UserError(f"{owner}: chat_template_path = {path!r}: its tokenizer has no chat template.")
    missing = [each for each in other.all_special_tokens if each not in policy.tokenizer.get_vocab()]
    used = [each for each in missing if each in str(other.chat_template)]
    if used:
        raise UserError(
            f"{owner}: chat_template_path = {path!r}: its template writes {', '.join(used)}, which the model has no"
            " token for.  Add them to model and tokenizer, and give both."
        )
    policy.tokenizer.chat_template = other.chat_template
