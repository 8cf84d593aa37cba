"""Reinforcement learning of a policy: PPO, GRPO and their family in one SPMD program.

Every rank runs this file from top to bottom. A call on a role computes on the role's ranks and returns at once on all
others, so roles on different ranks work at the same time. Without a critic, a reference or a teacher, their
calls do nothing. Launch it with torchrun or srun:

    torchrun --nproc-per-node 4 -m megarl.train_rl --config configs/quickstart.yaml
"""

from megarl.trainers.launch import launch


def train(config, timers):
    """The whole algorithm."""
    from megarl.trainers.rl_trainer import RLTrainer  # after the flags: it imports torch and Megatron

    run = RLTrainer(config, timers)
    batcher, rollout, reward = run.batcher, run.rollout, run.reward
    reference, teacher = run.reference, run.teacher
    actor, critic, advantages = run.actor, run.critic, run.advantages
    for step in run.steps():
        batch = batcher.generate(step)
        if batch is not None:  # None: dynamic sampling kept too few groups, which wait for the next step
            run.dispatch(batch)
            reward.score(batch)
            reference.logprobs(batch)
            teacher.score(batch)
            critic.values(batch)
            actor.old_logprobs(batch)

            batch.gather(reward, reference, teacher, critic)
            advantages.compute(batch)
            batch.scatter(critic)

            critic.update(batch)
            actor.update(batch, advantages.kl_coefficient)
            actor.update_average()
            advantages.update_kl_coefficient(batch)
        reference.refresh(step)
        rollout.sync_weights(step, has_trained=batch is not None)
        run.serve(step)  # with --serve-policy: requests from outside
        run.evaluate(step)
        run.log(step)
        run.save(step)
    run.close()


if __name__ == "__main__":
    launch(train, "rl")
