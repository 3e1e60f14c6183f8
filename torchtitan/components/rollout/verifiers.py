"""Tasks of verifiers 0.4, whose environments are in `verifiers.v1` (extra `verifiers`)."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from torchtitan.components.rollout.chat import Message, Reply
from torchtitan.components.rollout.environment import Environment, Step
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from mcp.types import Tool
    from verifiers.v1.task import Task, TaskData


class TasksetEnvironment(Environment):
    """A task of a taskset: its prompt, its tools, and its rewards and metrics. Subclass it with
    `make_taskset`. Rows have the column `idx`, the number of a task.

    Toolsets run in this process, and not behind a server of their own; harnesses, runtimes and
    users that verifiers simulates are not used, so a task that needs a runtime for its setup or
    rewards is refused."""

    _tasks: ClassVar[dict[type, list["Task"]]] = {}

    def make_taskset(self) -> "Iterable[Task]":
        """Return the taskset, such as `MyTaskset(MyTasksetConfig())`."""
        raise NotImplementedError

    async def reset(self, row: Mapping[str, object]) -> list[Message]:
        try:
            from mcp.server import MCPServer
            from verifiers.v1 import MessageNode
            from verifiers.v1.task import Task
        except ImportError as error:
            raise UserError(
                f"{type(self).__name__}: {error}; install torchtitan[verifiers]"
            ) from error
        if type(self) not in self._tasks:
            self._tasks[type(self)] = list(self.make_taskset())
        tasks = self._tasks[type(self)]
        number = row.get("idx")
        if type(number) is not int or not 0 <= number < len(tasks):
            raise UserError(
                f"idx is {number!r}, but the taskset has the tasks 0 to {len(tasks) - 1}"
            )
        self._task = task = tasks[number]
        if type(task).setup is not Task.setup or task.plugged_judges():
            raise UserError(
                f"the task {type(task).__name__} needs a runtime or judges, which verifiers runs; "
                "use a task without `setup` and judges"
            )
        self._server = MCPServer("tools")
        for toolset in type(task).toolsets(task.config):
            toolset.register(self._server)
        self.tools = [_schema_of(tool) for tool in await self._server.list_tools()]
        self._node = MessageNode
        self._nodes: list[MessageNode] = []
        messages = _prompt_of(task.data)
        for message in messages:
            self._add(message, is_sampled=False)
        return messages

    async def step(self, reply: Reply) -> Step:
        self._add(reply.to_message(), is_sampled=True)
        n_turns = sum(node.sampled for node in self._nodes)
        if not reply.tool_calls or n_turns == self.max_turns:
            return await self._score()
        results = []
        for call in reply.tool_calls:
            content = await self._call(call.name, json.loads(call.arguments))
            result = {"role": "tool", "tool_call_id": call.id, "content": content}
            self._add(result, is_sampled=False)
            results.append({**result, "name": call.name})
        return Step(results)

    async def _call(self, name: str, arguments: Mapping[str, object]) -> str:
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            result = await self._server.call_tool(name, arguments)
        except ToolError as error:  # the model's mistake, which it reads
            return str(error)
        parts = getattr(result, "content", result)
        if others := [part for part in parts if not isinstance(getattr(part, "text", None), str)]:
            kind = getattr(others[0], "type", type(others[0]).__name__)
            raise UserError(
                f"the tool {name} of {type(self._task).__name__} returned a part of type {kind!r}; "
                "only text is read here"
            )
        return "\n".join(part.text for part in parts)

    def _add(self, message: Mapping[str, object], *, is_sampled: bool) -> None:
        from verifiers.v1.dialects import parse_message

        parent = len(self._nodes) - 1 if self._nodes else None
        self._nodes.append(
            self._node(message=parse_message(dict(message)), parent=parent, sampled=is_sampled)
        )

    async def _score(self) -> Step:
        from verifiers.v1 import AgentInfo, Trace, TraceTask

        task = self._task
        trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=AgentInfo.model_construct(),
            nodes=self._nodes,
        )
        await task.score(trace)
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored:
            raise UserError(f"the reward {unscored[0]} of {type(task).__name__} needs a runtime")
        named = {name: float(reward.value) for name, reward in trace.rewards.items()}
        named |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Step(reward=float(trace.reward), is_done=True, named=named)


def _schema_of(tool: "Tool") -> dict[str, object]:
    parameters = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", {})
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _prompt_of(data: "TaskData") -> list[Message]:
    """Return system prompt and prompt of a task as messages."""
    messages: list[Message] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    return messages + [message.model_dump(exclude_none=True) for message in data.prompt or []]
