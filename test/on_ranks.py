"""Tests that are a function of a rank."""


def on_ranks(size):
    """Decorates ``test_...(rank, size, folder)``: ``size`` ranks run it, and share ``folder``."""

    def as_test(function):
        def test(run_ranks, tmp_path):
            run_ranks(function, size, size, str(tmp_path))

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return as_test
