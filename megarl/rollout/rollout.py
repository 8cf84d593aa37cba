"""The rollout: generates responses with the actor's policy, on the actor's module or on a model with its own layout."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.comm.announcements import ResponseSender
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.inference.cache_size import check_capacity
from megarl.mcore.inference.engine import RequestList, RequestSource, RolloutEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.mcore.lora import adapter
from megarl.mcore.lora.transfer import policy_checksums, policy_parts
from megarl.mcore.model import gpt
from megarl.mcore.model.prediction_layer import layer_of
from megarl.mcore.offload import KVCacheInGradBuffer
from megarl.mcore.parallel import fsdp
from megarl.mcore.weights.reshard_plan import LocalWeights
from megarl.observe.timers import Timers
from megarl.rollout.bank import FOLDER, AskedRequests, RolloutBank, keeps, lacks_routes
from megarl.rollout.episodes.runner import EpisodeRunner
from megarl.rollout.guest_engine import GuestEngine
from megarl.rollout.policy_versions import PolicyVersions
from megarl.rollout.request_queue import UNFINISHED, GroupEarlyStop, SharedRequestQueue, shortest_groups
from megarl.rollout.requests import (
    NO_BRANCHES,
    PromptRequest,
    ResponseEnds,
    RoundRequests,
    branching_of,
    earlier_responses,
    groups_of,
    remaining_tokens,
    sampling_of,
)
from megarl.rollout.response_log import hash_of
from megarl.rollout.schedule import Schedule, ScheduledRounds, Stream
from megarl.rollout.statistics import EngineStatistics
from megarl.rollout.weight_sync import UNCHANGED, WeightSync
from megarl.tool_formats.thinking_budget import ThinkingBudget


class _Round(NamedTuple):
    """What is generated at once, and how."""

    requests: RoundRequests
    sampling: SamplingSettings
    routes: Tensor | None  # [0, L, k] of no tokens; None: they are not recorded
    wanted: int | None  # groups with which it may stop early; None: it does not
    is_training: bool
    sender: ResponseSender | None


class Rollout:
    """The inference engine, and the weight sync from the actor to it."""

    name = "rollout"

    def __init__(
        self, settings: Settings, role: RoleSettings, mesh: RoleMesh, trained: gpt.ModelChunks | None,
        tokenizer: Tokenizer, timers: Timers, cache_in_grad_buffer: KVCacheInGradBuffer | None = None,
        episodes: EpisodeRunner | None = None, schedule: Schedule | None = None,
        thinking: ThinkingBudget | None = None, guests: GuestEngine | None = None,
    ):  # fmt: skip
        """Uses the actor's module if the layouts agree, else builds a model and plans the weight transfer. Collective.

        `trained`: the actor's module on this rank, None outside the actor. `cache_in_grad_buffer`: places the KV cache
        in the actor's gradient buffer if both share a module. `episodes`: runs the environments; None: one turn.
        `schedule`: of the weights within rounds; None: a round of training has those of `--generation-lag`.
        `thinking`: the budget of each response, or turn; None: none. `guests`: generate in place of an engine.
        """
        self.episodes, self.thinking, self.guests = episodes, thinking, guests
        self.settings, self.role = settings, role
        self._drafts = settings.speculative_rollout or settings.mtp_drafts
        self.ends = ResponseEnds(settings, tokenizer)
        self.timers, self.tokenizer = timers, tokenizer
        self.mesh, self.role_groups = mesh, mesh["rollout"]
        self.metrics: dict[str, float] = {}
        self._counts = EngineStatistics(settings, self.role_groups)
        self.engine = self._weight_sync = self.model = self.bank = None
        self.scheduled: ScheduledRounds | None = None
        self._fingerprint: tuple | None = None
        # Whether a step changed the weights; of steps whose weights are to come.
        self._has_trained: dict[int, bool] = {}
        self._has_factors = has_factors = role.lora is not None and adapter.keeps_apart(role.megatron)
        vocab_size = role.model_vocab_size(tokenizer.vocab_size)
        if role.model_role == "actor":
            self.model = trained
        elif self.role_groups.is_member:
            self.model = gpt.build_frozen_model(role.megatron, vocab_size, self.role_groups.pg_collection)
            if has_factors:
                adapter.add_factors(
                    self.model, role.lora, role.megatron, self.role_groups.pg_collection, is_frozen=True
                )
        if role.model_role == self.name and (trained is not None or self.model is not None):
            s = settings
            self._weight_sync = WeightSync(
                mesh, trained, self.model, has_factors, s.verify_weights, s.generation_lag, timers
            )
        if guests is not None:
            self.engine, guests.models = cast(RolloutEngine, guests), self.weights_by_part
        elif self.role_groups.is_member:
            self.engine = RolloutEngine(
                self.model[0], self.role_groups.pg_collection, vocab_size,
                settings.max_prompt_length + settings.max_response_length, settings.rollout_buffer_gb,
                settings.rollout_max_requests, prefix_caching=settings.rollout_prefix_caching,
                chunked_prefill=settings.rollout_chunked_prefill,
                cache_in_grad_buffer=cache_in_grad_buffer if role.model_role == "actor" else None,
                speculative=self._drafts, decode_graphs=settings.decode_graphs == "auto",
                prediction=layer_of(self.model) if settings.mtp_drafts else None, stops=self.ends.matcher,
                snapshots=settings.rollout_state_snapshots,
            )  # fmt: skip
            check_capacity(settings, self.engine.capacity, self.role_groups.ranks.start)
            if schedule is not None and self._weight_sync is not None:
                self.scheduled = ScheduledRounds(settings, self.role_groups, self.engine, self._weight_sync, schedule)
        if self.role_groups.is_member and keeps(settings) and not lacks_routes(settings, role.megatron):
            self.bank = RolloutBank(Path(settings.save) / FOLDER, self.role_groups, vocab_size)

    @property
    def recorded_layers(self) -> tuple[int, ...] | None:
        """Numbers of the MoE layers whose routes this rank records; None if the run records none."""
        if self.settings.router_replay != "rollout":
            return None
        return self.engine.layers if self.role_groups.is_member else ()

    @property
    def is_static(self) -> bool:
        """Whether requests are assigned before generation; else replicas draw them from a shared queue."""
        return self.settings.rollout_dispatch == "static" or len(self.role_groups.replicas) == 1

    def load_weights(self):
        """Copies the actor's weights to the engine; does nothing if the engine runs on the actor's module.

        A collective of the ranks of actor and rollout.
        """
        self._fingerprint = None
        self.metrics = dict(UNCHANGED) if self._weight_sync is None else self._weight_sync.run()

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """Context in which the engine has the weights that are in the actor's module now; then its own again, to the
        bit. A collective of the ranks of actor and rollout."""
        own: list[tuple[Tensor, Tensor]] = []
        if self._weight_sync is not None and self.model is not None:
            held = [*(fsdp.rows_here(p) for p in self.model.parameters()), *self.model.buffers()]
            own = [(tensor, tensor.cpu() if tensor.is_cuda else tensor.clone()) for tensor in held]
        with self.timers.evaluation():
            self.load_weights()
        try:
            yield
        finally:
            for tensor, kept in own:
                tensor.copy_(kept)
            self._fingerprint = None

    def restart(self, step: int):
        """Begins after a step, whose weights have been loaded."""
        if self.scheduled is not None:
            self.scheduled.step = step

    def weights_at(self, step: int) -> int:
        """The step whose weights the rollout has at the end of a step."""
        return step if self.scheduled is None else self.scheduled.step

    def sync_weights(self, step: int, has_trained: bool):
        """Brings the weights to the engine: on the actor's ranks those of this step, if it `has_trained`, on the
        rollout's those of step − `--generation-lag`. Other ranks return at once."""
        lag, self.metrics = self.settings.generation_lag, {}
        if self.scheduled is not None:
            self.scheduled.end_step(step, has_trained)
            return
        self._has_trained[step] = has_trained
        if not self._has_trained.pop(step - lag if self.role_groups.is_member else step, False):
            return
        if lag and self._weight_sync is not None and not self.role_groups.is_member:
            self.metrics = self._weight_sync.send_copy()
        else:
            self.load_weights()

    def wait_sends(self):
        """Waits until the rollout has received all weights that this rank has sent."""
        if self._weight_sync is not None:
            self._weight_sync.wait_sends()

    def generate(
        self,
        prompts: list[PromptRequest],
        step: int,
        temperature: float | None = None,
        wanted: int | None = None,
        prompt_set: PromptSet | None = None,
        sender: ResponseSender | None = None,
        versions: PolicyVersions | None = None,
    ) -> Batch | None:
        """Generates responses to each prompt, or the rest of those that are continued; returns this replica's share,
        packed.

        Args:
            temperature: 0 is greedy. The default, None, is for training: `--temperature`, and routes are recorded with
                `--router-replay rollout`.
            wanted: stops as soon as this many groups are known to be the earliest (`earliest_groups`); responses of
                other groups may be unfinished.
            prompt_set: the set whose lines the prompts are, for environments.
            sender: sends each response as soon as it has ended; None on ranks that send nothing.
            versions: of the policy, which the batch gets for its tokens; None: it has none.
        """
        if not self.role_groups.is_member:
            return None
        s = self.settings
        with self.timers.phase(self.role_groups.model_role, "rollout"):
            is_training = temperature is None
            branching = branching_of(s) if is_training else NO_BRANCHES
            requests = RoundRequests(prompts, s.seed, step, self.thinking, branching, prompt_set)
            if wanted is not None:
                requests.skip_if_enough_are_finished(wanted)
            stops_early = wanted is not None and wanted < len(prompts) and any(requests.limits)
            routes = self.engine.empty_routes if is_training and self.recorded_layers is not None else None
            sampling = sampling_of(s, s.temperature if temperature is None else temperature)
            round_ = _Round(requests, sampling, routes, wanted if stops_early else None, is_training, sender)
            return self._generate(round_, self.scheduled if is_training else None, versions)

    def _generate(self, round_: _Round, weights: ScheduledRounds | None, versions: PolicyVersions | None) -> Batch:
        """This replica's share of a round. `weights`: change within it as a schedule says; None: they stay."""
        requests, routes, version = round_.requests, round_.routes, None
        if self.guests is not None:
            self.guests.weights = self.name_of_weights()
        if weights is not None:
            weights.begin(requests.step)
        if versions is not None:
            version = versions.of_step(requests.step)[0] if weights is None else versions.of_weights(weights.first)
        if weights is None or self.episodes is not None:  # weights never change within turns
            self._run_engine(round_, None, lambda: version)
        elif weights.record is not None:
            weights.follow(requests, self._open_here(requests), self._stream(round_), versions.of_weights)
        else:
            self._run_engine(round_, weights, lambda: versions.of_weights(weights.step))
        if weights is not None:
            weights.end()
        self._counts.add(self.engine, round_.is_training)
        if self.episodes is not None:
            longest = None
            if round_.wanted is not None:
                _, longest = self.earliest_groups(None, requests.prompts, round_.wanted)
            return self.episodes.settle(longest, routes, version)
        requests.build([i for i in self._assigned_here(requests) if not requests.limits[i]])  # as they were
        for i, response in requests.responses.items() if round_.sender else ():
            round_.sender.send(i, response.tokens)  # that have not been sent yet
        return requests.to_batch(routes, version)

    def generation_metrics(self) -> dict[str, float]:
        """Metrics of the training responses generated since the last call: of environments, decode steps, drafts, and
        prompts read. A collective of the role."""
        if not self.role_groups.is_member:
            return {}
        sources = (self.episodes, self.guests, self._counts)
        return {name: value for each in sources if each is not None for name, value in each.take_metrics().items()}

    def weights_by_part(self) -> list[LocalWeights]:
        """As `policy_parts`."""
        return policy_parts(self.model, self.role_groups.pg_collection, self._has_factors)

    def name_of_weights(self) -> str:
        """A name that the present weights have wherever they are. A collective of the role."""
        return hash_of(repr(self._checksums()).encode()).hex()

    def _checksums(self) -> tuple:
        if self._fingerprint is None:
            checksums = policy_checksums(self.model, self.role_groups.pg_collection, self._has_factors)
            self._fingerprint = tuple(sorted(checksums.items()))
        return self._fingerprint

    def _bank_key(self, sampling: SamplingSettings) -> tuple:
        """What all requests depend on that a bank answers. A collective of the role."""
        args = self.role.megatron
        kernels = args.attention_kernel, args.transformer_impl, args.delta_rule_backend
        layout = parallel_sizes(args), args.params_dtype, *kernels
        thinking = None if self.thinking is None else (self.thinking.limit, self.thinking.tokens)
        return self._checksums(), layout, sampling, self.ends.identity, thinking

    def _stream(self, round_: _Round) -> Stream:
        routes = round_.routes is not None
        return functools.partial(self.engine.stream, end_ids=self.ends.ids, settings=round_.sampling, routes=routes)

    def _run_engine(self, round_: _Round, weights: ScheduledRounds | None, version: Callable[[], int | None]):
        """Generates this replica's responses, or runs its episodes, to their ends, or as far as the earliest groups
        decide. `weights`: may change meanwhile; None: they stay. `version`: of the policy now."""
        requests, stream = round_.requests, self._stream(round_)
        source = self._source(requests, whole_groups=round_.wanted is not None)
        queue = source if isinstance(source, SharedRequestQueue) else None
        early_stop: GroupEarlyStop | None = None
        if round_.wanted is not None:
            early_stop = GroupEarlyStop(round_.wanted, requests, self.role_groups, by_clock=weights is not None)
        if weights:
            weights.first_groups = early_stop
        bank = self.bank if round_.is_training else None
        if bank is not None:
            bank.begin_round(requests.step, self._bank_key(round_.sampling), round_.routes)

        def ended(i: int, completion: Completion):
            response = requests.take(i, completion, version())
            if weights:
                weights.note(i, len(completion.tokens))
            if response.has_ended and early_stop:
                early_stop.add(i, response.new)
            if not response.has_ended and weights:
                asked.add(i, response.request())
            elif round_.sender:
                round_.sender.send(i, response.tokens)

        if self.episodes is not None:
            most = queue.share if queue else 2 * self.engine.max_requests  # work for the engine while others wait
            self.episodes.run(stream, source, requests, most, round_.is_training, early_stop, round_.sender, bank)
        else:
            asked = AskedRequests(source, ended, bank)
            options: dict[str, Any] = {"max_requests": queue.share if queue else None}
            if weights:
                options["interrupt"] = weights.look
            elif early_stop:
                options["response_limit"] = early_stop.longest
            goes_on = True
            while goes_on:
                for i, completion in stream(asked, **options):
                    asked.ended(i, completion)
                goes_on = weights is not None and weights.goes_on()
            if weights:  # of a round that stopped early: others may not have begun, and belong to whoever takes them
                source.take(len(requests))
        if queue:
            queue.close()
        if early_stop and not weights:
            early_stop.close()

    def _open_here(self, requests: RoundRequests) -> list[int]:
        return [i for i in self._assigned_here(requests) if requests.is_open(i)]

    def _source(self, requests: RoundRequests, whole_groups: bool) -> RequestSource:
        if self.is_static:
            mine = self._open_here(requests)
            return RequestList(zip(mine, requests.build(mine), strict=True))
        # A prompt's samples stay together to share its KV cache or turns, or for the early stop, which counts groups.
        stay_together = self.settings.rollout_prefix_caching or self.settings.branch_turns > 0 or whole_groups
        return SharedRequestQueue(requests, stay_together, self.role_groups)

    def _assigned_here(self, requests: RoundRequests) -> list[int]:
        return requests.assigned_to(self.role_groups.dp_rank, len(self.role_groups.replicas))

    def recompute_routes(self, batch: Batch | None, prompts: list[PromptRequest]):
        """Prefills responses that were finished before `generate`, to record their routes under the present policy.

        `batch`: this rank's share of the responses to `prompts`, as given to `generate`.
        """
        is_finished = torch.tensor([not tokens for tokens in remaining_tokens(prompts)])
        if batch is None or self.recorded_layers is None or not is_finished.any():
            return
        with self.timers.phase(self.role_groups.model_role, "rollout"):
            # An episode that failed has no tokens, and no routes.
            is_finished = is_finished[batch.sequence_ids.cpu()] & (batch.response_lengths > 0).cpu()
            positions = is_finished.nonzero().flatten().tolist()
            sequences, bounds = batch.tokens.split(batch.lengths.tolist()), batch.cu_seqlens.tolist()
            # The last token has no route, so it is left out; the engine samples a token in its place.
            requests = [
                GenerationRequest(prompt=sequences[i][:-1].tolist(), key=0, max_new_tokens=1) for i in positions
            ]
            done = self.engine.generate(requests, self.ends.ids, SamplingSettings(), routes=True)
            for i, completion in zip(positions, done, strict=True):
                batch.routes[bounds[i] : bounds[i + 1]] = completion.routes.to(batch.routes.device)

    def earliest_groups(
        self, batch: Batch | None, prompts: list[PromptRequest], wanted: int
    ) -> tuple[Tensor, int | None]:
        """([wanted] ascending numbers of the earliest groups of `generate`, new tokens of their longest response).

        Finished groups rank by the new tokens of their longest response, then by number. If the clock has decided, the
        groups are those that were first, and the second result is None. `batch`: this rank's share; not needed of
        episodes. A collective of the role.
        """
        if self.scheduled is not None and self.scheduled.groups is not None:
            return self.scheduled.groups, None
        if self.episodes is not None:
            numbers, own = self.episodes.new_lengths()
        else:
            before = [0 if response is None else response.length for response in earlier_responses(prompts)]
            numbers, lengths = batch.sequence_ids, batch.lengths - batch.prompt_lengths
            new = lengths - lengths.new_tensor(before)[numbers]
            is_finished = batch.finished | (new == new.new_tensor(remaining_tokens(prompts))[numbers])
            own = new.masked_fill(~is_finished, UNFINISHED)
        groups = groups_of(prompts)
        longest = groups.reduce(self.role_groups.gather_rows(numbers, own, groups.count), "amax")
        earliest = shortest_groups(longest, wanted)
        return earliest, int(longest[earliest].max())
