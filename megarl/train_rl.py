"""Reinforcement learning, PPO and its family: rollout, actor, critic, reward and reference in one SPMD program.

Every rank runs this file from top to bottom; a call on a role does something on the role's ranks and nothing
elsewhere. Launch it with torchrun or srun:

    torchrun --nproc-per-node 4 -m megarl.train_rl --config configs/quickstart.yaml
"""

from megarl.runtime.reinforce import Reinforcement
from megarl.runtime.run import launch


def train(program, timers):
    """The whole algorithm: write, score, judge, learn."""
    run = Reinforcement(program, timers)
    actor, critic, reward, reference, experience = run.actor, run.critic, run.reward, run.reference, run.experience
    for step, flow in run.batches():
        flow.share(["actor", "reward", "reference", "critic"])
        run.replay.share(flow, step)
        reward.score(flow, run.prompts)
        reference.logprobs(flow)
        critic.values(flow)
        actor.logprobs(flow, step)

        flow.collect({"reward": ["scores", "correct"], "reference": ["reference_logprobs"], "critic": ["values"]})
        experience.complete(flow)
        flow.give("critic", ["returns"])

        run.sampling.write_ahead(step + 1)
        critic.update(flow, step)
        actor.update(flow, step, experience.kl_coefficient)
        run.rollout.refresh()
        run.finish(flow)
    run.close()


if __name__ == "__main__":
    launch(train, "rl")
