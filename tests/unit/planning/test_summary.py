"""What roles hold beside their own models: copies of weights on their way, and what a teacher gives."""

from megarl.planning import summary, traffic
from megarl.planning.question import Question
from tests.helpers.models.tiny_models import LENGTHS, SHAPES

WEIGHTS = 2 * (8 * 16 * 64 + 4 * 16 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 32 * 64  # embedding and head are one
GRPO = (
    f"{SHAPES['llama']} {LENGTHS} --advantage grpo --kl-in loss --ppo-epochs 1 --prompts-per-step 2"
    " --samples-per-prompt 2 --bf16"
)


def test_sets_of_ranks_have_the_same_roles_and_roles_take_turns():
    flags = f"{GRPO} --role-map=actor=0-1;reward=2;reference=0-2;rollout=2"
    price = Question(flags.split(), 3, None, vocab_size=20).price()
    found = {each.roles: each for each in price.rank_sets}
    assert sum(each.ranks for each in price.rank_sets) == 3 and len(found) == 2
    actor, reference = (price.roles[name].largest for name in ("actor", "reference"))
    both = next(each for roles, each in found.items() if "actor" in roles)
    assert both.bytes == actor.resident + reference.resident + max(actor.transient, reference.transient)
    assert summary.sets_of(price.roles, 3) == price.rank_sets


def test_copies_of_the_weights_on_their_way_are_memory_of_the_actor():
    flags = f"{GRPO} --role-map=actor=0-1;reward=2;reference=2;rollout=2 --rollout-correction tis".split()
    plain, ahead = (Question([*flags, "--generation-lag", lag], 3, None, vocab_size=20).price() for lag in "03")
    one, other = (price.roles["actor"].largest for price in (plain, ahead))
    assert (one.sent_weights, other.sent_weights) == (0, 3 * 2 * WEIGHTS // 2) and WEIGHTS > 0
    assert other.resident - one.resident == other.total - one.total == other.sent_weights


def test_what_the_actor_has_of_its_teacher_is_memory_and_traffic():
    flags = f"{GRPO} --role-map=actor=0-1;reward=2;reference=2;teacher=2 --distill loss --reward exact-match"
    flags += " --actor-tensor-model-parallel-size 2"
    plain, taught = (
        Question([*flags.split(), *wide], 3, None, vocab_size=20).price()
        for wide in ([], ["--teacher-hidden-size", "128"])
    )
    one, other = (price.roles["actor"].largest for price in (plain, taught))
    step, state = traffic.step_sizes(taught.program.settings), 128 * 2
    assert other.teacher_data == state * (32 // 2 + 2 * step.tokens) == 2 * one.teacher_data
    assert other.resident - one.resident == other.total - one.total == other.teacher_data - one.teacher_data
    sent = [move for move in traffic.moves(taught.program.settings, taught.program.roles) if move.source == "teacher"]
    assert [move.fields for move in sent] == [["teacher_states"]]
    header = traffic.field_bytes([], step)
    assert traffic.field_bytes(sent[0].fields, step, state) - header == state * step.tokens
