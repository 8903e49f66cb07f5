"""The hosts of ray_train.py as Ray actors: the only file here that needs Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
import ray_host
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_host import LOST, Host, Polled

if TYPE_CHECKING:
    from ray_train import Plan

# Send the source of this module to the actors: their hosts need not have this folder.
ray.cloudpickle.register_pickle_by_value(ray_host)

# Seconds without an answer after which a host counts as lost.
SILENCE = 60.0


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


@ray.remote(num_cpus=0)
def _this_slice() -> str:
    import ray.util.tpu

    return ray.util.tpu.get_current_pod_name()


def _slice_name(head_resource: str) -> str:
    """Waits for a slice whose first host is free, and returns its name in Ray."""
    print(f"ray_train.py: waiting for a slice with {head_resource}", flush=True)
    return ray.get(_this_slice.options(resources={head_resource: 1}).remote())
