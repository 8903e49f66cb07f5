"""Training by updates, as of language models: flags as in fairseq, and what rank 0 shows."""

import json
import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from absl import flags
from common import checkpoints  # noqa: F401  # whose flag gets another name
from common.meters import memory_in_use, open_curves, open_profile, perplexity, start_bar
from common.schedules import SMALLEST, warm_up
from common.script import DEFINE_number, Stop, require
from rich.console import Console
from torch.amp import GradScaler
from torch.optim import Optimizer

flags.DEFINE_integer("batch_size", 8, "sequences a rank and micro-batch", lower_bound=1)
flags.DEFINE_integer("update_freq", 1, "micro-batches of an update", lower_bound=1)
flags.DEFINE_integer("max_update", None, "updates in all", lower_bound=1)
DEFINE_number("lr", None, "rate after the warm-up", "(0, inf)")
flags.DEFINE_integer("warmup_updates", None, "updates up to that rate", lower_bound=0)
flags.DEFINE_integer("total_num_update", None, "when the rate is lowest; default: max_update", 1)
DEFINE_number("end_learning_rate", 0.0, "the rate then", "[0, inf)")
DEFINE_number("power", 1.0, "of the decay: 1 is linear", "(0, inf)")
flags.DEFINE_string("adam_betas", "(0.9, 0.98)", "of AdamW")
DEFINE_number("weight_decay", 0.0, "of AdamW", "[0, inf)")
DEFINE_number("clip_norm", 1.0, "largest norm of the gradient; 0: any", "[0, inf]")
flags.DEFINE_integer("validate_interval_updates", 100, "updates between validations", 1)
flags.DEFINE_integer("save_interval_updates", 100, "updates between checkpoints", lower_bound=1)
flags.DEFINE_string("ckpt_dir", None, "folder of the checkpoints, shared by all hosts")
flags.DEFINE_alias("resume_update", "resume_epoch")
flags.DEFINE_alias("log_interval", "log_steps")
flags.DEFINE_enum("log_format", None, ["bar", "json"], "default: a bar on a terminal, else json")
SMALLEST_SCALE = 1e-4  # fairseq's min_loss_scale: gradients are not finite whatever it is


def betas(text: str) -> tuple[float, ...]:
    """Those of ``--adam_betas``."""
    return tuple(float(beta) for beta in text.strip("() ").split(","))


def _are_betas(text: str) -> bool:
    try:
        return len(betas(text)) == 2 and all(0 <= beta < 1 for beta in betas(text))
    except ValueError:
        return False


require("adam_betas", _are_betas, "must be two numbers from 0 to below 1: '(0.9, 0.98)'")


def polynomial(step: int, warmup: int, total: int, power: float, end: float) -> float:
    """Up to 1 in ``warmup`` steps, then down to ``end``, by a ``power`` of what is left."""
    if step < warmup:
        return warm_up(step, warmup)
    left = max(0.0, (total - step) / max(1, total - warmup))
    return max(SMALLEST, end + (1 - end) * left**power)


def decay(options: SimpleNamespace) -> Callable[[int], float]:
    """The same, of the flags."""
    how = {"warmup": options.warmup_updates, "total": options.total_num_update}
    how |= {"power": options.power, "end": options.end_learning_rate / options.lr}
    return partial(polynomial, **how)


class Updates:
    """Loss, speed, norms of updates 1 to ``options.max_update``, of all ranks together.

    ``tokens``: of an update. ``loss``, in nats a token, is that of the last update shown.
    """

    def __init__(self, options: SimpleNamespace, tokens: int) -> None:
        import torch_xla.runtime as xr

        self.rank, self.world_size, self.tokens = xr.global_ordinal(), xr.world_size(), tokens
        self.every, self.last = options.log_steps, options.max_update
        self.loss: float | None = None
        self.valid_loss, self.valid_tokens = math.nan, 0
        self.seconds = self.speed = 0.0
        show = self.rank == 0 and not options.plan
        self._console = Console(stderr=True, quiet=not show)
        terminal = self._console.is_terminal
        self._json = show and (options.log_format or ("bar" if terminal else "json")) == "json"
        self._bar = None
        if show and terminal and not self._json:
            self._bar = start_bar(self._console, "update", self.last, "compiling")
        self._writer = open_curves(options, show)
        self._profile = open_profile(options)
        self._start = self._then = time.perf_counter()
        self._done: int | None = None

    def update(
        self, number: int, loss: torch.Tensor, norm: torch.Tensor, optimizer: Optimizer,
        scaler: GradScaler | None = None,
    ) -> None:  # fmt: skip
        """Was traced: the mean loss of this rank, the norm of all gradients."""
        import torch_xla.core.xla_model as xm

        mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach().float(), scale=1 / self.world_size)
        # Kept in every update, shown or not: with one result more it would be another program.
        self._now = torch.stack([mean.reshape(()), norm.detach().float().reshape(())])
        self._done = number - 1 if self._done is None else self._done
        if number % self.every == 0 or number == self.last:
            rate = optimizer.param_groups[0]["lr"]
            scale = scaler.get_scale() if scaler and scaler.is_enabled() else None
            # Called once the step has run: to look at the loss here would cut the step in two.
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
        shown = {"num_updates": number, "loss": round(self.loss, 4), "ppl": perplexity(self.loss)}
        shown |= {"wps": round(self.speed), "gnorm": float(f"{norm:.4g}"), "lr": rate}
        shown |= {} if scale is None else {"loss_scale": scale}
        if self._json:
            _print({**shown, "wall": round(self.seconds, 1), "memory": memory})
        if self._bar is not None:
            status = f"loss {self.loss:.3f}, {self.speed:,.0f} tokens/s, {memory}"
            self._bar.update(0, completed=number, refresh=True, status=status)
        self._write({**shown, "memory": used}, "train", number)

    def validated(self, number: int, loss: float, tokens: int) -> None:
        """``loss`` in the mean of so many tokens, after so many updates."""
        self.valid_loss, self.valid_tokens = loss, tokens
        shown = {"num_updates": number, "valid_loss": round(loss, 4), "valid_ppl": perplexity(loss)}
        if self._json:
            _print(shown)
        else:
            line = f"update {number}: validation loss {loss:.4f}, perplexity {perplexity(loss)}"
            self._console.print(line, highlight=False, soft_wrap=True)
        self._write(shown, "valid", number)
        self._then = time.perf_counter()  # the next updates were not slower for it

    def _write(self, curves: dict[str, float], kind: str, number: int) -> None:
        if self._writer is not None:
            for name, value in curves.items():
                if name != "num_updates":
                    self._writer.add_scalar(f"{kind}/{name.removeprefix('valid_')}", value, number)

    def __enter__(self) -> "Updates":
        if self._profile is not None:
            self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._profile.__exit__(*error)
        if self._bar is not None:
            self._bar.stop()
        if self._writer is not None:
            self._writer.close()


def _print(shown: dict[str, object]) -> None:
    known = {k: v if v not in (math.inf, -math.inf) and v == v else None for k, v in shown.items()}
    print(json.dumps(known), flush=True)
