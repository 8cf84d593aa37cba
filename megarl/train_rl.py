"""Reinforcement learning, PPO and its family: rollout, actor, critic, reward and reference in one SPMD program.

Every rank runs this file from top to bottom; a call on a role does something on the role's ranks and nothing
elsewhere. Launch it with torchrun or srun:

    torchrun --nproc-per-node 4 -m megarl.train_rl --config configs/quickstart.yaml
"""

from megarl.trainers.rl import RLTrainer
from megarl.trainers.trainer import launch


def train(program, timers):
    """The whole algorithm: write, score, judge, learn."""
    run = RLTrainer(program, timers)
    actor, critic, reward, reference, experience = run.actor, run.critic, run.reward, run.reference, run.experience
    for step, flow in run.batches():
        flow.dispatch(["actor", "reward", "reference", "critic"])
        run.replay.share(flow, step)
        reward.score(flow, run.prompts)
        reference.logprobs(flow)
        critic.values(flow)
        actor.logprobs(flow, step)

        flow.gather({"reward": ["scores", "correct"], "reference": ["reference_logprobs"], "critic": ["values"]})
        experience.compute(flow)
        flow.scatter("critic", ["returns"])

        run.sampling.prefetch(step + 1)
        critic.update(flow, step)
        actor.update(flow, step, experience.kl_coefficient)
        run.rollout.sync_weights()
        run.finish(flow)
    run.close()


if __name__ == "__main__":
    launch(train, "rl")
