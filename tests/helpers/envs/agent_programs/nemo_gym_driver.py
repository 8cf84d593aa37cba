"""Plays sessions with NeMo Gym's own servers: `nemo_gym_driver.py URL OUT KIND`, until the run has ended.

KIND: `game` is its example of several turns with its Gymnasium agent, `tool` that of one tool with its simple agent,
over chat completions; `responses` is the tool over responses.
Each session has a model server and an agent of its own; the resources server is shared. OUT gets a line for each
episode: the reward, and the items that the model server has returned, with their tokens.
"""

import asyncio
import json
import os
import socket
import sys

os.environ["NEMO_GYM_CONFIG_DICT"] = "{}"  # no command line, no files

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.server_utils import ServerClient
from resources_servers.example_multi_turn_gymnasium.app import ExampleMultiTurnEnv
from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer
from responses_api_agents.gymnasium_agent.app import GymnasiumAgent
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.openai_model.app import SimpleModelServer
from responses_api_models.vllm_model.app import VLLMModel
from session_loop import play_all

WEATHER = {
    "type": "function", "name": "get_weather", "description": "", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": ""}},
                   "required": ["city"], "additionalProperties": False},
}  # fmt: skip
KINDS = {
    "game": (ExampleMultiTurnEnv, GymnasiumAgent, VLLMModel),
    "tool": (SimpleWeatherResourcesServer, SimpleAgent, VLLMModel),
    "responses": (SimpleWeatherResourcesServer, SimpleAgent, SimpleModelServer),
}
STEPS = 3  # turns of an episode


class Gym:
    """Servers in this process, each on a port of its own."""

    def __init__(self):
        self._config, self._servers = get_global_config_dict(), []
        head = BaseServerConfig(host="127.0.0.1", port=1)  # it is not asked for anything
        self.client = ServerClient(head_server_config=head, global_config_dict=self._config)

    async def start(self, kind: type, name: str, **settings):
        """Starts a server."""
        sock = socket.create_server(("127.0.0.1", 0))
        place = {"host": "127.0.0.1", "port": sock.getsockname()[1]}
        self._config[name] = {"servers": {"app": place}}
        config = kind.model_fields["config"].annotation(name=name, entrypoint="app.py", **place, **settings)
        app = kind(config=config, server_client=self.client).setup_webserver()
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._servers.append((server, asyncio.create_task(server.serve(sockets=[sock]))))
        while not server.started:
            await asyncio.sleep(0.01)

    async def stop(self):
        """Ends all servers."""
        for server, _ in self._servers:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._servers))


async def drive(url: str, out: str, kind: str):
    """Plays sessions until the run has ended."""
    gym = Gym()
    resources, agent, server = KINDS[kind]
    await gym.start(resources, "resources", domain="agent")

    async def play(address: str, session: dict) -> dict | None:
        name, task = session["id"], session["task"]
        model = {"type": "responses_api_models", "name": f"policy-{name}"}
        place = {"base_url": address, "api_key": session["key"], "model": "policy"}
        if server is VLLMModel:
            place |= {"return_token_id_information": True, "uses_reasoning_parser": True}
        else:
            place = {f"openai_{field}": value for field, value in place.items()}
        await gym.start(server, model["name"], **place)
        verifier = {"type": "resources_servers", "name": "resources"}
        await gym.start(agent, f"agent-{name}", resources_server=verifier, model_server=model, max_steps=STEPS)
        row = {
            "responses_create_params": {"input": task["messages"], "tools": [] if kind == "game" else [WEATHER]},
            "follow_ups": ["and?", "so?"], "expected_answer": task["answer"],
        }  # fmt: skip
        answer = await gym.client.post(server_name=f"agent-{name}", url_path="/run", json=row)
        if answer.status != 200:
            return None
        found = json.loads(await answer.read())
        return {"reward": found["reward"], "output": found["response"]["output"]}

    await play_all(url, out, play)
    await gym.stop()


if __name__ == "__main__":
    asyncio.run(drive(*sys.argv[1:]))
