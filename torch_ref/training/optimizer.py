"""torch's own AdamW, Adam and SGD behind its own global-norm clip, with the schedules of `flax_gpt.training.optimizer`."""

import math

import torch
from torch import Tensor, nn

from flax_gpt.config import OptimizerConfig
from flax_gpt.errors import RunError, require


def learning_rate_factor(config: OptimizerConfig, total_steps: int, count: int) -> float:
    """Share of the peak learning rate after `count` completed steps: 1, or linear warm-up and a cosine to min_lr_ratio at the last step."""
    if config.schedule == "constant":
        return 1.0
    warmup, count = max(config.warmup_steps, 1), min(count, total_steps - 1)
    if count < warmup:
        return (count + 1) / warmup
    progress = (count + 1 - warmup) / (total_steps - warmup)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def decays(parameter: Tensor, config: OptimizerConfig) -> bool:
    """Whether weight decay shrinks this parameter: with 'matrices' only those of two or more axes."""
    return config.optimizer != "adam" and config.weight_decay > 0 and (config.decay == "all" or parameter.ndim >= 2)


def decayed_names(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """Names of the parameters that weight decay shrinks, a tied one once."""
    return [name for name, parameter in model.named_parameters() if decays(parameter, config)]


class Optimizer:
    """Clip, step and schedule in one `step()`; `.optimizer` and `.schedule` are torch's own objects."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int, *, fused: bool = False):
        require(total_steps >= 1, "total_steps", total_steps, "must be at least 1")
        self.config, self.parameters = config, [p for p in model.parameters() if p.requires_grad]
        shrunk, rest = [p for p in self.parameters if decays(p, config)], [p for p in self.parameters if not decays(p, config)]
        groups = [{"params": shrunk, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
        else:
            kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
            self.optimizer = kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda count: learning_rate_factor(config, total_steps, count))
        self.count = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Tensor:
        """One update from the gradients in place; returns their norm before the clip. Raises RunError, changing nothing, when it is not finite."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if not torch.isfinite(norm):
            raise RunError(f"step {self.count + 1}: the gradient norm is {norm.item()}")
        if self.config.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        self.optimizer.step()
        self.schedule.step()
        self.count += 1
        return norm


def make_optimizer(model: nn.Module, config: OptimizerConfig, total_steps: int, *, fused: bool = False) -> Optimizer:
    """torch's AdamW, Adam or SGD for `model`; `fused` takes torch's fused kernel (the benchmark's choice)."""
    return Optimizer(model, config, total_steps, fused=fused)
