#!/usr/bin/env bash
# megatron-core 0.19.2 (torch 2.14.1, CPU): a scheduler that takes a checkpoint's values resumes with its own weight decay
# for one more update.
# load_state_dict sets the optimizer's groups before it reads the checkpoint's weight decay, and after it reads the
# learning rates. So the first update after a resume has the checkpoint's rate with the new run's weight decay.
# Output: stored 0.001 and 0.01; after loading 0.001 and 0.1; after the next step 0.001 and 0.01
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 megatron-core==0.19.2
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def scheduler(rate, decay):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate, weight_decay=decay)
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=rate, min_lr=rate, lr_warmup_steps=0, lr_decay_steps=100,
        lr_decay_style="constant", start_wd=decay, end_wd=decay, wd_incr_steps=100, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True, override_opt_param_scheduler=False,
    )


def values(of):
    (group,) = of.optimizer.param_groups
    return group["lr"], group["weight_decay"]


first, resumed = scheduler(0.001, 0.01), scheduler(0.005, 0.1)
first.step(10)
stored = values(first)
resumed.load_state_dict(first.state_dict())
loaded = values(resumed)
resumed.step(1)
stepped = values(resumed)
said = (f"{rate} and {decay}" for rate, decay in (stored, loaded, stepped))
print("stored {}; after loading {}; after the next step {}".format(*said))
assert stored == stepped == (0.001, 0.01) and loaded == (0.001, 0.1)
PYTHON
