"""Rollouts outside a trainer: chats as tokens, environments, rewards, long trajectories, credit."""

import asyncio
import itertools
import json
import math
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.components.generation.test_generation import mixed_model
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.generation import Engine, Generation, Sampling
from torchtitan.components.losses.policy_loss import group_advantages
from torchtitan.components.rollout import Environment, Reply, Step
from torchtitan.components.rollout.chat import Chat
from torchtitan.components.rollout.openenv import OpenEnvironment
from torchtitan.components.rollout.rewards import Rewards, Text
from torchtitan.components.rollout.rollout import ContextFull, RolloutConfig, RolloutEngine, play
from torchtitan.components.rollout.trajectory import Trajectory, advantages_of, shape_overlong
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.experiments.rl.environments import Calculator, GuessNumber, calculate
from torchtitan.tools.errors import UserError
from torchtitan.trainer.rollouts import RolloutTrainer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    added = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    return PretrainedTokenizer.Config(added_tokens=added).build()


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(ChatTemplate(TEMPLATE), tokenizer)


class Script:
    """An engine that writes prepared turns, and ends each within the context."""

    context = 400

    def __init__(self, tokenizer, turns):
        self.tokenizer = tokenizer
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.settings: list[dict] = []

    async def generate(self, tokens, *, max_new_tokens, key, **settings):
        await asyncio.sleep(0)
        self.prompts.append(list(tokens))
        self.settings.append(settings)
        ids = self.tokenizer.encode(self.turns.pop(0), add_bos=False, allow_special=True)
        reason = "stop" if len(ids) <= max_new_tokens else "length"
        ids = ids[:max_new_tokens]
        return Generation(ids, [-0.5] * len(ids), reason)


def engine_of(tokenizer, chat, turns, rewards=(), **options):
    script = Script(tokenizer, turns)
    script.context = options.pop("context", 400)
    prompt = chat.encode([{"role": "user", "content": "row"}])
    known = {"max_new_tokens": 60, "key": "k", "chat": chat, **options}
    return RolloutEngine(script, tokenizer, Rewards(list(rewards), []), prompt, **known), script


def call_text(expression: str) -> str:
    arguments = json.dumps({"expression": expression})
    return f'<tool_call>{{"name": "calculate", "arguments": {arguments}}}</tool_call><|im_end|>'


def test_turns_of_a_tool_are_the_templates_own_tokens(tokenizer, chat):
    """The trajectory equals the whole conversation as the template renders it, although it was never
    rendered again."""
    engine, script = engine_of(tokenizer, chat, [call_text("2+3"), "5<|im_end|>"])
    row = {"question": "What is 2+3?", "answer": "5"}
    trajectory = asyncio.run(play(Calculator, row, engine))
    call = {"name": "calculate", "arguments": {"expression": "2+3"}}
    messages = [
        {"role": "user", "content": "What is 2+3?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    template = ChatTemplate(TEMPLATE)
    whole = template.render(messages, tools=Calculator.tools, add_generation_prompt=False)
    assert tokenizer.decode(trajectory.tokens) == whole.removesuffix("\n")
    assert trajectory.reward == 1.0 and trajectory.named == {"calls": 1.0}
    trained = list(itertools.compress(trajectory.tokens, trajectory.loss_mask))
    assert tokenizer.decode(trained) == call_text("2+3") + "5<|im_end|>"
    assert script.prompts[1] == trajectory.tokens[: len(script.prompts[1])]


def test_a_cut_turn_gets_its_end(tokenizer, chat):
    ids = tokenizer.encode("I think", add_bos=False)
    user = [{"role": "user", "content": "Go on."}]
    cut, ended = chat.following(ids, user), chat.following([*ids, chat.stops.ids()[0]], user)
    assert tokenizer.decode(cut) == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n" + (
        "<|im_start|>assistant\n"
    )
    assert [chat.stops.ids()[0], *ended] == cut


def test_replies_are_read_by_the_templates_marks(tokenizer, chat):
    text = "Let me see. " + call_text("6*7")
    ids = tokenizer.encode(text, add_bos=False, allow_special=True)
    reply = chat.read([], ids, Calculator.tools)
    assert reply.content == "Let me see." and not reply.is_cut
    assert [(c.name, json.loads(c.arguments)) for c in reply.tool_calls] == [
        ("calculate", {"expression": "6*7"})
    ]
    assert reply.to_message()["tool_calls"][0]["function"]["name"] == "calculate"
    broken = tokenizer.encode("<tool_call>{no JSON", add_bos=False, allow_special=True)
    assert chat.read([], broken, Calculator.tools).is_cut
    assert "no JSON" in chat.read([], broken, Calculator.tools).content


def test_a_game_ends_by_its_own_rules(tokenizer, chat):
    row = {"question": "Guess.", "secret": 2}
    for guesses, reward, answer in (("12", 1.0, "higher"), ("31", 0.0, "lower"), ("2", 1.0, "")):
        engine, _ = engine_of(tokenizer, chat, [f"{guess}<|im_end|>" for guess in guesses])
        trajectory = asyncio.run(play(GuessNumber, row, engine))
        assert trajectory.reward == reward and trajectory.named == {"guesses": len(guesses)}
        assert answer in tokenizer.decode(trajectory.tokens)
        assert trajectory.tokens[-1] == chat.stops.ids()[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("2*(3+4)", "14"), ("1/0", "error"), ("__import__('os')", "error"), ("9**9", "error"),
     ("1234567+1", "1234568"), ("-3*-(2+1)", "9"), ("+.1+.2", "0.3"), ("~1", "error"),
     ("not 1", "error"), ("1e308*10", "inf"), ("True+1", "error"), ("(" * 300, "error")],
)  # fmt: skip
def test_the_calculator_computes_nothing_but_numbers(text, value):
    assert calculate(text) == value


class Counting(Environment):
    """Waits, rewards each turn, and is closed."""

    rewards_per_turn = True
    max_turns = 3
    closed = 0

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(0.001)
        return Step("more", reward=float(reply.content), is_done=reply.content == "9")

    async def close(self) -> None:
        Counting.closed += 1


def test_rewards_of_turns_stay_at_their_turns(tokenizer, chat):
    engine, _ = engine_of(tokenizer, chat, ["1<|im_end|>", "2<|im_end|>", "4<|im_end|>"])
    Counting.closed = 0
    trajectory = asyncio.run(play(Counting, {}, engine))
    assert Counting.closed == 1
    assert list(trajectory.token_rewards.values()) == [1.0, 2.0, 4.0]
    assert trajectory.total == 7.0 and trajectory.reward == 0.0
    for place in trajectory.token_rewards:
        assert trajectory.tokens[place] == chat.stops.ids()[0] and trajectory.loss_mask[place]
    trajectory.check(400)
    with pytest.raises(UserError, match="did not sample"):
        other = Trajectory([1, 2], [0.0, 0.0], [False, True], 0.0, token_rewards={0: 1.0})
        other.check(400)


def test_credit_of_turns_equals_its_definition():
    """Each token gets the normalized rewards at it and after it."""
    first = Trajectory([0] * 6, [0.0] * 6, [False, True, True, False, True, True], 1.0)
    first.token_rewards = {2: 1.0, 5: 3.0}
    second = Trajectory([0] * 3, [0.0] * 3, [False, True, True], 0.0, token_rewards={2: 2.0})
    none = Trajectory([0] * 3, [0.0] * 3, [False, True, True], None)
    of_groups = partial(group_advantages, kind="centered")
    found = advantages_of([[first, second, none]], of_groups)
    # whole rewards 1 and 0 have the mean 0.5, rewards of turns 1, 3 and 2 the mean 2
    assert found[0] == pytest.approx([0.5 - 1 + 1] * 3 + [0.5 + 1] * 3)
    assert found[1] == pytest.approx([-0.5] * 3) and found[2] == pytest.approx([0.0] * 3)
    rewards = torch.tensor([[1.0, 0.0, 0.5], [2, 2, 3]], dtype=torch.float64)
    plain = [[Trajectory(reward=reward) for reward in row] for row in rewards.tolist()]
    for kind in ("normalized", "centered", "leave_one_out"):
        expected = group_advantages(rewards, kind).flatten().tolist()
        assert advantages_of(plain, partial(group_advantages, kind=kind)) == expected
    some = [[Trajectory(reward=r) for r in (1.0, None, 0.0)]]
    assert advantages_of(some, of_groups) == [0.5, 0.0, -0.5]


def test_dapo_penalty_equals_equation_13():
    for n_tokens in range(1, 30):
        trajectory = Trajectory(reward=0.25)
        trajectory.append([1, 2, 3])
        trajectory.append([7] * n_tokens, [0.0] * n_tokens)
        shape_overlong(trajectory, 24, "penalty", 8)
        if n_tokens <= 16:
            expected = 0.0
        else:
            expected = (16 - n_tokens) / 8 if n_tokens <= 24 else -1.0
        assert trajectory.reward == pytest.approx(0.25 + expected)
    for kind, reward in (("mask", None), ("keep", 1.0), ("penalty", 0.0)):
        trajectory = Trajectory([1, 2], [0.0, 0.0], [False, True], 1.0, is_overlong=True)
        shape_overlong(trajectory, 24, kind)
        assert trajectory.reward == reward


def test_a_full_context_ends_a_rollout_with_its_tokens(tokenizer, chat):
    engine, _ = engine_of(tokenizer, chat, ["1<|im_end|>"] * 9, context=60)

    async def forever():
        tokens = list(engine.prompt)
        while True:
            turn = await engine.generate(tokens)
            tokens += [*turn.ids, *engine.following(turn, [{"role": "user", "content": "more"}])]

    with pytest.raises(ContextFull) as error:
        asyncio.run(forever())
    trajectory = engine.trajectory_of(error.value.tokens)
    n_sampled = sum(len(generation.ids) for _, generation in engine.sampled)
    assert sum(trajectory.loss_mask) == n_sampled and engine.is_full
    trajectory.cut(60)
    assert len(trajectory.tokens) == 60 and trajectory.is_overlong
    trajectory.check(60)


def test_a_long_prompt_has_no_verdict(tokenizer, chat):
    engine, _ = engine_of(tokenizer, chat, [], context=4)
    with pytest.raises(ContextFull) as error:
        asyncio.run(engine.generate(engine.prompt))
    trajectory = engine.trajectory_of(error.value.tokens)
    trajectory.cut(4)
    trajectory.check(4)
    assert trajectory.reward is None and not any(trajectory.trained)


def test_a_rollout_chooses_settings_and_stops(tokenizer):
    model = mixed_model()
    sampler = Engine(model, sampling=Sampling(temperature=1.0), logprobs_of="sampling")
    engine = RolloutEngine(sampler, tokenizer, Rewards([], []), [1, 2], 12, key="k")

    async def roll():
        greedy = await engine.generate([1, 2], temperature=0.0)
        stop = tokenizer.decode([greedy.ids[3]])
        stopped = await engine.generate([1, 2], temperature=0.0, stop=[stop])
        return greedy, stop, stopped

    ((greedy, stop, stopped),) = sampler.run([roll()])
    assert greedy.logprobs == [0.0] * 12
    n = len(stopped.ids)
    assert stopped.ids == greedy.ids[:n] and n <= 4 and stopped.finish_reason == "stop"
    assert stop in tokenizer.decode(stopped.ids)


REWARDS = """
import asyncio
async def judge(prompt, completion, row):
    await asyncio.sleep(0.01)
    return {"polite": float("please" in completion), "short": 0.5}
def unsure(prompt, completion, row):
    return None
async def whole(prompts, completions, rows):
    await asyncio.sleep(0)
    return [len(text) / max(map(len, completions)) for text in completions]
def too_few(prompts, completions, rows):
    return [1.0]
class Later:
    def __await__(self):
        yield
def later(prompt, completion, row):
    return Later()
"""


def test_rewards_of_several_kinds(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(REWARDS)
    names = [f"{file}:{name}" for name in ("judge", "unsure", "whole")]
    rewards = Rewards(names, [2.0, 1.0, 1.0])

    async def both():
        many = await asyncio.gather(*(rewards.rate("p", text, {}) for text in ("please", "no")))
        texts = [Text("p", "please", {}), Text("p", "no", {})]
        return many, await rewards.rate_batch(texts)

    (first, second), batch = asyncio.run(both())
    assert first.value == 3.0 and second.value == 1.0
    assert first.named == {"judge/polite": 1.0, "judge/short": 0.5}
    assert [rating.value for rating in batch] == pytest.approx([1.0, 1 / 3])
    assert asyncio.run(Rewards(names[1:2], []).rate("", "", {})).value is None
    assert Rewards([], []).rated_now("", "", {}).value == 0.0
    for name in (names[0], names[2], f"{file}:later"):
        with pytest.raises(UserError, match=r"await engine\.rate"):
            Rewards([name], []).rated_now("", "", {})
    with pytest.raises(UserError, match="a value for each of 2 completions"):
        asyncio.run(Rewards([f"{file}:too_few"], []).rate_batch([Text("", "", {})] * 2))


def test_wrong_settings_are_refused():
    for options, message in (
        ({"temperature": 0.0}, "--rollout.temperature is 0.0, but must be above 0"),
        ({"top_p": 0.0}, "--rollout: top_p is 0.0"),
        ({"overlong_buffer": 0}, "--rollout.overlong_buffer is 0"),
    ):
        with pytest.raises(UserError, match=message):
            RolloutConfig(**options).validate()


BATCH_REWARDS = """
def halves(prompts, completions, rows):
    return [0.5 if "good" in text else None for text in completions]
def longest(prompts, completions, rows):
    most = max(map(len, completions))
    return [float(len(text) == most) for text in completions]
def sure(prompt, completion, row):
    return 2.0
def unsure(prompt, completion, row):
    return None
"""


def rated(engine, trajectory):
    """Rate a trajectory as the trainer does when all rollouts have ended."""
    trainer = SimpleNamespace(rewards=engine.rewards, engine=engine.engine, rank=0, ranks=Ranks())
    RolloutTrainer.rate_batch(trainer, [trajectory], [engine])
    RolloutTrainer.take_rewards(trainer, [trajectory], 0)
    return trajectory


@pytest.fixture
def batch_rewards(tmp_path):
    file = tmp_path / "batch.py"
    file.write_text(BATCH_REWARDS)
    return lambda *names: [f"{file}:{name}" for name in names]


def test_an_environments_own_reward_is_added_to_those_of_a_batch(tokenizer, chat, batch_rewards):
    """The game is won (1); a batch's function pays 0.5, or has no verdict."""
    row = {"question": "Guess.", "secret": 2}
    for names, text, reward in (
        (["halves"], "2", None),
        (["halves", "sure"], "2", 3.0),
        (["halves", "unsure"], "2", None),
        (["longest"], "2", 2.0),
        (["longest", "sure"], "2", 4.0),
    ):
        engine, _ = engine_of(tokenizer, chat, [f"{text}<|im_end|>"], batch_rewards(*names))
        trajectory = asyncio.run(play(GuessNumber, row, engine))
        assert rated(engine, trajectory).reward == reward


class ReturnsText(Environment):
    def reset(self, row):
        return "Say something."

    def step(self, reply):
        return "well said"


class BeginsWithANumber(Environment):
    def reset(self, row):
        return 7


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (ReturnsText, r"ReturnsText\.step must return a Step, not 'well said'"),
        (BeginsWithANumber, "a list of messages or None, not 7"),
    ],
)
def test_wrong_results_of_an_environment_are_named(tokenizer, chat, environment, message):
    engine, _ = engine_of(tokenizer, chat, ["good<|im_end|>"], [])
    with pytest.raises(UserError, match=message):
        asyncio.run(play(environment, {}, engine))


def played(tokenizer, chat, step, first="Say something.", *, per_turn=False) -> Trajectory:
    """Return the checked trajectory of two turns, whose environment returns `first` and `step`."""

    class Fixed(Environment):
        max_turns = 2
        rewards_per_turn = per_turn

        def reset(self, row):
            return first

        def step(self, reply):
            return step

    engine, _ = engine_of(tokenizer, chat, ["good<|im_end|>"] * 2)
    trajectory = asyncio.run(play(Fixed, {}, engine))
    trajectory.check(engine.engine.context)
    return trajectory


@pytest.mark.parametrize("per_turn", [False, True])
def test_rewards_of_steps_are_numbers_or_no_verdict(tokenizer, chat, per_turn):
    def total(reward):
        return played(tokenizer, chat, Step("Go on.", reward), per_turn=per_turn).total

    assert [total(value) for value in (1, True, np.float32(0.5), torch.tensor(2.0))] == [2, 2, 1, 4]
    assert total(None) is None
    for wrong in (math.nan, -math.inf, [1.0], "1", {}, torch.ones(2), 10**400):
        with pytest.raises(UserError, match=r"Fixed\.step returned the reward .* or None for no"):
            total(wrong)


@pytest.mark.parametrize("value", [None, math.nan, "1", [1.0], torch.ones(2)])
def test_numbers_to_log_are_finite(tokenizer, chat, value):
    with pytest.raises(UserError, match="names the number 'x'"):
        played(tokenizer, chat, Step(is_done=True, named={"x": value}))
    with pytest.raises(UserError, match=r"step returned named \[5\], but it must be a mapping"):
        played(tokenizer, chat, Step(is_done=True, named=[5]))


def test_messages_of_environments_are_read_as_those_of_data(tokenizer, chat):
    """Parts are joined, and arguments of calls are objects, not JSON within JSON."""
    parts = [{"type": "text", "text": "Go "}, {"type": "text", "text": "on."}]
    call = {"name": "add", "arguments": '{"a": 1}'}
    first = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": parts},
    ]
    step = Step({"role": "user", "content": parts})
    text = tokenizer.decode(played(tokenizer, chat, step, first).tokens)
    assert text.count("Go on.") == 3 and "[{" not in text
    assert '{"name": "add", "arguments": {"a": 1}}' in text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": [{"type": "image", "data": "A"}]}, "a part of type 'image'"),
        ({"role": "tool", "content": {"a": 1}}, "the content must be text, not a"),
        ({"role": "user", "content": None}, "has no content"),
        ({"content": "Go on."}, "it has no role"),
        ({"role": "king", "content": "Go on."}, "the role 'king' is unknown"),
    ],
)
def test_other_messages_of_environments_are_refused(tokenizer, chat, message, words):
    for step, first in ((Step(message), "Hi"), (Step(is_done=True), [message])):
        with pytest.raises(UserError, match=f"environment's messages: message 1: .*{words}"):
            played(tokenizer, chat, step, first)


def test_an_environment_may_not_repeat_the_models_turn(tokenizer, chat):
    messages = [Reply("good").to_message(), {"role": "user", "content": "Go on."}]
    with pytest.raises(UserError, match=r"Fixed\.step returned a message of the assistant"):
        played(tokenizer, chat, Step(messages))


def test_a_class_must_be_an_environment(tmp_path):
    (tmp_path / "own.py").write_text("class Dice:\n    pass\n")
    with pytest.raises(UserError, match=r"Dice is a class, but not a subclass of .*Environment"):
        RolloutConfig(function=f"{tmp_path}/own.py:Dice").find_function()


def test_a_rollout_without_verdict_stays_so(tokenizer, chat, batch_rewards):
    """Whatever the functions of a batch say."""
    engine, _ = engine_of(tokenizer, chat, ["good<|im_end|>"], batch_rewards("halves"))

    async def roll(gives_up: bool) -> Trajectory:
        trajectory = Trajectory()
        trajectory.append(engine.prompt)
        turn = await engine.generate(engine.prompt)
        trajectory.append(turn.ids, turn.logprobs)
        trajectory.reward = await engine.rate(engine.decode(turn.ids), {})
        if gives_up:
            trajectory.reward = None
        return trajectory

    assert rated(engine, asyncio.run(roll(True))).reward is None
    engine, _ = engine_of(tokenizer, chat, ["good<|im_end|>"], batch_rewards("halves"))
    assert rated(engine, asyncio.run(roll(False))).reward == 0.5


@pytest.mark.parametrize("names", [[], ["sure"], ["longest"]])
def test_first_messages_that_fill_the_context_give_no_verdict(
    tokenizer, chat, batch_rewards, names
):
    engine, _ = engine_of(tokenizer, chat, [], batch_rewards(*names), context=4)
    row = {"question": "Guess " * 9, "secret": 2}
    trajectory = asyncio.run(play(GuessNumber, row, engine))
    trajectory.cut(4)
    trajectory.check(4)
    assert engine.is_full and trajectory.is_overlong and rated(engine, trajectory).reward is None


def test_a_trajectory_has_tokens(tokenizer, chat, batch_rewards):
    for kind in ("mask", "penalty", "keep"):
        for short in (Trajectory(reward=None), Trajectory([1], [0.0], [False], None)):
            with pytest.raises(UserError, match="from 2 to 8"):
                short.check(8)
        unsampled = Trajectory([1, 2], [0.0, 0.0], [False, False], 1.0)
        shape_overlong(unsampled, 8, kind)
        assert unsampled.reward == 1.0
    engine, _ = engine_of(tokenizer, chat, ["2<|im_end|>"], batch_rewards("longest"))
    trajectory = asyncio.run(play(GuessNumber, {"question": "", "secret": 2}, engine))
    trajectory.tokens.clear()  # while others waited
    with pytest.raises(UserError, match="a trajectory has"):
        rated(engine, trajectory)


def test_functions_of_a_batch_get_texts(batch_rewards):
    assert asyncio.run(Rewards(batch_rewards("longest"), []).rate_batch([])) == []


def test_rewards_are_logged_by_their_kinds():
    rewards = Rewards([r"pattern=final: (\d+)", "length=4", "number"], [])
    rating = rewards.rated_now("", "final: 4", {"answer": "4"})
    assert list(rating.named) == ["pattern", "length", "number"]


def test_a_session_that_does_not_open_frees_its_place(monkeypatch):
    def no_client(base_url):
        raise ValueError(base_url)

    monkeypatch.setitem(sys.modules, "openenv", SimpleNamespace(GenericEnvClient=no_client))

    class Session(OpenEnvironment):
        url = "nowhere"

    async def twice():
        for _ in range(2):
            session = Session()
            with pytest.raises(ValueError, match="nowhere"):
                await asyncio.wait_for(session.reset({}), 5)
            await session.close()

    asyncio.run(twice())


def test_ranks_with_the_same_prompts_take_the_rewards_of_the_first():
    """Of the whole, and of turns."""
    own = Trajectory([1, 2, 3], [0.0] * 3, [False, True, True], 1.0, token_rewards={1: 1.0})
    first, other = [(0.5, {2: 3.0})], [(7.0, {})]
    ranks = SimpleNamespace(all_ranks_or_raise=lambda make: [first, make(), other, make()])
    trainer = SimpleNamespace(ranks=ranks, engine=SimpleNamespace(context=4))
    RolloutTrainer.take_rewards(trainer, [own], 0)
    assert own.reward == 0.5 and own.token_rewards == {2: 3.0}
