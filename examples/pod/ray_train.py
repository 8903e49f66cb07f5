"""Starts an example on every host of a TPU slice through Ray, and ends it everywhere if one fails.

    python examples/pod/ray_train.py --slice=v4-32 -- \\
        .venv/bin/python examples/train_vit.py --fake_data --ckpt_dir=gs://bucket/vit --resume
    python examples/pod/ray_train.py --slice=v4-32 --dry_run -- ...     # prints the request to Ray
    python examples/pod/ray_train.py --cpu_hosts=2 -- ...               # hosts without TPUs

One actor on each host reserves all chips of the host and runs COMMAND in ``--cwd``, a copy of the
checkout; COMMAND starts the ranks. All chips come from one slice: in Ray every TPU host has the
resource "TPU" (its chips) and one with the name of its slice, and the first host of a slice has
"TPU-<slice>-head" (ray._private.accelerators.tpu, and "TPU" under "Accelerator Support" in Ray's
documentation). Each line of output begins with the number of its host.

If a host fails, is lost, or ends with code 75 because its machine is preempted, all others are
ended. With ``--max_restarts`` all are started again, on any slice that is free, after 10, 20, 40
... at most 300 seconds, and COMMAND must resume from its checkpoint. Exit code: 0, or COMMAND's on
the first host that failed, 1 for a lost host, 2 for wrong usage, which is never started again.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import ray_host
from ray_host import LOST, Host, Polled

from xla_fsdp.tpu.topology import resolve

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:  # --dry_run needs none
    ray = None
else:
    # Send the source of this module to the actors: their hosts need not have this folder.
    ray.cloudpickle.register_pickle_by_value(ray_host)

# Seconds without an answer after which a host counts as lost.
SILENCE = 60.0


@dataclass(frozen=True)
class Plan:
    """The resources to request from Ray, and the command to run.

    ``slice``: an accelerator type, or "" for hosts without TPUs. ``hosts``: the number of hosts,
    each with an actor. ``chips``: the chips of each host. ``command``, ``environment``, ``cwd``:
    the command for every host.
    """

    slice: str
    hosts: int
    chips: int
    command: tuple[str, ...]
    environment: dict[str, str]
    cwd: str | None = None

    @property
    def head_resource(self) -> str:
        """The resource that only the first host of such a slice has."""
        return f"TPU-{self.slice}-head"

    def bundles(self, slice_name: str = "") -> list[dict[str, float]]:
        """The placement group: the resources of each host, on the slice of this name in Ray."""
        if not self.slice:
            return [{"CPU": 1}] * self.hosts
        return [{"CPU": 1, "TPU": self.chips, slice_name: 1}] * self.hosts


class RayHosts:
    """One actor on each host of a slice, which runs the plan's command; the context ends them."""

    def __init__(self, plan: Plan) -> None:
        name = _slice_name(plan.head_resource) if plan.slice else ""
        self._group = placement_group(plan.bundles(name), strategy="STRICT_SPREAD")
        print(f"ray_train.py: waiting for {plan.hosts} hosts {name}".rstrip(), flush=True)
        ray.get(self._group.ready())
        self._actors = [self._actor(plan, index) for index in range(plan.hosts)]

    def _actor(self, plan: Plan, index: int) -> ray.actor.ActorHandle:
        options = ray.remote(Host).options(
            num_cpus=1,
            resources={"TPU": plan.chips} if plan.chips else None,
            max_concurrency=2,  # so that stop works while a poll waits
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
        )
        return options.remote(plan.command, plan.environment | {"POD_HOST": str(index)}, plan.cwd)

    def poll(self, indices: Sequence[int]) -> dict[int, Polled]:
        """Polls every host; the code of a host that does not answer is ``LOST``."""
        asked = {index: self._actors[index].poll.remote() for index in indices}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=SILENCE)
        return {index: _answer(reference) for index, reference in asked.items()}

    def stop(self, indices: Sequence[int]) -> None:
        """Ends the command on these hosts, if they still answer."""
        stopping = [self._actors[index].stop.remote() for index in indices]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=SILENCE)

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def _answer(reference: ray.ObjectRef) -> Polled:
    try:
        return ray.get(reference, timeout=1.0)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        return Polled([str(error).splitlines()[0]], LOST)


def _slice_name(head_resource: str) -> str:
    """Waits for a slice whose first host is free, and returns its name in Ray."""
    print(f"ray_train.py: waiting for a slice with {head_resource}", flush=True)
    ask = ray.remote(num_cpus=0, resources={head_resource: 1})(_this_slice)
    return ray.get(ask.remote())


def _this_slice() -> str:
    import ray.util.tpu

    return ray.util.tpu.get_current_pod_name()


def watch(hosts: RayHosts, count: int, show: Callable[[str], None] = print) -> int:
    """Shows the output of ``count`` hosts until all have ended; returns the exit code of the run.

    The first failure ends the other hosts, which would otherwise wait in a collective.
    """
    running = list(range(count))
    try:
        while running:
            for index, polled in sorted(hosts.poll(running).items()):
                for line in polled.lines:
                    show(f"[host {index}] {line}")
                if polled.code is None:
                    continue
                running.remove(index)
                if polled.code != 0:
                    what = "is lost" if polled.code == LOST else f"exited with {polled.code}"
                    show(f"ray_train.py: host {index} {what}; stopping the others")
                    return 1 if polled.code < 0 else polled.code
        return 0
    finally:
        hosts.stop(running)


def unreachable(address: str) -> str:
    """Why ``address``, such as ``10.0.0.2:6379``, cannot be reached; "" if a connection may work.

    Ray itself would try for two minutes, print many lines, and then abort the process.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return ""  # auto: Ray finds the cluster
    if not port.isdecimal():
        return "it must be HOST:PORT, or auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        return f"no Ray cluster can be reached there: {error}"
    return ""


def run(plan: Plan, address: str, max_restarts: int, back_off: float = 10.0) -> int:
    """Runs ``plan`` on the Ray cluster at ``address``; returns the exit code.

    It waits ``back_off`` seconds before a restart, and twice as long before each further one, up to
    300 seconds.
    """
    if ray is None:
        return _fail("Ray is not installed here; pip install 'ray>=2.9'")
    if reason := unreachable(address):
        return _fail(f"--address={address}: {reason}")
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        return _fail(f"--address={address}: {' '.join(str(error).split())}")
    try:
        for attempt in range(max_restarts + 1):
            if attempt:
                pause = min(back_off * 2 ** (attempt - 1), 300.0)
                print(
                    f"ray_train.py: starting again in {pause:g} s, {attempt} of {max_restarts}",
                    flush=True,
                )
                time.sleep(pause)
            with RayHosts(plan) as hosts:
                code = watch(hosts, plan.hosts, lambda line: print(line, flush=True))
            if code in (0, 2):
                break
        return code
    finally:
        ray.shutdown()


def parse(arguments: list[str]) -> tuple[Plan, argparse.Namespace]:
    """Parses the command line. Exits with code 2 and one line if it is wrong."""
    own, command = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, command = arguments[:at], arguments[at + 1 :]
    parser = _Parser(prog="ray_train.py", usage="ray_train.py [OPTIONS] -- COMMAND...")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--slice", help="such as v4-32: one actor on each of its hosts")
    where.add_argument("--cpu_hosts", type=int, help="number of hosts without TPUs")
    parser.add_argument("--address", default="auto", help="of the Ray cluster; default: auto")
    parser.add_argument("--cwd", help="folder to run in, the same on every host")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--max_restarts", type=int, default=0, help="restarts after failures; default: 0"
    )
    parser.add_argument("--back_off", type=float, default=10.0, help="seconds before a restart")
    parser.add_argument("--dry_run", action="store_true", help="print the plan, run nothing")
    options = parser.parse_args(own)
    if not command:
        parser.error("no command given; it goes after --")
    if options.max_restarts < 0:
        parser.error(f"--max_restarts must be at least 0, got {options.max_restarts}")
    if not 0 <= options.back_off < float("inf"):
        parser.error(f"--back_off must be a number of seconds, got {options.back_off}")
    if wrong := [text for text in options.env if not text.partition("=")[0] or "=" not in text]:
        parser.error(f"--env must be NAME=VALUE, got {wrong[0]!r}")
    environment = dict(text.split("=", 1) for text in options.env)
    if options.slice is None:
        if options.cpu_hosts < 1:
            parser.error(f"--cpu_hosts must be at least 1, got {options.cpu_hosts}")
        environment.setdefault("PJRT_DEVICE", "CPU")
        name, hosts, chips = "", options.cpu_hosts, 0
    else:
        try:
            slice = resolve(options.slice)
        except ValueError as error:
            parser.error(f"--slice: {error}")
        if slice.count > 1:
            parser.error(
                f"--slice must be a single slice, got {slice.name!r}; tpu_vm.sh supports several"
            )
        name, hosts, chips = slice.name, slice.hosts, prod(slice.chips_per_host)
        if ":" in name:
            parser.error(f"--slice must be an accelerator type, such as v4-32, got {name!r}")
        environment.setdefault("PJRT_DEVICE", "TPU")
    return Plan(name, hosts, chips, tuple(command), environment, options.cwd), options


def describe(plan: Plan) -> str:
    """Returns the text of the plan, for --dry_run."""
    lines = [f"actors: {plan.hosts}, one a host (placement group, STRICT_SPREAD)"]
    if plan.slice:
        lines.append(f"slice: the one whose first host has {{'{plan.head_resource}': 1}}")
    lines.append(f"each host: {plan.bundles('<name of the slice>')[0]}")
    lines += [f"environment: {name}={value}" for name, value in sorted(plan.environment.items())]
    lines += [f"folder: {plan.cwd}"] if plan.cwd else []
    return "\n".join([*lines, f"command: {shlex.join(plan.command)}"])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        sys.exit(_fail(f"{message} (--help lists the options)"))


def _fail(message: str) -> int:
    print(f"ray_train.py: {message}", file=sys.stderr)
    return 2


def main(arguments: list[str]) -> int:
    plan, options = parse(arguments)
    if options.dry_run:
        print(describe(plan))
        return 0
    # If this process is ended, it also ends the hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(plan, options.address, options.max_restarts, options.back_off)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
