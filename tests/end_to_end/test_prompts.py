"""Prompts from a row to what the model reads: formats, templates of one's own, and the preview of both."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.cli import main
from posttrain.generation.in_process import InProcessSampling
from posttrain.generation.request import Continuation
from posttrain.models.loading.model_folder import load_policy, load_tokenizer
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.runs.prompt_preview import MOST_CHARACTERS, Reader, first_step_lines, prompt_preview_lines
from posttrain.server.openai_requests import read_completion_request
from posttrain.tasks.dataset import DatasetTask
from tests.support.commands import printed, refusal
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model, tiny_recipe

TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING = TURNS.replace("assistant: {% endif %}", "assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}")
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "42"}
SYSTEM = {"role": "system", "content": "Be brief."}


def rendered(prompt: object, *, template: str | None = TURNS, **options: Any) -> Prompt:
    """The prompt of a row as a dataset with these options gives it."""
    tokenizer = new_tokenizer()
    tokenizer.chat_template = template
    settings, rows = DatasetOptions(held_out_share=0.0, **options), [{"prompt": prompt, "answer": "4"}]
    task = DatasetTask(settings, TokenizerRenderer(tokenizer), seed=0, prompts_per_step=1, rows=rows)
    return task.prompts(1, range(1))[0]


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("hi", {}, "hi"),
        ([USER], {}, "user: hi\nassistant: "),
        ("hi", {"prompt_format": "chat"}, "user: hi\nassistant: "),
        ([USER], {"prompt_format": "chat"}, "user: hi\nassistant: "),
        ("hi", {"prompt_format": "plain"}, "hi"),
        ([USER], {"prompt_format": "plain"}, "hi"),
        ([SYSTEM, USER, SAID, USER], {"prompt_format": "plain"}, "Be brief.\n\nhi\n\n42\n\nhi"),
        ("hi", {"system": "Be brief."}, "system: Be brief.\nuser: hi\nassistant: "),
        ("hi", {"system": "Be brief.", "prompt_format": "plain"}, "Be brief.\n\nhi"),
        ([USER], {"system": "Be brief.", "prompt_format": "plain", "prefill": "\n<think>"}, "Be brief.\n\nhi\n<think>"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {"prompt_format": "plain"}, "hi"),
    ],
)
def test_a_prompt_has_the_shape_of_its_format(prompt: object, options: Mapping[str, Any], text: str) -> None:
    made = rendered(prompt, **options)
    assert made.text == text
    assert (made.messages is None) == ("user: " not in text)  # rewards get completions of the shape of the prompt
    if made.messages is None:
        assert rendered(prompt, template=None, **options).tokens == made.tokens


@pytest.mark.parametrize("options", [{"prompt_format": "chat"}, {"system": "Be brief."}])
def test_a_model_without_a_template_is_pointed_to_plain_text(options: Mapping[str, Any]) -> None:
    with refused("rows:1", "has no chat template.", "task.prompt_format: plain"):
        rendered("hi", template=None, **options)
    assert rendered("hi", template=None, **{**options, "prompt_format": "plain"}).text.endswith("hi")


def test_content_in_parts_is_measured_and_cut_as_the_text_that_it_is() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "word " * 40}, {"type": "text", "text": "end"}]}]
    made = rendered(parts, max_prompt_tokens=30, over_long="cut_left")
    assert len(made.tokens) <= 30
    assert made.text.endswith("word end\nassistant: ")


def test_a_last_message_of_the_assistants_is_asked_about_and_is_what_is_said_of_it() -> None:
    with refused("rows:1: the last message is the assistant's: '42'", "`drop`", "`prefill`"):
        rendered([USER, SAID])
    begun = rendered([USER, SAID], last_assistant_message="prefill", prefill="!")
    assert (begun.text, begun.prefill) == ("user: hi\nassistant: 42!", "42!")
    left_out = rendered([USER, SAID, SAID], last_assistant_message="drop")
    assert (left_out.text, left_out.prefill) == ("user: hi\nassistant: ", "")
    assert rendered([USER, SAID], last_assistant_message="drop", prompt_format="plain").text == "hi"
    with refused("last_assistant_message = prefill needs a chat template"):
        DatasetOptions(last_assistant_message="prefill", prompt_format="plain")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def test_a_template_file_replaces_the_models_and_is_saved_with_it(tmp_path: Path, model: Path, capsys) -> None:
    (tmp_path / "turns.jinja").write_text(THINKING)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]}\n')
    recipe = tiny_recipe(
        tmp_path / "place",
        model={"chat_template": str(tmp_path / "turns.jinja"), "template_options": {"enable_thinking": True}},
        task={"name": "dataset", "path": str(rows), "held_out_share": 0.0, "held_out_size": 4},
        rewards=[{"name": "period_count"}],
        run={"num_steps": 1},
    )
    assert main(["rl", str(recipe)]) == 0, capsys.readouterr().err
    run = tmp_path / "place" / "run"
    assert AutoTokenizer.from_pretrained(run / "model").chat_template == THINKING
    files = json.loads((run / "inputs.json").read_text())["files"]
    assert files["model.chat_template"]["is"] == str(tmp_path / "turns.jinja")
    (tmp_path / "turns.jinja").write_text(TURNS)
    said = refusal("rl", "--resume", run)
    assert f"model.chat_template = {tmp_path / 'turns.jinja'} has changed since the run began" in said


def test_a_missing_template_file_is_told_before_anything_is_loaded(tmp_path: Path, model: Path) -> None:
    for words in (["chat", str(model), "--prompt", "hi"], ["rl", "own-model", "--task.path", "x"]):
        said = refusal(*words, "--model.chat-template", "none.jinja")
        assert "model.chat_template = none.jinja: no such file." in said
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with refused("latin.jinja: cannot be read as text in UTF-8"):
        load_policy(ModelOptions(path=str(model), chat_template=str(tmp_path / "latin.jinja")))


@pytest.mark.parametrize("generation", [True, False])
def test_a_tokenizer_without_its_model_has_the_same_stop_tokens(model: Path, generation: bool) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 7]}))
    if generation:
        (model / "generation_config.json").write_text('{"eos_token_id": 9}')
    else:
        (model / "generation_config.json").unlink()
    options = ModelOptions(path=str(model))
    expected = (0, 5, 7, 9) if generation else (0, 5, 7)  # 0 is the tokenizer's own
    assert load_tokenizer(options)[1] == load_policy(options).stop_ids == expected


def reader(template: str | None = TURNS, **others: Any) -> Reader:
    tokenizer = new_tokenizer()
    tokenizer.chat_template = template
    return Reader(tokenizer=tokenizer, stop_ids=(0, 1), **others)


def test_a_preview_shows_special_tokens_prefill_last_ids_and_columns() -> None:
    made = rendered([USER], prefill="<think>\n")
    lines = prompt_preview_lines([made], reader(template_file="t.jinja", template_options={"enable_thinking": False}))
    tokens = made.tokens
    newline = tokens[-1]
    assert lines[:2] == ["template   t.jinja, with enable_thinking = False", 'stop ids   0 "<|end|>", 1 "<|pad|>"']
    assert lines[4:] == [
        f"prompt     rows:1, {len(tokens)} tokens, through the chat template",
        "  user: hi",
        "  assistant: ▶⟦<think>⟧",
        "  ",
        f'last ids   {tokens[-4]} ":", {tokens[-3]} " ", {tokens[-2]} "<think>", {newline} "\\n"',
        "columns    answer = '4'",
    ]
    assert prompt_preview_lines([rendered("hi")], reader(None))[0] == "template   not used: the prompts are text"
    assert prompt_preview_lines([rendered("hi")], reader())[0].endswith("text (the model has a template)")


def test_a_prefill_that_shares_a_token_with_the_prompt_is_marked_in_it() -> None:
    made = rendered("ab ", prefill="use")
    whole = reader().tokenizer.tokenize("ab use")
    assert "Ġuse" in whole  # the last character of the prompt and the prefill are one token
    assert "  ab ▶use" in prompt_preview_lines([made], reader())


def test_a_prefill_that_the_tokens_do_not_spell_is_told_apart_from_them() -> None:
    # Tokenizers that put a blank before words give other text back than they were given.
    made = replace(rendered("ab"), prefill="no such end")
    assert 'prefill    "no such end"' in prompt_preview_lines([made], reader())


def test_hostile_prompts_columns_and_completions_send_nothing_to_the_terminal() -> None:
    bad = "\x1b[2J\x07\r\u202e\u2028x"
    tokenizer = reader().tokenizer
    prompt = TokenizerRenderer(tokenizer).render(
        f"a{bad}", id=f"rows{bad}", prefill=bad, columns={bad: bad, "y": [bad]}
    )
    tokens = tuple(tokenizer(bad)["input_ids"])
    rollout = Rollout(
        sample=0, sequence=TokenSequence.one_turn(tokens, logprobs=(0.0,) * len(tokens), finish=Finish.LENGTH), text=bad
    )
    scores = torch.tensor([[[0.5]], [[float("nan")]]], dtype=torch.float64)
    weights = torch.ones(2, dtype=torch.float64)
    grades = Grades(names=("f", bad), scores=scores, weights=weights, rewards=scores[0], outcomes={"f": ((bad,),)})
    group = Group(prompt=prompt, draw=0, rollouts=(rollout,))
    lines = first_step_lines([group], grades, 1, reader(template_file=bad))
    assert all(line.isprintable() for line in lines)
    said = "\n".join(lines)
    assert "\\x1b[2J\\x07\\r\\u202e\\u2028x" in said
    assert re.search(r"scores     f 0.5 \(\\x1b.*\), \\x1b.* none; reward 0.5", said)
    assert f"completion {len(tokens)} tokens, cut off at the limit" in said


def test_the_middle_of_a_long_prompt_is_left_out_and_a_piece_of_a_character_is_named() -> None:
    lines = prompt_preview_lines([rendered("x" * 3 * MOST_CHARACTERS)], reader())
    assert f"  … {2 * MOST_CHARACTERS} characters are not shown …" in lines
    assert max(map(len, lines)) < MOST_CHARACTERS
    (last,) = [line for line in prompt_preview_lines([rendered("é")], reader()) if line.startswith("last ids")]
    assert "�" not in last
    assert '"Ã"' in last  # the byte-level piece of the first of its two bytes


def test_a_template_that_begins_the_answer_is_told_of_unless_the_prefill_says_so() -> None:
    renderer = TokenizerRenderer(reader(THINKING).tokenizer, template_options={"enable_thinking": True})
    silent, told = (renderer.render([USER], id="p", prefill=prefill) for prefill in ("<think>", ""))
    assert silent.tokens == told.tokens
    note = "note       the chat template begins the answer with `<think>`, which the rewards do not"
    assert not any(line.startswith("note") for line in prompt_preview_lines([silent], reader()))
    assert any(line.startswith(note) for line in prompt_preview_lines([told], reader()))


def test_the_old_switch_for_conversations_is_told_with_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("task: {path: rows.jsonl, chat: true}\n")
    assert re.search(r"task\.chat: no such field\..*prompt_format", refusal("config", tmp_path / "old.yaml"))
    said = refusal("rl", "own-model", "--task.path", "rows.jsonl", "--task.chat", "true")
    assert "Did you mean `--task.prompt-format`?" in said


def test_the_help_says_that_a_file_of_rows_makes_the_task() -> None:
    words = " ".join(printed("rl", "--help").replace("│", " ").split())
    assert "Or a file of rows, which selects the task `dataset`" in words


def test_as_many_prompts_as_asked_for_are_shown_without_the_weights(tmp_path: Path, model: Path, capsys) -> None:
    (model / "model.safetensors").write_bytes(b"not read")
    recipe = tiny_recipe(tmp_path / "place", rollout={"prompts_per_step": 2})
    out = printed("rl", recipe, "--show-prompts", "5")
    assert len(re.findall(r"^prompt     train/", out, flags=re.MULTILINE)) == 5
    assert 'stop ids   0 "<|end|>"' in out
    assert len(set(re.findall(r"^prompt     (train/\d+)", out, flags=re.MULTILINE))) == 5
    assert "--show-prompts = -1" in refusal("rl", recipe, "--show-prompts", "-1")


def test_a_dry_run_shows_a_prompt_a_completion_and_its_scores(tmp_path: Path, model: Path) -> None:
    recipe = tiny_recipe(tmp_path / "place")
    for flags, count in (([], 1), (["--show-prompts", "3"], 3)):
        out = printed("rl", recipe, "--dry-run", *flags)
        assert out.startswith("model      ")
        for line in (r"prompt     train/.*", r"completion \d tokens, .*", r"scores     dice [\d.]+; reward [\d.]+"):
            assert len(re.findall(rf"^{line}$", out, flags=re.MULTILINE)) == count


def test_a_run_is_asked_as_it_was_trained_unless_told_otherwise(tmp_path: Path, model: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model.rename(run / "model")
    (run / "model" / "chat_template.jinja").write_text(THINKING)
    (run / "config.yaml").write_text(
        "model: {path: elsewhere, template_options: {enable_thinking: true}}\n"
        "task: {name: dataset, path: rows.jsonl, system: Be brief., prefill: So}\n"
    )
    read: list[str] = []
    put = InProcessSampling.put

    def asked_for(*words: str) -> str:
        monkeypatch.setattr(InProcessSampling, "put", refuse)
        with pytest.raises(RuntimeError):
            main(["chat", str(run), "--prompt", "hi", *words])
        return read[-1]

    def refuse(sampling: InProcessSampling, continuations: Sequence[Continuation]) -> None:
        if sampling.request.key.purpose == "parity":
            put(sampling, continuations)
            return
        read.append(sampling.policy.tokenizer.decode(continuations[0].prefix))
        raise RuntimeError("enough")

    assert asked_for() == "system: Be brief.\nuser: hi\nassistant: <think>So"
    assert asked_for("--system", "", "--prefill", "<think>") == "user: hi\nassistant: <think>"
    off = ["--model.template-options", "{enable_thinking: false}"]
    assert asked_for("--system", "x", "--prefill", "", *off) == "system: x\nuser: hi\nassistant: "
    assert asked_for("--prompt-format", "plain", "--prefill", "") == "Be brief.\n\nhi"


def test_a_served_chat_is_written_with_the_options_of_the_template(model: Path) -> None:
    policy = load_policy(ModelOptions(path=str(model)))
    policy.tokenizer.chat_template = THINKING
    asked = [{"messages": [USER]}, {"messages": [{**USER, "content": [{"type": "text", "text": "hi"}]}]}]
    for options, ends in (({}, "assistant: "), ({"enable_thinking": True}, "assistant: <think>")):
        renderer = TokenizerRenderer(policy.tokenizer, template_options=options)
        for body in asked:
            request = read_completion_request(body, policy, renderer, chat=True)
            assert request.prompts[0].text == f"user: hi\n{ends}"
    said = refusal("serve", model, "--model.template-options", "{x: 1}")
    assert "model.template_options.x: the chat template reads no variable" in said
