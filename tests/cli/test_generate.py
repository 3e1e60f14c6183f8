"""Chat templates against transformers, and the commands `generate` and `chat`."""

import io
import json
import shutil
import subprocess
import sys

import pytest
import torch

from tests.commands import RunningCommand
from tests.training import train
from torchtitan.cli.generate import chat, generate
from torchtitan.cli.main import main
from torchtitan.components.chat_template import (
    ChatTemplate,
    load_chat_template,
    resolve_chat_template,
)
from torchtitan.components.checkpoint import formats
from torchtitan.components.generation import generate as generate_ids
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models import pretrained
from torchtitan.tools.errors import UserError

TURNS = [
    {"role": "user", "content": "Is it true that 2 < 3 & 'é'?"},
    {"role": "assistant", "content": 'True, I "think".'},
    {"role": "user", "content": "  Why?\n"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers — é.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}},
            "required": ["a"],
        },
    },
}
CALL = [
    TURNS[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", **TOOL, "function": {"name": "add", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"},
]
CONVERSATIONS = {
    "question": (TURNS[:1], {}),
    "turns": (TURNS, {}),
    "system": ([{"role": "system", "content": "Be <brief>."}, *TURNS], {}),
    "tools": (TURNS, {"tools": [TOOL]}),
    "a call": (CALL, {"tools": [TOOL]}),
}


@pytest.fixture(scope="module")
def reference(assets):
    """transformers' tokenizer with the folder's chat template."""
    transformers = pytest.importorskip("transformers")

    def load(name):
        settings = json.loads((assets / name / "tokenizer_config.json").read_text())
        file = (
            assets
            / ("mistral-v0.3-tokenizer" if "mistral" in name else "stories260K/hf-converted")
            / "tokenizer.json"
        )
        tokens = {
            key: settings.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(file), chat_template=settings["chat_template"], **tokens
        )

    return load


@pytest.mark.parametrize("name", ["mistral-v0.3-tokenizer", "qwen3-chat-template"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompted", [True, False])
def test_templates_match_transformers(assets, reference, name, conversation, prompted):
    messages, options = CONVERSATIONS[conversation]
    expected = reference(name).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompted, **options
    )
    template = load_chat_template(assets / name)
    assert template.render(messages, add_generation_prompt=prompted, **options) == expected


def test_template_reads_its_options(assets, reference):
    template = load_chat_template(assets / "qwen3-chat-template")
    for thinking in (True, False):
        expected = reference("qwen3-chat-template").apply_chat_template(
            TURNS, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert (
            template.render(TURNS, add_generation_prompt=True, enable_thinking=thinking) == expected
        )


def test_token_ids_equal_transformers(assets, reference):
    name = "mistral-v0.3-tokenizer"
    rendered = load_chat_template(assets / name).render(TURNS, add_generation_prompt=True)
    ids = (
        PretrainedTokenizer.Config()
        .build(path=assets / name)
        .encode(rendered, add_bos=False, allow_special=True)
    )
    expected = reference(name).apply_chat_template(
        TURNS, add_generation_prompt=True, return_dict=False
    )
    assert ids == expected


def test_exception_raised_by_a_template_is_reported(assets):
    template = load_chat_template(assets / "mistral-v0.3-tokenizer")
    with pytest.raises(UserError, match="alternate"):
        template.render([TURNS[0], TURNS[0]], add_generation_prompt=True)


def test_templates_run_in_a_sandbox():
    template = ChatTemplate("{{ messages.append(1) }}")
    with pytest.raises(UserError, match="sandbox.*forbids.*append"):
        template.render(TURNS, add_generation_prompt=False)
    with pytest.raises(UserError, match="line 2"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failing_template_is_reported(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    template = load_chat_template(tmp_path)
    with pytest.raises(UserError, match="chat_template.jinja' failed"):
        template.render(TURNS, add_generation_prompt=False)


@pytest.mark.parametrize(
    "declared", [5, [{"template": "x"}], ["x"], [{"name": "default", "template": 5}], "{% if %}"]
)
def test_invalid_template_is_rejected(tmp_path, declared):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}))
    with pytest.raises(UserError, match="tokenizer_config.json"):
        load_chat_template(tmp_path)


def test_unreadable_files_are_reported(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "x", "bos_token": 5})
    )
    with pytest.raises(UserError, match="tokenizer_config.json.* bos_token 5"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="chat_template.jinja"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "<s>|</s>||"),
        ({"bos_token": None}, "<s>|</s>||"),
        ({"bos_token": "<s>"}, "<s>|</s>||"),
        ({"bos_token": "</s>", "eos_token": "<s>", "added_tokens_decoder": {}}, "</s>|<s>||"),
    ],
)
def test_special_tokens_match_transformers(stories, tmp_path, settings, expected):
    transformers = pytest.importorskip("transformers")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    template = "|".join("{{ " + name + " }}" for name in names)
    shutil.copy(f"{stories}/tokenizer.json", tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        TURNS, tokenize=False
    )
    assert (
        load_chat_template(tmp_path).render(TURNS, add_generation_prompt=False)
        == theirs
        == expected
    )


def test_template_search_order(tmp_path):
    def rendered():
        return load_chat_template(tmp_path).render([], add_generation_prompt=False)

    assert load_chat_template(tmp_path) is None
    settings = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}settings"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert rendered() == "<s>settings"
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered() == "named"
    (tmp_path / "chat_template.jinja").write_text(
        "{% generation %}file{% endgeneration %}{{ strftime_now('%%') }}"
    )
    assert rendered() == "file%"
    # The model's folder, and the folder of another tokenizer.
    model = tmp_path / "model"
    model.mkdir()
    assert load_chat_template(model) is None
    assert load_chat_template(model, tmp_path).render([], add_generation_prompt=False) == "file%"
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    assert (
        load_chat_template(model, tmp_path).render([], add_generation_prompt=False) == "<bos></s>"
    )


# Commands


def run(capsys, command, *args):
    code = command([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_generate_prints_only_the_text(stories, assets, capsys):
    expected = (assets / "stories260K" / "expected_greedy_200steps.txt").read_text()
    code, out, err = run(
        capsys, generate, "--checkpoint", stories, "--temperature", 0, "--device", "cpu"
    )
    assert (code, out) == (0, expected + "\n")
    assert "prompt: 1 tokens" in err and "generated: 200 tokens" in err and "tokens/s" in err


def test_several_prompts_and_stop_strings(stories, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("Lily\n")
    prompts = [
        "--prompt",
        "Once upon",
        "--prompt",
        "The cat",
        "--prompt_file",
        tmp_path / "prompt.txt",
    ]
    args = ["--checkpoint", stories, "--device", "cpu", "--max_new_tokens", 20, *prompts]
    code, out, _ = run(capsys, generate, *args, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["prompt"] for line in lines] == ["Once upon", "The cat", "Lily"]
    assert all(line["finish_reason"] == "length" and len(line["tokens"]) == 20 for line in lines)
    _, plain, _ = run(capsys, generate, *args, "--no_cache")
    assert plain == "".join(f"{line['prompt']}{line['text']}\n" for line in lines)
    _, stopped, _ = run(
        capsys, generate, *args[:6], "--prompt", "Once upon", "--stop", "e, t", "--json"
    )
    line = json.loads(stopped)
    assert line["finish_reason"] == "stop" and len(line["tokens"]) < 20
    assert lines[0]["text"].startswith(line["text"] + "e, t")


def test_sampling_depends_on_the_seed(stories, capsys):
    args = [
        "--checkpoint",
        stories,
        "--device",
        "cpu",
        "--max_new_tokens",
        30,
        "--temperature",
        1,
        "--top_p",
        0.9,
    ]
    texts = [run(capsys, generate, *args, "--top_k", 40, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint", "/nowhere"], "/nowhere does not exist"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top_p", "0"], "top_p is 0.0"),
        (["--max_new_tokens", "600"], "context of 512"),
        (
            ["--prompt_file", "/nowhere"],
            "--prompt_file /nowhere cannot be read: No such file or directory\n",
        ),
    ],
)
def test_mistakes_are_reported(stories, capsys, args, message):
    code, out, err = run(
        capsys, generate, "--checkpoint", stories, "--device", "cpu", "--prompt", "a", *args
    )
    assert code == 2 and out == "" and message in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["generate", "chat", "eval"])
def test_a_checkpoint_is_looked_at_once(command, tmp_path, monkeypatch, capsys):
    """Before torch is imported; a folder may list many checkpoints."""
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    checked = []
    monkeypatch.setattr(formats, "check_checkpoint", lambda *values: checked.append(values))
    words = ["--prompt", "a"] if command == "generate" else []
    (tmp_path / "a.txt").write_text("text")
    words += ["--tasks", str(tmp_path / "a.txt")] if command == "eval" else []
    assert main([command, "--checkpoint", str(tmp_path), *words]) == 2
    assert checked == [(tmp_path, "--checkpoint")]
    capsys.readouterr()


def test_generation_from_a_checkpoint_of_a_run(tmp_path, capsys):
    trainer = train(tmp_path, checkpoint__enable=True, training__steps=2)
    step = tmp_path / "checkpoint" / "step-2"
    args = ["--device", "cpu", "--max_new_tokens", 12, "--prompt", "Once", "--json"]
    code, out, _ = run(capsys, generate, "--checkpoint", step, *args)
    [expected] = generate_ids(
        trainer.model_parts[0], [trainer.tokenizer.encode("Once")], max_new_tokens=12
    )
    assert code == 0 and json.loads(out)["tokens"] == expected.ids
    for folder in (tmp_path, tmp_path / "checkpoint"):
        code, out, err = run(capsys, generate, "--checkpoint", folder, *args)
        assert code == 2 and out == "" and str(step) in err


def test_tokenizer_of_another_model_is_rejected(stories, assets, capsys):
    code, _, err = run(
        capsys, generate, "--checkpoint", stories, "--tokenizer", assets / "gpt2-tokenizer"
    )
    assert code == 2 and "50257" in err and "512" in err


@pytest.mark.slow
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_is_the_default_on_gpus_that_have_it(stories, monkeypatch, has_bfloat16):
    """No GPU is needed to ask for the weights in it."""
    asked = []

    def load(path, *, device, dtype, **options):
        asked.append((device.type, dtype))
        raise UserError("loaded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    monkeypatch.setattr(pretrained, "load_model", load)
    for words in ([], ["--dtype", "float32"], ["--device", "cpu"]):
        assert generate(["--checkpoint", str(stories), *words]) == 2
    assert asked == [
        ("cuda", torch.bfloat16 if has_bfloat16 else None),
        ("cuda", torch.float32),
        ("cpu", None),
    ]


@pytest.mark.slow
def test_closed_pipe_ends_generation_quietly(stories):
    code = (
        "import sys\nfrom torchtitan.cli.generate import generate\n"
        "from torchtitan.tools.process import default_signals\nwith default_signals(): "
        "generate(sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "--checkpoint",
        stories,
        "--device",
        "cpu",
        "--max_new_tokens",
        "200",
    ]
    with RunningCommand(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.read(4) == "Once"
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


@pytest.fixture
def chat_model(stories, tmp_path):
    """A model with a template in which the whole conversation can be seen."""
    folder = tmp_path / "chat"
    shutil.copytree(stories, folder)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    return folder


SHORT = ("--device", "cpu", "--max_new_tokens", 30, "--stop", "\n", "--stop", ".")
"""Options for short answers, also of `generate`."""


def talk(capsys, monkeypatch, lines, *args):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    return run(capsys, chat, *SHORT, *args)


def test_chat_remembers_earlier_turns(chat_model, capsys, monkeypatch):
    lines = ["Tell me a story", "", "Tell me a story", "/reset", "Tell me a story", "/exit", "more"]
    code, out, _ = talk(capsys, monkeypatch, lines, "--checkpoint", chat_model)
    first, second, third = out.splitlines()
    assert code == 0 and first == third != second
    # The same by `generate`, with the conversation written out.
    prompt = f"user: Tell me a story\nassistant: {first}\nuser: Tell me a story\n"
    args = ["--checkpoint", chat_model, *SHORT, "--prompt", prompt]
    assert run(capsys, generate, *args)[1] == prompt + second + "\n"


def test_conversation_longer_than_the_context_is_reported(chat_model, capsys, monkeypatch):
    code, out, err = talk(capsys, monkeypatch, ["word " * 600, "Hello"], "--checkpoint", chat_model)
    assert code == 0 and len(out.splitlines()) == 1
    assert "context has only 512" in err and "/reset" in err


@pytest.mark.slow
def test_tokenizer_option_keeps_template_and_stop_tokens(chat_model, stories, capsys, monkeypatch):
    args = [
        "--checkpoint",
        chat_model,
        "--device",
        "cpu",
        "--max_new_tokens",
        8,
        "--prompt",
        "Once",
        "--json",
    ]
    free = json.loads(run(capsys, generate, *args)[1])["tokens"]
    (chat_model / "generation_config.json").write_text(json.dumps({"eos_token_id": free[4]}))
    _, out, _ = run(capsys, generate, *args, "--tokenizer", stories)
    assert json.loads(out)["tokens"] == free[: free.index(free[4]) + 1]
    own, others = (
        talk(capsys, monkeypatch, ["Hello"], "--checkpoint", chat_model, *more)
        for more in ([], ["--tokenizer", stories])
    )
    assert own == others and own[0] == 0


def test_chat_requires_a_template(stories, capsys, monkeypatch):
    code, out, err = talk(capsys, monkeypatch, ["Hello"], "--checkpoint", stories)
    assert (
        code == 2
        and out == ""
        and "no chat template" in err
        and "set --chat_template to a file or one of: chatml," in err
    )
    code, out, _ = talk(
        capsys, monkeypatch, ["Hello"], "--checkpoint", stories, "--chat_template", "chatml"
    )
    assert code == 0 and len(out.splitlines()) == 1
    code, out, err = talk(
        capsys, monkeypatch, ["Hello"], "--checkpoint", stories, "--chat_template", "chatlm"
    )
    assert code == 2 and out == "" and "--chat_template chatlm" in err and "alpaca" in err


def test_chat_sets_options_of_its_template(chat_model, capsys, monkeypatch):
    """The option is the same as writing its words into the message."""
    file = chat_model / "chat_template.jinja"
    file.write_text(file.read_text() + "{% if short %}assistant: Briefly,{% endif %}")
    args = ["Hello"], "--checkpoint", chat_model, "--chat_template_kwargs"
    _, usual, _ = talk(capsys, monkeypatch, *args[:-1])
    code, short, _ = talk(capsys, monkeypatch, *args, '{"short": true}')
    assert code == 0 and short != usual
    prompt = "user: Hello\nassistant: Briefly,"
    _, out, _ = run(capsys, generate, "--checkpoint", chat_model, *SHORT, "--prompt", prompt)
    assert out == prompt + short
    for given, words in {
        '{"shorter": true}': "does not read 'shorter', but short; did you mean 'short'?",
        '["short"]': "must be a JSON object",
        "short": "is not valid JSON",
    }.items():
        code, out, err = talk(capsys, monkeypatch, *args, given)
        assert code == 2 and out == "" and words in " ".join(err.split()), err


def test_chat_stops_at_the_end_of_turn_of_its_template(stories, tmp_path, capsys, monkeypatch):
    tokenizer = PretrainedTokenizer.Config().build(path=stories)
    args = ["--checkpoint", stories, "--device", "cpu", "--max_new_tokens", 8, "--json"]
    template = resolve_chat_template("alpaca", [], tokenizer)
    prompt = template.render(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True
    ).removeprefix("<s>")
    free = json.loads(run(capsys, generate, *args, "--prompt", prompt)[1])["tokens"]
    # The same format with another end: the third token of that answer.
    end = tokenizer.decode([free[2]])
    file = tmp_path / "alpaca.jinja"
    file.write_text(template.source.replace("</s>", end))
    talk_args = ["--checkpoint", stories, "--chat_template", file]
    code, out, _ = talk(capsys, monkeypatch, ["Hello"], *talk_args)
    assert code == 0 and out.strip() == tokenizer.decode(free).partition(end.strip())[0].strip()
