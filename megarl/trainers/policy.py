"""The policy of a program that does not train: its tokenizer and weights, read and checked, and its model; and the
server of a policy."""

import contextlib
import dataclasses
import functools
import sys
from pathlib import Path

import torch.distributed as dist

from megarl.arguments import RoleSettings, RunConfig
from megarl.checkpoint import folders, pretrained
from megarl.checkpoint.pretrained import FactorWeights, PretrainedWeights, checkpoint_weights, folder_weights
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.mcore.model import gpt
from megarl.observe.files import step_name
from megarl.observe.timers import Timers
from megarl.rollout.rollout import Rollout
from megarl.serving.configuration import FrontendConfig, check_server_flags, frontend_config
from megarl.serving.frontend_process import start_frontend
from megarl.serving.replica_service import ReplicaService
from megarl.serving.served_engine import ServedEngine
from megarl.trainers.image_inputs import RunImages
from megarl.trainers.setup import build_role_encoder, check_required, check_vocabulary, read_inputs


class PolicyInputs:
    """Tokenizer and weights of `--load` or `--hf-model`, before the process group exists. UsageError for wrong ones.

    A program whose responses a server generates (`--rollout-server`) has only the tokenizer.
    """

    def __init__(self, config: RunConfig):
        s, actor = config.settings, config.roles["actor"]
        if s.rollout_server is None:
            check_required({"--load or --hf-model": s.load or actor.hf_model})
        check_required({"--tokenizer-model": actor.tokenizer_model})
        other = actor.megatron.pretrained_checkpoint
        if other and not s.load:
            raise self._no_place(other)
        self.config, self.encoder = config, build_role_encoder(actor, s)
        self.tokenizer = self.encoder.tokenizer
        check_vocabulary(actor, self.tokenizer.vocab_size)
        self.vocab_size = actor.model_vocab_size(self.tokenizer.vocab_size)
        self.checkpoint: Path | None = None
        self.weights: pretrained.PretrainedWeights | None = None
        if s.load:
            self.weights = pretrained.checkpoint_weights(s.load, "--load", actor, self.vocab_size)
            self.checkpoint = self.weights.folder
        elif s.rollout_server is None:
            self.weights = pretrained.folder_weights(actor)
        if other and isinstance(self.weights, pretrained.CheckpointWeights):  # else it may be under low-rank factors
            raise self._no_place(other)

    @staticmethod
    def _no_place(path: str) -> UsageError:
        return UsageError(f"--pretrained-checkpoint {path}: weights come from --load; leave it out")

    def source(self) -> dict:
        """Where the weights come from, for results."""
        if self.weights is None:
            return {"rollout_server": self.config.settings.rollout_server}
        if self.checkpoint is None:
            assert isinstance(self.weights, pretrained.FolderWeights)
            return {"hf_model": str(self.weights.weight_map.model.folder.path)}
        manifest = folders.read_manifest(self.checkpoint, "--load")
        return {"checkpoint": str(self.checkpoint), "program": manifest["program"], "step": manifest["step"]}

    def load(self, role_groups: RoleGroups) -> gpt.ModelChunks | None:
        """The policy on this rank with these weights; None outside the role. Collective of the role."""
        return load_policy(self.config.roles["actor"], role_groups, self.vocab_size, self.weights)

    def rollout_role(self) -> RoleSettings:
        """The rollout's settings, with the low-rank factors of the checkpoint if it has any."""
        return pretrained.with_stored_factors(self.config.roles["rollout"], self.weights)


def load_policy(
    role: RoleSettings, role_groups: RoleGroups, vocab_size: int, weights: pretrained.PretrainedWeights
) -> gpt.ModelChunks | None:
    """A policy on this rank with these weights; None outside the role. Collective of the role."""
    if not role_groups.is_member:
        return None
    policy = gpt.build_frozen_model(role.megatron, vocab_size, role_groups.pg_collection)
    weights.load(policy, role_groups.pg_collection)
    return policy


# -- the policy's server -------------------------------------------------------------------------------------------

# A policy that answers requests over HTTP: the program `serve`, whose weights may be loaded anew, and during training
# between the updates of the policy (`--serve-policy`).


class ServerInputs(PolicyInputs):
    """Options and policy of a server, checked before any work starts. UsageError for wrong ones."""

    def __init__(self, config: RunConfig):
        keys = check_server_flags(config)
        super().__init__(config)
        self.images = RunImages.of_server(config, self.encoder)
        self.frontend_config = frontend_config(config, keys, self.encoder)
        path = self.checkpoint or Path(self.source()["hf_model"])
        self.label = path.name  # of the weights, in answers
        self.model_name = config.settings.served_model_name or _model_name(path)


def _model_name(path: Path) -> str:
    path = path.resolve()
    return path.parents[1].name if path.parent.name == "checkpoints" else path.name


def _load_other(inputs: ServerInputs, policy: gpt.ModelChunks, groups: RoleGroups, rollout: Rollout, path: str):
    """Loads the weights of a checkpoint or a Hugging Face folder into the served policy. A collective of the world.

    Raises:
        UsageError: on all ranks, if some rank cannot read them; the old weights stay.
    """
    weights, error = None, None
    try:
        weights = _read_other(inputs, path)
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
    weights.load(policy, groups.pg_collection)
    rollout.load_weights()


def _read_other(inputs: ServerInputs, path: str) -> PretrainedWeights:
    role = inputs.config.roles["actor"]
    known = role.hf_model
    if known is not None and (Path(path) / "config.json").is_file():
        model = known.other(path, "weights", role.megatron.seq_length)
        return folder_weights(dataclasses.replace(role, hf_model=model))
    weights = checkpoint_weights(path, "weights", role, inputs.vocab_size)
    lora = weights.lora if isinstance(weights, FactorWeights) else None
    if lora != inputs.rollout_role().lora:
        raise UsageError(f"weights {path}: the low-rank factors differ from those that the server was started with")
    return weights


def serve(config: RunConfig, timers: Timers):
    """Loads the policy and answers requests until a signal."""
    inputs, mesh, _ = read_inputs(config, timers, lambda: ServerInputs(config), sys.stderr)
    role_groups = mesh["rollout"]
    with start_frontend(inputs.frontend_config, inputs.model_name, inputs.vocab_size, role_groups) as frontend:
        policy = inputs.load(mesh["actor"])
        if inputs.images is not None:
            inputs.images.attach(config.roles["actor"], policy)
        rollout = Rollout(config.settings, inputs.rollout_role(), mesh, policy, inputs.tokenizer, timers)
        rollout.load_weights()
        load = functools.partial(_load_other, inputs, policy, mesh["actor"], rollout)
        engine = ServedEngine(rollout.engine, inputs.tokenizer.end_ids, config.settings.serve_routes, load)
        size, label, images = inputs.vocab_size, inputs.label, inputs.encoder.images
        service = ReplicaService(engine, rollout.model, role_groups, frontend, size, label, inputs.tokenizer, images)
        frontend.take_signals()
        frontend.announce(inputs.model_name)
        service.open()
        with timers.phase("rollout", "rollout"):
            service.run(frontend.is_draining)


class PolicyService:
    """The generation server of a training run. Its answers change nothing of the run but its times."""

    def __init__(self, config: RunConfig, frontend_config: FrontendConfig, mesh: RoleMesh, rollout: Rollout,
                 tokenizer: Tokenizer, timers: Timers):  # fmt: skip
        """Starts the HTTP process. A collective of the world."""
        s = config.settings
        self.timers, self._role_groups = timers, mesh["rollout"]
        vocab_size = config.roles["actor"].model_vocab_size(tokenizer.vocab_size)
        name = s.served_model_name or (Path(s.save).resolve().name if s.save else "policy")
        self._stack, self._service = contextlib.ExitStack(), None
        started = start_frontend(frontend_config, name, vocab_size, self._role_groups, may_end=True)
        frontend = self._stack.enter_context(started)
        frontend.announce(name)
        if self._role_groups.is_member:
            engine = ServedEngine(rollout.engine, tokenizer.end_ids)
            groups, label = self._role_groups, step_name(0)
            images = frontend_config.encoder.images
            self._service = ReplicaService(
                engine, rollout.model, groups, frontend, vocab_size, label, tokenizer, images
            )
            self._service.open()

    def answer(self, step: int):
        """Answers the requests that have come so far with the policy after `step`; later ones wait for the next call.

        A collective of each replica of the rollout.
        """
        if self._service is None:
            return
        self._service.engine.version, self._service.label = step, step_name(step)
        with self.timers.phase(self._role_groups.model_role, "serve"):
            self._service.answer_waiting()

    def close(self):
        """Answers what waits, at most `--drain-seconds` long, and ends the HTTP process. A collective of the world."""
        if self._service is not None:
            with self.timers.phase(self._role_groups.model_role, "serve"):
                self._service.run(is_draining=lambda: True)
        self._stack.close()
