"""Searches role maps and layouts that fit into the GPUs' memory, and ranks them by `cost.price`.

Roles are dealt into blocks of ranks; within a block all have one layout and take turns, blocks work at the same time.
Each block gets the cheapest layout whose fullest rank needs at most `ROOM` of the memory, with full recomputation of
activations only where nothing fits without. Every suggestion is parsed again as the program would parse it, so that
every rule has been checked.
"""

import copy
import dataclasses
import itertools

from megarl import arguments
from megarl.errors import UsageError
from megarl.flags.role_flags import ROLES
from megarl.mcore import fake, layout_rules
from megarl.mcore.flags import parallel_sizes
from megarl.planning import summary, traffic
from megarl.planning.cost import Model, Price, price
from megarl.planning.memory import GIB
from megarl.planning.parameters import SCALAR_HEAD, counts

ROOM = 0.8  # of a GPU's memory: the rest is left to what no estimate sees
MOST, TRIED = 5, 40  # suggestions; layouts of a block whose memory is worked out
LEAST_TOKENS = 4096  # of a micro-batch on a rank: context parallelism cuts no further
POWERS = [2**i for i in range(10)]
# Roles on the same ranks, and the share of the ranks of each block. The verifier goes with the reference, or last.
MAPS = [
    ([("actor", "critic", "reference")], [(1,)]),
    ([("actor", "reference"), ("critic",)], [(1 / 2, 1 / 2), (5 / 8, 3 / 8), (3 / 4, 1 / 4)]),
    ([("actor",), ("critic", "reference")], [(1 / 2, 1 / 2), (5 / 8, 3 / 8), (3 / 4, 1 / 4)]),
    ([("actor",), ("critic",), ("reference",)], [(1 / 2, 3 / 8, 1 / 8), (1 / 2, 1 / 4, 1 / 4), (5 / 8, 1 / 4, 1 / 8)]),
]
CHOSEN = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
WRITING = {"context_parallel_size": 1, "sequence_parallel": False}  # the rollout's layout beside the actor's


@dataclasses.dataclass(frozen=True)
class Block:
    """Roles on `ranks` ranks with one layout: their price, the bytes of the fullest rank, and the layout's flags."""

    roles: tuple[str, ...]
    ranks: int
    price: Price
    flags: tuple[str, ...]


class Search:
    """Looks for layouts of one model."""

    def __init__(self, argv: list[str], program, vocab_size: int, memory: float, node: int):
        """`argv` and what it was parsed to, without a layout; `memory` of a GPU in GB, `node` GPUs with fast links."""
        self.argv, self.program, self.vocab_size = argv, program, vocab_size
        self.limit, self.node, self.step = memory * 1e9 * ROOM, node, traffic.step_of(program.settings)
        self.models = {
            kind: Model(*counts(program.roles[name].megatron, vocab_size, kind in SCALAR_HEAD))
            for name, kind in summary.KINDS.items()
            if name in program.roles and program.roles[name].has_model
        }
        self._blocks: dict[tuple, Block | None] = {}

    def block(self, roles: tuple[str, ...], ranks: int) -> Block | None:
        """The cheapest layout that fits for these roles on that many ranks, None where none does."""
        key = (roles, ranks)
        if key not in self._blocks:
            given = self.program.roles["actor"].megatron.recompute_granularity is not None
            rounds = (self._cheapest(roles, ranks, recompute) for recompute in ([False] if given else [False, True]))
            self._blocks[key] = next(filter(None, rounds), None)
        return self._blocks[key]

    def _cheapest(self, roles: tuple[str, ...], ranks: int, recompute: bool) -> Block | None:
        found = sorted(self._candidates(roles, ranks, recompute), key=lambda c: (sum(vars(c[0]).values()), c[1]))
        blocks = (Block(roles, ranks, *c) for c in found[:TRIED])
        return next((block for block in blocks if self.fullest(list(block.flags), ranks, roles) <= self.limit), None)

    def _candidates(self, roles: tuple[str, ...], ranks: int, recompute: bool):
        """(price, flags) of layouts that break no rule and whose weights and the like have room."""
        args, cap = self.program.roles["actor"].megatron, self.program.settings.max_tokens_per_microbatch
        built = [self._role(name, ranks) for name in (*roles, *(("rollout",) if "actor" in roles else ()))]
        tensors = [t for t in POWERS if t <= self.node]
        stages = [p for p in POWERS if p <= args.num_layers]
        cuts = [c for c in POWERS if c == 1 or cap // c >= LEAST_TOKENS]
        parts = [e for e in POWERS if (args.num_experts or 1) % e == 0]
        for t, p, c, e in itertools.product(tensors, stages, cuts, parts):
            if ranks % (t * p * c) or ranks % (p * e):
                continue
            layout = _layout(args, t, p, c, e, recompute)
            for role in built:
                vars(role.megatron).update(layout | (WRITING if role.name == "rollout" else {}))
            if self._least(built) < self.limit and all(map(_is_right, built)):
                yield self._price(built), tuple(_flags(layout))

    def _role(self, name: str, ranks: int):
        """A role with a namespace of its own, which each layout is written into."""
        role = self.program.roles["actor" if name == "rollout" else name]
        args = copy.copy(role.megatron)
        args.world_size = ranks
        return dataclasses.replace(role, name=name, ranks=range(ranks), megatron=args)

    def _least(self, roles: list) -> float:
        """Bytes of weights, gradients and optimizer states of a mean rank: fewer than the fullest needs."""
        total = 0.0
        for role in (r for r in roles if r.name != "rollout"):
            kind, args = summary.KINDS[role.name], role.megatron
            lanes = parallel_sizes(args).data(len(role.ranks)) * args.context_parallel_size
            trained = 4 + 8 / lanes if kind in ("train", "value") else 0
            total += self.models[kind].on_rank(args) * (args.params_dtype.itemsize + trained)
        return total

    def _price(self, roles: list) -> Price:
        kinds, requests = [summary.KINDS[role.name] for role in roles], self.program.settings.rollout_max_requests
        prices = (
            price(role, kind, self.models[kind], self.step, self.node, requests)
            for role, kind in zip(roles, kinds, strict=True)
        )
        return sum(prices, Price())

    def fullest(self, flags: list[str], ranks: int, roles: tuple[str, ...] = ROLES) -> int:
        """Bytes of the fullest rank, of these roles alone, with the flags parsed as the program would."""
        program = arguments.parse([*self.argv, *flags], ranks)
        names = {*roles, "rollout"} if "actor" in roles else roles
        held = {
            name: (role.ranks, summary.memory_of(role, program.settings, self.vocab_size))
            for name, role in program.roles.items()
            if name in names
        }
        return max(s.bytes for s in summary.rank_sets(held, ranks))


def _layout(args, t: int, p: int, c: int, e: int, again: bool) -> dict:
    """Attributes of a role's namespace; where stages cannot be equal the last one has what is left."""
    layout = dict(zip(CHOSEN, (t, p, c, e, 1), strict=True))
    rest = args.num_layers - (p - 1) * -(-args.num_layers // p)
    layout["decoder_last_pipeline_num_layers"] = rest if args.num_layers % p else None
    layout |= {"sequence_parallel": t > 1, "use_distributed_optimizer": True}
    if again:
        layout |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return layout


def _is_right(role) -> bool:
    try:
        layout_rules.check(role.name, role.megatron)
    except UsageError:
        return False
    return True


def _flags(layout: dict) -> list[str]:
    """Flags of a layout, what is the default left out."""
    found = []
    for name, value in layout.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif value not in (False, None) and not (name in CHOSEN and value == 1):
            found += [flag, str(value)]
    return found


def maps_of(roles) -> list:
    """`MAPS` for a run with these roles: without those that it has not, where no block is left empty; each once."""
    found = []
    for blocks, divisions in MAPS:
        own = [tuple(role for role in block if role in roles) for block in blocks]
        if all(own) and own not in (before for before, _ in found):
            found.append((own, divisions))
    return found


def _maps(search: Search, world_size: int):
    """(seconds of a step, blocks) of every role map whose blocks all fit: what blocks do at a time counts once."""
    for blocks, divisions in maps_of(search.program.roles):
        for shares in divisions:
            sizes = [int(world_size * share) for share in shares]
            if sum(sizes) != world_size or not all(sizes):
                continue
            found = [search.block(roles, size) for roles, size in zip(blocks, sizes, strict=True)]
            if all(found):
                prices = [block.price for block in found]
                seconds = sum(p.write for p in prices) + max(p.score for p in prices) + max(p.learn for p in prices)
                yield seconds, found


def command(blocks: list[Block]) -> list[str]:
    """The flags of a role map: common ones where all blocks have one layout, else with the roles' prefixes."""
    spans, first = {}, 0
    for block in blocks:
        span = f"{first}-{first + block.ranks - 1}"
        spans |= dict.fromkeys(block.roles, span)
        if "reference" in block.roles or "reference" not in spans:
            spans["reward"] = span
        first += block.ranks
    flags = ["--role-map", ";".join(f"{r}={spans[r]}" for r in ROLES if r in spans)] if len(blocks) > 1 else []
    if len({block.flags for block in blocks}) == 1:
        return flags + list(blocks[0].flags)
    for block in blocks:
        for role in block.roles:  # a role that only scores has no optimizer
            own = [x for x in block.flags if role != "reference" or x != "--use-distributed-optimizer"]
            flags += [f"--{role}-{x[2:]}" if x.startswith("--") else x for x in own]
    return flags


def _check_free(program):
    """The search chooses layouts: flags that name one must not be given."""
    if program.settings.role_map is not None:
        raise UsageError("--role-map: --suggest chooses it; leave it out")
    if program.roles["reward"].has_model:
        raise UsageError("--reward model: --suggest places no reward models; plan a role map of your own")
    for role in program.roles.values():
        given = [name for name in CHOSEN if getattr(role.megatron, name) != 1]
        given += ["sequence_parallel"] * role.megatron.sequence_parallel
        given += ["use_torch_fsdp2"] * role.megatron.use_torch_fsdp2
        if given:
            raise UsageError(f"{role.name}: --{given[0].replace('_', '-')}: --suggest chooses it; leave it out")


def report(rest: list[str], chosen, vocabulary, check) -> str:
    """Suggestions as text: for each its price, memory and flags.

    Args:
        rest: flags of train_rl without a layout.
        chosen: the program's own flags.
        vocabulary, check: the program's functions of the same names.
    """
    world_size, memory, node = chosen.world_size, chosen.gpu_memory_gb or 80.0, chosen.gpus_per_node or 8
    with fake.world(world_size):
        program = arguments.parse(rest, world_size)
        check(chosen, program)
        _check_free(program)
        search = Search(rest, program, vocabulary(chosen, program.settings), memory, node)
        ranked = sorted(_maps(search, world_size), key=lambda found: found[0])[:MOST]
        if not ranked:
            raise UsageError(f"--gpu-memory-gb {memory:g}: no layout was found that fits into {ROOM:.0%} of it on"
                             f" {world_size} ranks; give more of either, or a smaller --max-tokens-per-microbatch or"
                             " --rollout-buffer-gb")  # fmt: skip
        lines = [f"Layouts that fit into {ROOM:.0%} of {memory:g} GB, cheapest first; seconds a step are for ranking"]
        for number, (seconds, blocks) in enumerate(ranked, 1):
            flags = command(blocks)
            fullest = search.fullest(flags, world_size) / GIB
            names = ", ".join(f"{'+'.join(b.roles)} on {b.ranks}" for b in blocks)
            text = " ".join(f"'{x}'" if set(x) & set(";()[]*") else x for x in flags)
            lines += ["", f"{number}. {seconds:.3g} s, fullest rank {fullest:.1f} GiB: {names}", f"   {text}"]
    return "\n".join(lines)
