"""The generation server: a policy answers requests from anywhere, in OpenAI's API and in one for RL (`/generate`).

Loads any policy of train_rl or train_sft, from a checkpoint of any layout, or a Hugging Face folder. The ranks
generate; one process next to rank 0 speaks HTTP. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.serve --config model.yaml --load runs/quickstart/ppo/checkpoints/best
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "71 + 44 =", "max_tokens": 4}'
"""

import sys

from megarl.arguments import RunConfig
from megarl.observe.timers import Timers
from megarl.rollout.engine_generator import EngineGenerator
from megarl.rollout.rollout import Rollout
from megarl.rollout.service import ReplicaService
from megarl.trainers.frontend_process import connect_frontend
from megarl.trainers.launch import launch
from megarl.trainers.server import ServerInputs, WeightLoader
from megarl.trainers.setup import read_inputs


def serve(config: RunConfig, timers: Timers):
    """Loads the policy and answers requests until a signal."""
    s = config.settings
    inputs, mesh, _ = read_inputs(config, timers, lambda: ServerInputs(config), sys.stderr)
    names = inputs.model_name, inputs.vocab_size
    with connect_frontend(inputs.options, *names, mesh["rollout"]) as frontend:
        policy = inputs.load(mesh["actor"])
        rollout = Rollout(s, inputs.rollout_role(), mesh, policy, inputs.tokenizer, timers)
        rollout.sync_weights()
        loader = WeightLoader(config, inputs, policy, mesh, rollout)
        generator = EngineGenerator(
            rollout.engine, inputs.tokenizer.end_ids, routes=s.serve_routes, load_weights=loader.load
        )
        service = ReplicaService(
            generator, rollout.model, mesh["rollout"], frontend.channel, inputs.vocab_size, inputs.label
        )
        frontend.take_signals()
        frontend.announce(inputs.model_name)
        service.open()
        with timers.phase("rollout", "rollout"):
            service.run(frontend.is_draining)


if __name__ == "__main__":
    launch(serve, "serve")
