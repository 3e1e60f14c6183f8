"""Tasks of verifiers as environments."""

import asyncio
import json
from typing import Any

import pytest

from torchtitan.components.chat_template.calls import Call
from torchtitan.components.rollout import Reply
from torchtitan.tools.errors import UserError

vf = pytest.importorskip("verifiers.v1", reason="pip install 'torchtitan[verifiers]'")

from mcp.types import ImageContent  # noqa: E402

from torchtitan.components.rollout.verifiers import TasksetEnvironment  # noqa: E402


class Data(vf.TaskData):
    answer: str


class Tools(vf.Toolset):
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    @vf.tool
    async def draw(self) -> Any:
        """Draw the product."""
        return [ImageContent(type="image", data="iVBORw0KGgo=", mimeType="image/png")]


class Product(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]


class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self):
        for a in range(3):
            data = Data(
                prompt=f"What is {a} times 7?", answer=str(a * 7), system_prompt="Be short."
            )
            yield Product(data, self.config.task)


class Environment(TasksetEnvironment):
    def make_taskset(self):
        return Products(vf.TasksetConfig())


def test_a_task_has_its_prompt_tools_rewards_and_metrics():
    async def play():
        environment = Environment()
        messages = await environment.reset({"idx": 2})
        call = Call("abcdefghi", "multiply", json.dumps({"a": 2, "b": 7}))
        result = await environment.step(Reply("", tool_calls=[call]))
        last = await environment.step(Reply("14"))
        unknown = await environment.step(Reply("", tool_calls=[Call("a", "nothing", "{}")]))
        return environment, messages, result, last, unknown

    environment, messages, result, last, unknown = asyncio.run(play())
    assert [message["role"] for message in messages] == ["system", "user"]
    tools = {tool["function"]["name"]: tool["function"] for tool in environment.tools}
    assert tools.keys() == {"multiply", "draw"}
    assert "a" in tools["multiply"]["parameters"]["properties"]
    assert result.message[0]["content"] == "14" and not result.is_done
    assert last.reward == 2.0 and last.is_done and last.named == {"right": 2.0, "turns": 2.0}
    assert "nothing" in unknown.message[0]["content"]


@pytest.mark.parametrize("number", [3, -1, True, 1.0, "1", None])
def test_an_unknown_task_is_refused(number):
    with pytest.raises(UserError, match=f"idx is {number!r}, but the taskset has the tasks 0 to 2"):
        asyncio.run(Environment().reset({"idx": number}))


def test_images_of_tools_are_refused():
    """They would be dropped, and the model would answer without them."""

    async def play():
        environment = Environment()
        await environment.reset({"idx": 2})
        await environment.step(Reply("", tool_calls=[Call("abcdefghi", "draw", "{}")]))

    with pytest.raises(UserError, match="the tool draw of Product returned a part of type 'image'"):
        asyncio.run(play())
