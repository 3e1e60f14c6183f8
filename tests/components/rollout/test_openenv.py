"""A session of a server of OpenEnv as an environment."""

import asyncio
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
        return Total(total=self.total, reward=float(self.total == 10), done=is_done)

    @property
    def state(self):
        return env_server.State()


@pytest.fixture
def url():
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
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
