"""The program `serve`: the policy, its ranks' engines, the HTTP process, and weights that are loaded later."""

import dataclasses
import sys
from pathlib import Path

import torch.distributed as dist

from megarl.arguments import RunConfig
from megarl.checkpoint import folders
from megarl.checkpoint.pretrained import FactorWeights, PretrainedWeights, checkpoint_weights, folder_weights
from megarl.comm.role_mesh import RoleMesh
from megarl.errors import UsageError
from megarl.mcore.model import gpt
from megarl.mcore.weights.hf.hf_model import read_model
from megarl.observe.timers import Timers
from megarl.rollout.rollout import Rollout
from megarl.serving.configuration import check_server_flags, frontend_config
from megarl.serving.frontend_process import start_frontend
from megarl.serving.replica_service import ReplicaService
from megarl.serving.served_engine import ServedEngine
from megarl.trainers.policy import PolicyInputs
from megarl.trainers.setup import read_inputs


class ServerInputs(PolicyInputs):
    """Options and policy of a server, checked before any work starts. UsageError for wrong ones."""

    def __init__(self, config: RunConfig):
        keys = check_server_flags(config)
        super().__init__(config)
        self.frontend_config = frontend_config(config, keys, self.encoder)
        path = self.checkpoint or Path(self.source()["hf_model"])
        self.label = path.name  # of the weights, in answers
        self.model_name = config.settings.served_model_name or _model_name(path)


def _model_name(path: Path) -> str:
    """The name of a checkpoint's run, or of a Hugging Face folder."""
    path = path.resolve()
    return path.parents[1].name if path.parent.name == "checkpoints" else path.name


class WeightLoader:
    """Loads other weights into the served policy."""

    def __init__(
        self, config: RunConfig, inputs: ServerInputs, policy: gpt.ModelChunks, mesh: RoleMesh, rollout: Rollout
    ):
        self.role, self.inputs, self.policy, self.rollout = config.roles["actor"], inputs, policy, rollout
        self.pg_collection = mesh["actor"].pg_collection

    def load(self, path: str):
        """Loads the weights of a checkpoint or a Hugging Face folder. A collective of the world.

        Raises:
            UsageError: on all ranks, if some rank cannot read them; the old weights stay.
        """
        weights, error = None, None
        try:
            weights = self._read(path)
        except UsageError as problem:
            error = str(problem)
        except Exception as problem:  # a wrong file may raise anything; the server continues with the old weights
            error = f"weights {path}: cannot be read ({type(problem).__name__}: {' '.join(str(problem).split())})"
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if any(errors):
            raise UsageError(next(filter(None, errors)))
        folder = getattr(weights, "folder", None)
        if folder is not None and (damaged := folders.find_damage([folder])):
            raise UsageError(f"{folder}: damaged: {damaged[folder]}")
        weights.load(self.policy, self.pg_collection)
        self.rollout.load_weights()

    def _read(self, path: str) -> PretrainedWeights:
        known = self.role.hf_model
        if known is not None and (Path(path) / "config.json").is_file():
            model = read_model(path, "weights", self.role.megatron.seq_length)
            if model.flags != known.flags or model.vocab_size != known.vocab_size:
                raise UsageError(f"weights {path}: config.json describes another model than the server has")
            return folder_weights(dataclasses.replace(self.role, hf_model=model))
        weights = checkpoint_weights(path, "weights", self.role, self.inputs.vocab_size)
        lora = weights.lora if isinstance(weights, FactorWeights) else None
        if lora != self.inputs.rollout_role().lora:
            raise UsageError(f"weights {path}: the low-rank factors differ from those that the server was started with")
        return weights


def serve(config: RunConfig, timers: Timers):
    """Loads the policy and answers requests until a signal."""
    inputs, mesh, _ = read_inputs(config, timers, lambda: ServerInputs(config), sys.stderr)
    role_groups = mesh["rollout"]
    with start_frontend(inputs.frontend_config, inputs.model_name, inputs.vocab_size, role_groups) as frontend:
        policy = inputs.load(mesh["actor"])
        rollout = Rollout(config.settings, inputs.rollout_role(), mesh, policy, inputs.tokenizer, timers)
        rollout.load_weights()
        loader = WeightLoader(config, inputs, policy, mesh, rollout)
        engine = ServedEngine(rollout.engine, inputs.tokenizer.end_ids, config.settings.serve_routes, loader.load)
        service = ReplicaService(
            engine, rollout.model, role_groups, frontend, inputs.vocab_size, inputs.label, inputs.tokenizer
        )
        frontend.take_signals()
        frontend.announce(inputs.model_name)
        service.open()
        with timers.phase("rollout", "rollout"):
            service.run(frontend.is_draining)
