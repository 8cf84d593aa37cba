"""Requests from outside during a training run: the policy answers them between its updates (`--serve-policy`)."""

import contextlib
from pathlib import Path

from megarl.arguments import RunConfig
from megarl.comm.role_mesh import RoleMesh
from megarl.data.tokenizers import Tokenizer
from megarl.observe.files import step_name
from megarl.observe.timers import Timers
from megarl.rollout.rollout import Rollout
from megarl.serving.configuration import FrontendConfig
from megarl.serving.frontend_process import start_frontend
from megarl.serving.replica_service import ReplicaService
from megarl.serving.served_engine import ServedEngine


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
            common = engine, rollout.model, self._role_groups, frontend, vocab_size
            self._service = ReplicaService(*common, step_name(0), tokenizer)
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
