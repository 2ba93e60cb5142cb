"""Adapters go to peft and come from it, with the same logits; what is more than plain LoRA is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.loading.folder_kinds import bundled_folder
from posttrain.models.loading.model_folder import load_policy, load_tokenizer
from posttrain.models.loading.saving import save_adapter, save_trained
from posttrain.models.policy import as_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from tests.support.adapted import Pair, completion_logprobs, fill
from tests.support.model_folders import small_folder
from tests.support.refusals import mentions, refused
from tests.support.tiny import plain_logprobs, request, some_prompts, tiny_model, tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # transformers to peft
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
]
IDS = torch.arange(5, 25)[None]
EXAMPLES = [Pair((3, 9, 4), (7, 12, 8, 5)), Pair((2,), (6, 1, 5))]


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def base() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)


@pytest.mark.parametrize(
    "options",
    [AdapterOptions(rank=3, alpha=7, targets=("q_proj", "mlp.down_proj")), AdapterOptions(rank=4, rslora=True)],
)
def test_peft_reads_what_we_write_and_we_read_it_again(options: AdapterOptions, tmp_path: Path) -> None:
    policy = load_policy(ModelOptions(adapter=options))
    fill(policy.model)
    save_adapter(policy, tmp_path / "a")
    with_peft = peft.PeftModel.from_pretrained(base(), tmp_path / "a")
    torch.testing.assert_close(logits(with_peft), logits(policy.model), rtol=0, atol=1e-5)
    assert (logits(base()) - logits(policy.model)).abs().max() > 0.1
    again = load_policy(ModelOptions(path=str(tmp_path / "a")))
    assert torch.equal(logits(again.model), logits(policy.model))
    assert all(p.requires_grad == ("lora_" in name) for name, p in again.model.named_parameters())


def saved_by_peft(folder: Path, **settings: object) -> torch.nn.Module:
    chosen = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **settings}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(base(), peft.LoraConfig(init_lora_weights=False, **chosen))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "lora_dropout": 0.1},
        {"rank_pattern": {"up_proj": 5}, "alpha_pattern": {"layers.1.self_attn.q_proj": 11}},
        {"target_modules": "all-linear"},
    ],
)
def test_we_read_what_peft_saves(settings: dict[str, object], tmp_path: Path) -> None:
    expected = logits(saved_by_peft(tmp_path / "a", **settings).eval())
    policy = load_policy(ModelOptions(path=str(tmp_path / "a")))
    torch.testing.assert_close(logits(policy.model), expected, rtol=0, atol=1e-5)
    save_adapter(policy, tmp_path / "b")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "b").eval()
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("save", ["adapter", "merged", "both"])
def test_a_run_keeps_the_adapter_or_a_merged_model_or_both(save: str, tmp_path: Path) -> None:
    policy = load_policy(ModelOptions(adapter=AdapterOptions(rank=3)))
    fill(policy.model)
    save_trained(policy, tmp_path, save, "# A card\n")
    assert (tmp_path / "adapter").is_dir() == (save != "merged")
    assert (tmp_path / "model").is_dir() == (save != "adapter")
    for folder in tmp_path.iterdir():
        assert (folder / "tokenizer.json").is_file()
        assert "# A card" in (folder / "README.md").read_text(encoding="utf-8")
    if save != "adapter":
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        # Sums of a few hundred float32 products, of logits up to 30.
        torch.testing.assert_close(logits(merged), logits(policy.model), rtol=1e-5, atol=1e-4)
        card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
        mentions(card, "An adapter of 28 layers was merged in float32 onto the base's weights", "stored in float32")
    found = load_policy(ModelOptions(path=str(tmp_path / ("model" if save == "merged" else "adapter"))))
    assert bool(lora_layers(found.model)) == (save != "merged")


def test_the_card_of_a_model_merged_from_4_bits_says_onto_which_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    policy = load_policy(ModelOptions(adapter=AdapterOptions(rank=3, save="merged"), quantization="nf4"))
    fill(policy.model)
    save_trained(policy, tmp_path, "merged", "# A card\n")
    assert "dequantised 4-bit (nf4) weights" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")


def test_stop_tokens_and_a_template_of_one_s_own_are_there_again_with_the_adapter(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}own: ")
    trained = load_policy(
        ModelOptions(adapter=AdapterOptions(rank=2), stop_tokens=("+", "!"), chat_template=str(template))
    )
    for name in ("first", "second"):  # that a run which goes on with it saves is the same
        save_trained(trained, tmp_path / name, "adapter", "")
        options = ModelOptions(path=str(tmp_path / name / "adapter"))
        found, (tokenizer, ids) = load_policy(options), load_tokenizer(options)
        assert found.stop_ids == ids == trained.stop_ids
        assert len(ids) == len(load_policy(ModelOptions()).stop_ids) + 2
        assert found.tokenizer.chat_template == tokenizer.chat_template == template.read_text()
        trained = found


REFUSED = {
    "dora": ({"use_dora": True}, {}, "use_dora = True"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save = ['lm_head']"),
    "another kind": ({"peft_type": "IA3"}, {}, "of type IA3, and only LORA is read"),
    "no base": ({"base_model_name_or_path": None}, {}, "lacks base_model_name_or_path"),
    "a base that is gone": ({"base_model_name_or_path": "/gone"}, {}, "base_model_name_or_path in …/gone: no such"),
    "another rank": ({}, {"adapter": AdapterOptions(rank=8)}, "adapter.rank = 8, and the adapter in … has 3"),
    "an adapter as its base": ({"base_model_name_or_path": "."}, {}, "an adapter of peft (LORA, over"),
    "another alpha": ({}, {"adapter": AdapterOptions(rank=3, alpha=1)}, "adapter.alpha = 1, and the adapter"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_is_more_or_other_than_it_should_be_is_refused(what: str, tmp_path: Path, monkeypatch) -> None:
    changes, options, says = REFUSED[what]
    saved_by_peft(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    monkeypatch.chdir(tmp_path)
    with refused(says):
        load_policy(ModelOptions(path=str(tmp_path), **options))


def test_an_adapter_of_another_base_is_refused_with_the_layer(tmp_path: Path) -> None:
    saved_by_peft(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("layers.0", "layers.77"): each for name, each in tensors.items()}, file)
    with refused("adapter is for model.layers.77.mlp.up_proj, and its base", "has no such"):
        load_policy(ModelOptions(path=str(tmp_path)))
    save_file({name: each[:, :2].contiguous() for name, each in tensors.items()}, file)
    with refused("of shape [3, 2], and its base", "[3, 160]"):
        load_policy(ModelOptions(path=str(tmp_path)))
    file.write_bytes(b"nonsense")
    with refused("adapter cannot be read"):
        load_policy(ModelOptions(path=str(tmp_path)))


def test_a_saved_adapter_may_get_another_dropout(tmp_path: Path) -> None:
    saved_by_peft(tmp_path)
    policy = load_policy(ModelOptions(path=str(tmp_path), adapter=AdapterOptions(rank=3, alpha=5, dropout=0.1)))
    assert {layer.options.dropout for layer in lora_layers(policy.model).values()} == {0.1}


# peft's own layers, in a model object.


def with_peft(**settings: object) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = peft.LoraConfig(
            **{"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **settings}
        )
        return peft.get_peft_model(tiny_model("qwen3", torch.float32, exact=False), config)


def test_plain_lora_of_peft_goes_through_the_quicker_pass_and_follows_its_switches() -> None:
    made = with_peft()
    policy = as_policy(made, tokenizer())
    assert policy.forward_reason is None
    expected = torch.cat([plain_logprobs(policy.model, e.prompt, e.completion) for e in EXAMPLES])
    torch.testing.assert_close(completion_logprobs(policy, EXAMPLES), expected, rtol=0, atol=1e-5)
    groups = sample_groups(InProcessEngine(policy), some_prompts((3, 7)), request())
    rollout = groups[0].rollouts[0]
    with torch.no_grad():
        own = plain_logprobs(policy.model, groups[0].prompt.tokens, rollout.tokens)
    torch.testing.assert_close(torch.tensor(rollout.logprobs), own.float(), rtol=0, atol=1e-5)
    with made.disable_adapter(), torch.no_grad():
        off = completion_logprobs(policy, EXAMPLES)
    # Frozen, as it is below the adapter: projections that are trained are joined, whose products may round otherwise.
    base = tiny_model("qwen3", torch.float32, exact=False).requires_grad_(False)
    with torch.no_grad():
        base_logprobs = completion_logprobs(as_policy(base, tokenizer()), EXAMPLES)
    assert torch.equal(off, base_logprobs)
    assert (off - expected).abs().max() > 0.05


def test_gradients_of_peft_s_matrices_are_those_of_its_own_forward() -> None:
    gradients = []
    for forward in ("auto", "plain"):
        policy = as_policy(with_peft(), tokenizer(), forward=forward)
        completion_logprobs(policy, EXAMPLES).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "has an adapter that is more than plain LoRA"),
        ({"lora_bias": True}, "has an adapter that is more than plain LoRA"),
    ],
)
def test_what_is_more_than_plain_lora_goes_through_the_model_s_own_forward(settings, says: str) -> None:
    policy = as_policy(with_peft(**settings), tokenizer())
    assert says in policy.forward_reason


def test_a_merged_or_a_second_adapter_of_peft_is_no_plain_one() -> None:
    made = with_peft()
    made.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    made.base_model.set_adapter(["default", "second"])
    assert "2 adapters at once" in str(as_policy(made, tokenizer()).forward_reason)
    made = with_peft()
    made.merge_adapter()
    assert "merged into its weights" in str(as_policy(made, tokenizer()).forward_reason)


def test_targets_that_are_not_those_of_a_saved_adapter_are_refused(tmp_path: Path) -> None:
    policy = load_policy(ModelOptions(adapter=AdapterOptions(rank=2, targets=("q_proj", "v_proj"))))
    save_adapter(policy, tmp_path)
    same = AdapterOptions(rank=2, targets=("v_proj", "q_proj"))
    again = load_policy(ModelOptions(path=str(tmp_path), adapter=same))
    assert len(lora_layers(again.model)) == len(lora_layers(policy.model))
    with refused("model.adapter.targets = q_proj:", "v_proj"):
        load_policy(ModelOptions(path=str(tmp_path), adapter=AdapterOptions(rank=2, targets=("q_proj",))))


def test_parameters_cannot_be_frozen_under_an_adapter_which_would_not_heed_it() -> None:
    with refused("frozen =", "model.adapter.targets"):
        ModelOptions(adapter=AdapterOptions(), frozen=("*.layers.0.*",))


def test_a_bundled_base_is_found_wherever_the_package_lies(tmp_path: Path) -> None:
    for name in ("bundled", "bundled-instruct"):
        save_adapter(load_policy(ModelOptions(path=name, adapter=AdapterOptions(rank=2))), tmp_path / name)
        base_elsewhere(tmp_path / name)
        again = load_policy(ModelOptions(path=str(tmp_path / name)))
        assert Path(again.model.name_or_path) == bundled_folder(name)
        assert load_tokenizer(ModelOptions(path=str(tmp_path / name)))[0].get_vocab() == again.tokenizer.get_vocab()


def base_elsewhere(adapter: Path) -> None:
    """Have an adapter name a folder of another machine as its base."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/elsewhere/model"}))


def test_a_base_that_has_moved_is_told_with_the_file_that_names_it(tmp_path: Path) -> None:
    base = small_folder(tmp_path / "base")
    save_adapter(load_policy(ModelOptions(path=str(base), adapter=AdapterOptions(rank=2))), tmp_path / "a")
    base_elsewhere(tmp_path / "a")
    with refused("adapter_config.json", "write its new folder there"):
        load_policy(ModelOptions(path=str(tmp_path / "a")))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_template_without_a_tokenizer_of_its_own_is_that_of_the_adapter(place: str, tmp_path: Path) -> None:
    """As an adapter is that was saved without its tokenizer but for the settings."""
    template = "told {{ messages[0]['content'] }}"
    saved_by_peft(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    content = template if place.endswith("jinja") else json.dumps({"chat_template": template})
    (tmp_path / place).write_text(content)
    options = ModelOptions(path=str(tmp_path))
    for found in (load_policy(options).tokenizer, load_tokenizer(options)[0]):
        assert found.apply_chat_template([{"role": "user", "content": "so"}], tokenize=False) == "told so"
        assert found.get_vocab() == load_policy(ModelOptions()).tokenizer.get_vocab()
    (tmp_path / "own.jinja").write_text("own")
    assert load_policy(replace(options, chat_template=str(tmp_path / "own.jinja"))).tokenizer.chat_template == "own"


def test_templates_with_names_are_taken_with_their_names(tmp_path: Path) -> None:
    saved_by_peft(tmp_path)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_policy(ModelOptions(path=str(tmp_path))).tokenizer.chat_template == {"default": "a", "tool_use": "b"}
