"""A session of a server of OpenEnv as an environment."""

import asyncio
import math
import socket
import threading

import pytest

from torchtitan.components.rollout import Reply

openenv = pytest.importorskip("openenv", reason="pip install 'torchtitan[openenv]'")

from openenv.core import env_server  # noqa: E402

from torchtitan.components.rollout.openenv import OpenEnvironment  # noqa: E402


class Number(env_server.Action):
    message: str


class Total(env_server.Observation):
    total: int = 0


class Adding(env_server.Environment):
    """Ends at 10."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.total = seed or 0
        return Total(total=self.total)

    def step(self, action, timeout_s=None, **options):
        self.total += int(action.message)
        is_done = self.total >= 10
        reward = {50: None, 60: math.nan, 70: math.inf}.get(self.total, float(self.total == 10))
        return Total(total=self.total, reward=reward, done=is_done)

    @property
    def state(self):
        return env_server.State()


@pytest.fixture
def url():
    import uvicorn

    # Clients may connect before the server has started.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = env_server.create_fastapi_app(Adding, Number, Total, max_concurrent_envs=1)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=10)


def test_sessions_keep_their_state_and_wait_for_one_another(url):
    """The server has one session; four rollouts begin at once."""

    class Session(OpenEnvironment):
        def reset_options(self, row):
            return {"seed": row["seed"]}

        def to_messages(self, observation):
            return str(observation["total"])

    Session.url = url

    async def play(seed):
        environment = Session()
        texts = [await environment.reset({"seed": seed})]
        for number in (2, 8 - seed):
            await asyncio.sleep(0.01)
            step = await environment.step(Reply(str(number)))
            texts.append(step.message)
        await environment.close()
        return texts, step.reward, step.is_done

    async def together():
        return await asyncio.gather(*map(play, range(4)))

    found = asyncio.run(together())
    assert found == [([str(seed), str(seed + 2), "10"], 1.0, True) for seed in range(4)]


@pytest.mark.parametrize("last", [50, 60, 70])
def test_an_end_without_any_reward_has_no_verdict(url, last):
    """The server sends NaN and infinity as null: 0 would be a verdict on a broken environment."""

    class Session(OpenEnvironment):
        pass

    Session.url = url

    async def play(*numbers):
        environment = Session()
        await environment.reset({})
        steps = [await environment.step(Reply(str(number))) for number in numbers]
        await environment.close()
        return [step.reward for step in steps]

    assert asyncio.run(play(last)) == [None]
    assert asyncio.run(play(2, last - 2)) == [0.0, 0.0]  # the first step had the reward 0
