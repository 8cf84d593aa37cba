"""Reinforcement learning with PPO: rollout, actor, critic, reward and reference in one SPMD program.

Every rank runs this file from top to bottom; a call on a role does something on the role's ranks and nothing
elsewhere. Launch it with torchrun or srun:

    torchrun --nproc-per-node 4 -m megarl.train_rl --config configs/quickstart.yaml
"""

from megarl.reinforce import Reinforcement
from megarl.run import launch


def train(program, timers):
    """The whole algorithm: write, score, judge, learn."""
    run = Reinforcement(program, timers)
    rollout, actor, critic, reward, reference = run.rollout, run.actor, run.critic, run.reward, run.reference
    for step in run.steps():
        flow = run.flow(rollout.generate(run.next_prompts(), run.samples_per_prompt, step))
        flow.share(["actor", "reward", "reference", "critic"])

        reward.score(flow, run.prompts)
        reference.logprobs(flow)
        critic.values(flow)
        actor.logprobs(flow, step)

        flow.collect({"reward": ["scores", "correct"], "reference": ["reference_logprobs"], "critic": ["values"]})
        run.experience.complete(flow)
        flow.give("critic", ["returns"])

        critic.update(flow, step)
        actor.update(flow, step)
        rollout.refresh()
        run.finish(flow)
    run.close()


if __name__ == "__main__":
    launch(train, "rl")
