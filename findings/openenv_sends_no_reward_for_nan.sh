#!/usr/bin/env bash
# Guess: a reward of NaN, as of a division of 0 by 0 in an environment, reaches the client of an
#   OpenEnv server as NaN, or as an error.
#
# Truth: openenv 0.10 (pydantic's JSON) sends NaN and infinity as null. The client gets the reward
#   None, as of a step that has no reward, and a trainer that reads None as 0 learns from it.
#
# What a trainer must do: give no verdict on an episode that ends without a reward in any step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openenv==0.10.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import importlib.metadata
import socket
import threading

import uvicorn
from openenv import GenericEnvClient
from openenv.core import env_server


class Choice(env_server.Action):
    reward: str


class Nothing(env_server.Observation):
    pass


class Rewards(env_server.Environment):
    def reset(self, seed=None, episode_id=None, **options):
        return Nothing()

    def step(self, action, timeout_s=None, **options):
        return Nothing(reward=float(action.reward), done=True)

    @property
    def state(self):
        return env_server.State()


async def rewards(url):
    client = GenericEnvClient(base_url=url)
    await client.connect()
    await client.reset()
    found = [(await client.step({"reward": one})).reward for one in ("0.5", "nan", "inf", "-inf")]
    await client.close()
    return found


listener = socket.create_server(("127.0.0.1", 0))
app = env_server.create_fastapi_app(Rewards, Choice, Nothing)
server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
thread.start()
found = asyncio.run(rewards(f"http://127.0.0.1:{listener.getsockname()[1]}"))
server.should_exit = True
thread.join(timeout=10)
print("openenv", importlib.metadata.version("openenv"), "rewards 0.5, nan, inf, -inf:", found)
assert found == [0.5, None, None, None]
print("as described")
PYTHON
