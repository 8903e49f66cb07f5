"""Operators that ranks are the first to run, all at the same time."""

import random
import sys
import threading

import torch
from on_ranks import without_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from xla_fsdp.ranks.cpu.operators import look_up_operators


class Seen(Exception):
    pass


class Stop(TorchDispatchMode):
    def __torch_dispatch__(self, *args, **kwargs):
        raise Seen


def calls_of_operators():
    """Functions of torch with arguments that their operator's schema takes."""
    one = torch.ones(1)
    values = {"Tensor": one, "int": 1, "SymInt": 1, "float": 1.0, "number": 1, "bool": True}
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        function = getattr(torch, packet, None) or getattr(torch.Tensor, packet, None)
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{packet}"):
            needed = [a for a in schema.arguments if not a.has_default_value()]
            given = {a.name: values.get(str(a.type)) for a in needed}
            if function and schema.overload_name == overload and None not in given.values():
                args = [given.pop(a.name) for a in needed if not a.kwarg_only]
                found.append((function, args, given))
    random.Random(0).shuffle(found)
    return found


def called_at_the_same_time(look_up=True):
    """Four threads call each operator at the same moment; returns what torch raised."""
    if look_up:
        look_up_operators()
    calls = calls_of_operators()
    barrier, failed = threading.Barrier(4), []

    def call():
        with torch.no_grad(), Stop():
            for function, args, given in calls:
                barrier.wait()
                try:
                    function(*args, **given)
                except Seen:
                    pass
                except Exception as error:
                    failed.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) > 400
    return [one for one in failed if "interpreter" in one]


@without_ranks
def test_every_rank_finds_operators():
    assert called_at_the_same_time() == []
