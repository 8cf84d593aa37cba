"""Files of a mixture with limits, rewards and group sizes of their own, and rewards that see a group."""

from tests.helpers.folders.vision_programs import TURNS as SHOWN
from tests.helpers.pages.flag_cases import ONLINE
from tests.helpers.programs import GRADED
from tests.laws import plug_ins
from tests.laws.features.feature import (
    AHEAD,
    ALL_AHEAD,
    COARSE,
    CP2,
    DYNAMIC,
    FACTORS,
    FOUR,
    FREE_REWARD,
    GRPO,
    MANY_REWARDS,
    OWN_EXPERTS,
    PARTIAL,
    PP2,
    ROLLOUT_APART,
    TP2,
    TP2_APART,
    TP2_SEQUENCE,
    TURNS,
    TWO,
    Feature,
    Layout,
)

MIXED = f"{GRPO} --prompts-per-step 4 --prompts {{mixture}}"
POOLS = (f"{GRPO} --lr 1e-4 --prompts-per-step 4 --minibatch-size 8 --ppo-epochs 1 --pool-bounds 0.3,0.7"
         " --pool-weights 0.5,1,0 --pool-retire-after 3 --max-response-length 3 --prompts {pool}"
         " --reward tests.laws.plug_ins:is_even")  # fmt: skip
SIZES = f"{GRPO} --prompts-per-step 4 --samples-per-prompt 4 --minibatch-size 8 --prompts {{sizes}}"
SHAPED = (f"{GRPO} --lr 1e-4 --samples-per-prompt 4 --minibatch-size 24 --ppo-epochs 1 --max-response-length 3"
          " --reward-ngram 2 --reward-length 2"
          " --reward 0*exact-match+cosine+length+0.5*repetition+0.25*truncated+0.5*adaptive-length")  # fmt: skip
# One mini-batch: without the reward, its responses would be assigned to replicas one by one.
GROUPED = f"{GRPO} --lr 1e-4 --samples-per-prompt 4 --minibatch-size 24 --ppo-epochs 1 --reward"
OF_GROUPS = "tests.laws.plug_ins:novelty"
BY_FILE = (f"{GRPO} --lr 1e-4 --prompts-per-step 6 --minibatch-size 24 --ppo-epochs 1 --samples-per-prompt 4"
           " --reward-length 1 --reward-pattern 1 --prompts {rewards}")  # fmt: skip


def _of_sizes(flags: str, ranks: int = 1, layout: Layout = TWO, **more) -> Feature:
    return Feature(
        f"{SIZES} {flags}", ranks, layouts=(layout,), moved=(layout,), numbers=0, check=plug_ins.check_sizes, **more
    )


# Each prompt of `{pictures}` has a picture; a policy of few layers on a folder with a vision tower.
PICTURES = (f"{GRPO} {GRADED} --lr 1e-4 --kl-coefficient 0.05 --max-prompt-length 80"
            " --max-tokens-per-microbatch 200 --rollout-buffer-gb 0.01 --prompts-per-step 4")  # fmt: skip


AGENT_SHOWS = "--environment tests.helpers.envs.agents:pictured_sums"


def _of_pictures(flags: str = "", ranks: int = 1, made: str = "{pictures}", **more) -> Feature:
    more = {"check": plug_ins.check_pictures} | more
    return Feature(f"{made} {PICTURES} {flags}", ranks, warm_start=False, **more)


REWARD_OF_STAGES = "--role-map actor=0;critic=0;reference=0;reward=1-2 --reward-pipeline-model-parallel-size 2"
REWARD_APART = (3, "--role-map actor=0;reward=0;rollout=1-2")
DATA = {
    "mixture": Feature(f"{MIXED} --overlong-buffer 1", steps=4, check=plug_ins.check_shares,
                       layouts=(TWO, FOUR, TP2, FREE_REWARD), numbers=0),
    "mixture, partial": Feature(f"{MIXED} {PARTIAL}", steps=4),
    "mixture, a filter": Feature(f"{MIXED} --group-filter reward --dynamic-sampling --max-sampling-rounds 3", steps=4),
    "mixture, a lag": Feature(f"{MIXED} {ROLLOUT_APART} {AHEAD}", 2, steps=4),
    "mixture of sft": Feature("--prompts {plain_mixture}", program="sft", steps=4),
    "pools": Feature(POOLS, steps=8, resumed=5, layouts=(TWO, FOUR, TP2, (3, "--role-map actor=0;reward=1;rollout=2")),
                     moved=(TWO,), texts=8, numbers=0),
    "pools, partial": Feature(f"{POOLS} {PARTIAL} --over-sampling 1.5", steps=8, resumed=5),
    "pools, a filter": Feature(
        f"{POOLS} --group-filter range --group-filter-range 0.4,0.6 --dynamic-sampling --max-sampling-rounds 2"
        " --pool-weights 0.5,1,0.5 --pool-retire-after 0", steps=8, resumed=5),
    "pools, a lag": Feature(f"{POOLS} {ALL_AHEAD}", 2, steps=8, resumed=5),
    "shaped reward": Feature(SHAPED, steps=1, resumed=0, layouts=(TWO, MANY_REWARDS, TP2_APART)),
    "grouped reward": Feature(
        f"{GROUPED} 0.5*{OF_GROUPS}+0.25*exact-match", steps=2, resumed=1, check=plug_ins.check_groups,
        layouts=(TWO, FOUR, MANY_REWARDS, TP2_APART, (3, "--role-map actor=0;reward=1-2 --reward-workers 1"))),
    "grouped reward, a filter": Feature(
        f"{GROUPED} {OF_GROUPS} --group-filter reward --dynamic-sampling --max-sampling-rounds 3"
        " --reward-failure fallback", 2, steps=2, resumed=0, check=plug_ins.check_groups),
    "grouped reward, partial": Feature(f"{GROUPED} {OF_GROUPS} {PARTIAL}", 2, steps=2, resumed=0,
                                       check=plug_ins.check_groups),
    "grouped reward, greedy": Feature(f"{GROUPED} {OF_GROUPS} --advantage remax --greedy-baseline", 2, steps=2,
                                      resumed=0, check=plug_ins.check_groups),
    "grouped reward, turns": Feature(f"{GROUPED} {OF_GROUPS} {TURNS}", 2, steps=2, resumed=0,
                                     check=plug_ins.check_groups),
    "grouped reward, a lag": Feature(f"{GROUPED} {OF_GROUPS} --role-map actor=0;reward=1-2;rollout=1-2 {AHEAD}", 3,
                                     steps=2, resumed=0, check=plug_ins.check_groups),
    "grouped reward, one sample": Feature(
        f"{GROUPED} {OF_GROUPS} --samples-per-prompt 1 --minibatch-size 6 --advantage reinforce++", 2, steps=2,
        resumed=0, check=lambda save: plug_ins.check_groups(save, 1)),
    "rewards by file": Feature(
        BY_FILE, steps=2, resumed=1, check=plug_ins.check_rewards, numbers=0,
        layouts=(TWO, FOUR, TP2_APART,
                 (4, "--role-map actor=0;reward=1-3;rollout=0 --reward-workers 1"))),
    "pictures": _of_pictures(
        layouts=(TWO, TP2_SEQUENCE, PP2, CP2, (3, "--role-map actor=0;reference=1;reward=1;rollout=2"),
                 (3, "--role-map actor=0-1;reference=0;reward=2;rollout=2 --actor-tensor-model-parallel-size 2"
                  " --rollout-tensor-model-parallel-size 1")),
        moved=(TWO, TP2_SEQUENCE)),
    "pictures, FSDP": _of_pictures("--use-torch-fsdp2", 2, layouts=((4, f"{TP2[1]} --use-torch-fsdp2"),)),
    "pictures of modules": _of_pictures(f"--advantage gae --critic-lr 1e-3 {FACTORS}", made="{module_pictures}",
                                        layouts=(TWO, TP2, CP2)),
    "pictures of modules, FSDP": _of_pictures("--use-torch-fsdp2", 2, made="{module_pictures}", layouts=(TWO,)),
    "pictures, partial": _of_pictures(PARTIAL), "pictures, a lag": _of_pictures(f"{ALL_AHEAD} --kl-coefficient 0", 2),
    "pictures, a critic": _of_pictures("--advantage gae --critic-lr 1e-3", layouts=(TWO,)),
    "pictures, a full cache": _of_pictures("--image-cache-gb 0 --rollout-prefix-caching --speculative-rollout"),
    "pictures, factors": _of_pictures(FACTORS),
    "pictures, turns": _of_pictures(
        SHOWN, check=plug_ins.check_shown, moved=(TWO,),
        layouts=(TWO, TP2_SEQUENCE, PP2, CP2, (3, "--role-map actor=0;reference=1;reward=1;rollout=2"))),
    "pictures, turns, a full cache": _of_pictures(
        f"{SHOWN} --image-cache-gb 0 --rollout-prefix-caching --speculative-rollout", check=plug_ins.check_shown),
    "pictures, carried turns": _of_pictures(f"{SHOWN} {PARTIAL} --kl-coefficient 0", check=plug_ins.check_shown),
    "pictures, an agent": _of_pictures(f"{SHOWN} {AGENT_SHOWS}", check=plug_ins.check_shown, layouts=(TP2_SEQUENCE,)),
    "pictures, a carried agent": _of_pictures(
        f"{SHOWN} {AGENT_SHOWS} {PARTIAL} --kl-coefficient 0", check=plug_ins.check_shown),
    "pictures, turns, a lag": _of_pictures(f"{SHOWN} {ALL_AHEAD} --kl-coefficient 0", 2, check=plug_ins.check_shown),
    "pictures, turns, a critic": _of_pictures(f"{SHOWN} --advantage gae --critic-lr 1e-3", layouts=(TWO,),
                                              check=plug_ins.check_shown),
    "sizes": _of_sizes(""),
    "sizes, four": _of_sizes("", layout=FOUR),
    "sizes, TP2": _of_sizes("", layout=TP2),
    "sizes, a static rollout": _of_sizes("", layout=(2, "--rollout-dispatch static")),
    "sizes, a filter": _of_sizes(f"{DYNAMIC} --max-sampling-rounds 2"),
    "sizes, over-sampling": _of_sizes(f"{DYNAMIC} --over-sampling 2 --max-sampling-rounds 2"),
    "sizes, partial": _of_sizes(PARTIAL),
    "sizes, stale groups": _of_sizes(f"{PARTIAL} --max-staleness 4 --rollout-prefix-caching"),
    "sizes, a lag": _of_sizes(f"{ROLLOUT_APART} {AHEAD}", 2, REWARD_APART),
    "sizes, a lag, partial": _of_sizes(f"{ROLLOUT_APART} --generation-lag 1 {PARTIAL}", 2, REWARD_APART),
    "sizes, turns": _of_sizes(f"{TURNS} --reward environment"),
    "sizes, credit of turns": _of_sizes(f"{TURNS} --reward environment --advantage rloo --credit turns"),
    "sizes, partial turns": _of_sizes(f"{TURNS} --reward environment {PARTIAL}"),
    "sizes, partial agents": _of_sizes(
        f"{TURNS} --reward environment {PARTIAL} --environment tests.helpers.envs.agents:sums"),
    "sizes, greedy baselines": _of_sizes("--advantage remax --greedy-baseline"),
    "sizes, greedy, a filter": _of_sizes(f"{DYNAMIC} --max-sampling-rounds 2 --advantage remax --greedy-baseline"),
    "sizes, pools": _of_sizes(f"--pool-bounds 0.3,0.7 {COARSE}"),
    "sizes, routes": _of_sizes(f"{OWN_EXPERTS} {PARTIAL}", warm_start=False),
    "sizes, a comparing loss": _of_sizes("--policy-loss real"),
    "sizes, a grouped reward": _of_sizes("--reward tests.laws.plug_ins:places --ppo-epochs 1 --minibatch-size 16"),
    "sizes, preferences": _of_sizes(f"{ONLINE} --minibatch-size 16 --ppo-epochs 1 --kl-coefficient 0.1"),
    "sizes, the optimal baseline": _of_sizes("--advantage otb"),
    "sizes, judged pairs": _of_sizes("{judge} --judge-max-length 160 --reward-max-failures 1 --train-iters 3",
                                     layout=(3, "--role-map actor=0;rollout=1;reward=2")),
    "judged alone": Feature("{judge_alone}", steps=1, resumed=0, check=plug_ins.check_judged, layouts=(
        TWO, (2, "--reward-tensor-model-parallel-size 2 --offload"), (4, "--judge-max-requests 4"),
        (3, f"{REWARD_OF_STAGES} --reward-offload"),
        (4, "--role-map actor=0-1;critic=2;reference=3;reward=0-3 --reward-tensor-model-parallel-size 2"
         " --reward-pipeline-model-parallel-size 2"))),
    "judged alone, a filter": Feature(
        "{judge_alone} --group-filter reward --dynamic-sampling --advantage grpo", steps=1, resumed=0,
        check=plug_ins.check_judged, layouts=((2, "--role-map actor=0;reference=0;reward=1"),)),
    **{f"judged {name}": Feature(
        f"{{{flags}}} --samples-per-prompt 3 --minibatch-size 6 --judge-max-length 160 --reward-max-failures 1"
        " --reward judge", steps=1, resumed=0, check=plug_ins.check_judged, layouts=(TWO, FOUR, (3, REWARD_OF_STAGES)))
       for name, flags in (("pairs", "judge"), ("groups", "judge_of_groups"))},
    "judged pairs, evaluated": Feature(
        "{judge} --judge-max-length 160 --reward-max-failures 1 --reward 0.1*judge+exact-match --eval-interval 1"
        " --eval-prompts {heldout}", steps=2, resumed=1),
    "sizes, siblings": _of_sizes(
        f"--distill reward --teacher self --teacher-context sibling --teacher-max-prompt-length 300 {GRADED}"
        " --max-tokens-per-microbatch 400"),
    "sizes, a critic": _of_sizes("--advantage gae --critic-lr 1e-3",
                                 layout=(2, "--role-map actor=0;critic=1;reward=1")),
}  # fmt: skip
