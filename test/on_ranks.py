"""Tests that are a function of a rank, or run in a process without ranks."""

import inspect

import pytest


def slow(*values):
    """A row of parameters that ``make test-slow`` has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def only_full(*values):
    """A row of parameters that ``make test-all`` has."""
    return pytest.param(*values, marks=pytest.mark.full)


def raises(error, match, call, *args, **options):
    """``call(*args, **options)`` raises ``error`` with a text that matches."""
    with pytest.raises(error, match=match):
        call(*args, **options)


def on_each_rank(size=None, timeout=600):
    """Decorates ``test_...(rank, ...)``: ``size`` ranks run it with the test's other parameters.

    Without ``size``, the test's parameter ``ranks`` says how many. A function with the parameters
    ``size`` and ``folder`` gets that number, and a folder that the ranks share.
    """

    def as_test(function):
        names = list(inspect.signature(function).parameters)[1:]

        def test(run_ranks, **values):
            count = size or values.pop("ranks")
            if "size" in names:
                values["size"] = count
            if "folder" in names:
                values["folder"] = str(values.pop("tmp_path"))
            run_ranks(_call_on_rank, count, test, values, timeout=timeout)

        fixtures = ["tmp_path" if name == "folder" else name for name in names if name != "size"]
        return _as_test(test, function, ["run_ranks", *fixtures, *([] if size else ["ranks"])])

    return as_test


def finish_step(optimizer):
    """What a training step does after its backward."""
    import torch_xla

    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()


def without_ranks(function):
    """Decorates a test that runs in a process without ranks."""

    def test(elsewhere, **values):
        elsewhere(_call, test, values)

    return _as_test(test, function, ["elsewhere", *inspect.signature(function).parameters])


def _as_test(test, function, fixtures):
    kind = inspect.Parameter.KEYWORD_ONLY
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in fixtures])
    test.__module__, test.__doc__ = function.__module__, function.__doc__
    test.__name__ = test.__qualname__ = function.__name__  # other processes find it by its name
    test.function = function
    return test


def _call(test, values):
    test.function(**values)


def _call_on_rank(rank, test, values):
    test.function(rank, **values)
