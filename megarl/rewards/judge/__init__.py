"""What a judge reads and how its judgements become numbers; the model that writes them is `roles.judge`."""
