"""Environments of OpenEnv 0.10, on servers (extra `openenv`)."""

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from torchtitan.components.rollout.chat import Reply
from torchtitan.components.rollout.environment import Environment, Messages, Step
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from openenv import GenericEnvClient


class OpenEnvironment(Environment):
    """One session of a server. Subclass it, and set `url`.

    A session is a WebSocket. The server keeps an environment for each; its HTTP requests
    would each get a new environment. Rollouts beyond `sessions` wait. Processes do not know of one
    another's sessions.

    A step without a reward has the reward 0. An episode that ends and had none has no verdict:
    servers send a reward of NaN or infinity as none."""

    url = ""
    """Address of the server, such as http://localhost:8000."""
    sessions = 1
    """Sessions of each process at a time: the server's `max_concurrent_envs`, by default one,
    divided by the number of processes that sample."""
    _place: asyncio.Semaphore | None = None
    _client: "GenericEnvClient | None" = None
    _has_reward = False
    _places: ClassVar[
        "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[type, asyncio.Semaphore]]"
    ] = WeakKeyDictionary()

    def to_action(self, reply: Reply) -> Mapping[str, object]:
        """Return the action of a turn, with the fields of the server's class of actions. Default:
        `message`, the content."""
        return {"message": reply.content}

    def to_messages(self, observation: Mapping[str, object]) -> Messages:
        """Return an observation for the model. Default: its JSON."""
        return json.dumps(observation)

    def reset_options(self, row: Mapping[str, object]) -> Mapping[str, object]:
        """Return the options of the server's reset for a row, such as `seed`."""
        return {}

    async def reset(self, row: Mapping[str, object]) -> Messages:
        try:
            from openenv import GenericEnvClient
        except ImportError as error:
            raise UserError(
                f"{type(self).__name__}: {error}; install torchtitan[openenv]"
            ) from error
        if not self.url:
            raise UserError(f"{type(self).__name__}.url is empty; set the address of the server")
        places = self._places.setdefault(asyncio.get_running_loop(), {})
        place = places.setdefault(type(self), asyncio.Semaphore(self.sessions))
        await place.acquire()
        self._place = place
        client = self._client = GenericEnvClient(base_url=self.url)
        try:
            await client.connect()
            result = await client.reset(**self.reset_options(row))
        except (OSError, RuntimeError, TimeoutError) as error:
            raise UserError(f"the server of OpenEnv at {self.url} failed: {error}") from error
        return self.to_messages(result.observation)

    async def step(self, reply: Reply) -> Step:
        assert self._client is not None, "`reset` makes it"
        result = await self._client.step(dict(self.to_action(reply)))
        message = self.to_messages(result.observation)
        self._has_reward |= result.reward is not None
        nothing = 0.0 if self._has_reward or not result.done else None
        reward = nothing if result.reward is None else result.reward
        return Step(message, reward, bool(result.done))

    async def close(self) -> None:
        try:
            if self._client is not None:
                await self._client.close()
        finally:
            if self._place is not None:
                self._place.release()
