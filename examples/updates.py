"""Flags and output of training by updates, for language models; flags are named as in fairseq."""

import json
import math
import time
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from absl import flags
from common import checkpoints, schedules  # noqa: F401  # a flag of checkpoints is renamed below
from common.meters import RunOutput, memory_in_use, perplexity
from common.script import DEFINE_number, Stop, require
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

flags.DEFINE_integer("batch_size", 8, "sequences of a rank in a micro-batch", lower_bound=1)
flags.DEFINE_integer("update_freq", 1, "micro-batches in an update", lower_bound=1)
flags.DEFINE_integer("max_update", None, "total number of updates", lower_bound=1)
DEFINE_number("lr", None, "learning rate after the warm-up", "(0, inf)")
flags.DEFINE_integer("warmup_updates", None, "updates of the warm-up", lower_bound=0)
flags.DEFINE_integer("total_num_update", None, "updates until decay ends; default: max_update", 1)
DEFINE_number("end_learning_rate", 0.0, "learning rate after the decay", "[0, inf)")
DEFINE_number("power", 1.0, "power of the decay; 1: linear", "(0, inf)")
flags.DEFINE_string("adam_betas", "(0.9, 0.98)", "betas of AdamW")
DEFINE_number("weight_decay", 0.0, "weight decay of AdamW", "[0, inf)")
DEFINE_number("clip_norm", 1.0, "maximum gradient norm; 0: no clipping", "[0, inf]")
flags.DEFINE_integer("validate_interval_updates", 100, "updates between validations", 1)
flags.DEFINE_integer("save_interval_updates", 100, "updates between checkpoints", lower_bound=1)
flags.DEFINE_alias("resume_update", "resume_epoch")
flags.DEFINE_alias("log_interval", "log_steps")
flags.DEFINE_enum("log_format", None, ["bar", "json"], "default: a bar on a terminal, else json")
SMALLEST_SCALE = 1e-4  # fairseq's min_loss_scale: a lower scale does not make gradients finite


def betas(text: str) -> tuple[float, ...]:
    """Parses ``--adam_betas``."""
    return tuple(float(beta) for beta in text.strip("() ").split(","))


def _are_betas(text: str) -> bool:
    try:
        return len(betas(text)) == 2 and all(0 <= beta < 1 for beta in betas(text))
    except ValueError:
        return False


require("adam_betas", _are_betas, "must be two numbers from 0 to below 1: '(0.9, 0.98)'")


def optimize(
    parameters: Iterable[nn.Parameter], options: SimpleNamespace, **more: Any
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW, and a schedule with a warm-up and a polynomial decay. ``more``: options of AdamW."""
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.lr,
        betas=betas(options.adam_betas),
        weight_decay=options.weight_decay,
        **more,
    )
    factor = partial(
        schedules.polynomial,
        warmup=options.warmup_updates,
        total=options.total_num_update,
        power=options.power,
        end=options.end_learning_rate / options.lr,
    )
    return optimizer, LambdaLR(optimizer, factor)


class Updates(RunOutput):
    """Loss, speed and norms of updates 1 to ``options.max_update``, for all ranks together.

    ``tokens``: the tokens of an update. ``loss``: that of the last update shown, in nats per token.
    """

    UNIT, SPEED, RESULT = "updates", "tokens/s, last updates", "validation loss"

    def __init__(
        self,
        options: SimpleNamespace,
        optimizer: Optimizer,
        scaler: GradScaler | None = None,
        *,
        tokens: int,
    ) -> None:
        super().__init__(options)
        self.tokens, self.length = tokens, options.max_update
        self.valid_loss, self.samples = math.nan, 0
        self._optimizer, self._scaler = optimizer, scaler
        wished = options.log_format or ("bar" if self._console.is_terminal else "json")
        self._json = self._shows and wished == "json"
        if not self._json:
            self._start_bar("update", options.max_update, "compiling")
        self._start = self._then = time.perf_counter()
        self._done: int | None = None

    def update(self, number: int, loss: torch.Tensor, norm: torch.Tensor, show: bool) -> None:
        """Records a traced update: the loss of this rank and the norm of all gradients."""
        import torch_xla.core.xla_model as xm

        mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach().float(), scale=1 / self.world_size)
        # Computed in every update, shown or not, because another result needs another program.
        self._now = torch.stack([mean.reshape(()), norm.detach().float().reshape(())])
        self._done = number - 1 if self._done is None else self._done
        if show:
            rate, scaler = self._optimizer.param_groups[0]["lr"], self._scaler
            scale = scaler.get_scale() if scaler and scaler.is_enabled() else None
            # Called after the step has run: reading the loss here would cut the step in two.
            xm.add_step_closure(self._show, (number, self._now, rate, scale))
        if self._profile is not None:
            self._profile.step()

    def _show(self, number: int, now: torch.Tensor, rate: float, scale: float | None) -> None:
        time_now = time.perf_counter()
        self.loss, norm = now.tolist()
        self.speed = (number - self._done) * self.tokens / (time_now - self._then)
        self._done, self._then, self.seconds = number, time_now, time_now - self._start
        if scale is None and not math.isfinite(self.loss):
            raise Stop(f"the loss is {self.loss} in update {number}: choose a lower --lr")
        if scale is not None and scale < SMALLEST_SCALE:
            raise Stop(f"the loss scale fell to {scale:g} in update {number}: choose a lower --lr")
        used, memory = memory_in_use()
        shown = {"loss": round(self.loss, 4), "ppl": perplexity(self.loss)}
        shown |= {"wps": round(self.speed), "gnorm": float(f"{norm:.4g}"), "lr": rate}
        shown |= {} if scale is None else {"loss_scale": scale}
        if self._json:
            time_and_memory = {"wall": round(self.seconds, 1), "memory": memory}
            _print({"num_updates": number, **shown, **time_and_memory})
        self._move_bar(number, f"loss {self.loss:.3f}, {self.speed:,.0f} tokens/s, {memory}")
        curves = {f"train/{name}": value for name, value in shown.items()}
        self._write(curves | {"train/memory": used}, number)

    def validated(self, number: int, loss: float, tokens: int) -> None:
        """Records the mean validation ``loss`` of ``tokens`` tokens, after ``number`` updates."""
        self.valid_loss, self.samples = loss, tokens
        loss, ppl = round(loss, 4), perplexity(loss)
        if self._json:
            _print({"num_updates": number, "valid_loss": loss, "valid_ppl": ppl})
        else:
            line = f"update {number}: validation loss {loss:.4f}, perplexity {ppl}"
            self._console.print(line, highlight=False, soft_wrap=True)
        self._write({"valid/loss": loss, "valid/ppl": ppl}, number)
        self._then = time.perf_counter()  # does not count the validation in the speed

    @property
    def result(self) -> str:
        return f"{self.valid_loss:.4f} (perplexity {perplexity(self.valid_loss)})"

    def compare(self, again: dict[str, Any], dtype: str) -> tuple[str, str]:
        """Returns the result of plain torch, and the difference if the results do not agree.

        Results agree if they differ only by rounding to ``dtype``, that of the sharded model.
        """
        loss = again["loss"]
        rounding = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 2e-2}[dtype]
        difference = ""
        if abs(loss - self.valid_loss) > rounding * max(1, self.valid_loss):
            difference = (
                f"the sharded model's loss is {self.valid_loss}, the consolidated one's {loss}"
            )
        return f"{loss:.4f}", difference


def _print(shown: dict[str, object]) -> None:
    known = {k: v if v not in (math.inf, -math.inf) and v == v else None for k, v in shown.items()}
    print(json.dumps(known), flush=True)
