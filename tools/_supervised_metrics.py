"""The metrics of train_sft, train_reward and train_preference that train_rl lacks, besides those of evaluations."""

from tools._metric import Metric

PREFERENCE = ("train_preference",)
ONLINE = "in train_rl with --advantage preference"
PAIR_METRICS = (
    ("loss", "nats", "loss of --preference-loss, mean over pairs"),
    ("accuracy", "fraction", "pairs whose chosen response has the higher implicit reward; of kto, responses whose"
     " reward is on the right side of β · KL"),
    ("margin", "reward", "mean difference of a pair's implicit rewards"),
    ("chosen_reward", "reward", "mean implicit reward of the chosen responses: β · (log π − log π_ref), or what the"
     " loss has in its place"),
    ("rejected_reward", "reward", "the same of the rejected responses"),
    ("chosen_logprob", "nats", "mean Σ log π over the tokens of a chosen response"),
    ("rejected_logprob", "nats", "the same of the rejected responses"),
)  # fmt: skip

SUPERVISED: dict[str, tuple[Metric, ...]] = {
    "Supervised training": (
        Metric("sft/loss", "nats", "mean negative log-probability of the response tokens", "", ("train_sft",)),
        Metric("sft/grad_norm", "norm", "gradient norm before clipping", "", ("train_sft",)),
        Metric("sft/learning_rate", "rate", "learning rate of the next update", "", ("train_sft",)),
    ),
    "Reward model": (
        Metric("reward/loss", "nats", "−log σ(r_chosen − r_rejected − margin), mean over pairs, centring included", "",
               ("train_reward",)),
        Metric("reward/accuracy", "fraction", "pairs whose chosen text scores above the rejected one", "",
               ("train_reward",)),
        Metric("reward/margin", "score", "mean r_chosen − r_rejected", "", ("train_reward",)),
        Metric("reward/mean", "score", "mean score of all texts", "", ("train_reward",)),
        Metric("reward/grad_norm", "norm", "gradient norm before clipping", "", ("train_reward",)),
        Metric("reward/learning_rate", "rate", "learning rate of the next update", "", ("train_reward",)),
        Metric("reward/updates", "updates", "updates of the step that changed the weights", "", ("train_reward",)),
        Metric("reward/updates_skipped", "updates", "updates skipped, because a loss or gradient was not finite", "",
               ("train_reward",)),
    ),
    "Preferences": (
        *(
            Metric(f"preference/{name}", unit, text, f"always; {ONLINE}", (*PREFERENCE, "train_rl"))
            for name, unit, text in PAIR_METRICS
        ),
        Metric("preference/pairs", "groups", "groups whose best and worst response are a pair", ONLINE, ("train_rl",)),
        Metric("preference/ties", "groups", "groups whose rewards are all equal: they have no pair", ONLINE,
               ("train_rl",)),
        Metric("preference/kl", "nats", "KL from the reference, estimated on responses to other prompts, at least 0",
               "with --preference-loss kto", PREFERENCE),
        Metric("preference/grad_norm", "norm", "gradient norm before clipping", "", PREFERENCE),
        Metric("preference/learning_rate", "rate", "learning rate of the next update", "", PREFERENCE),
    ),
}  # fmt: skip
