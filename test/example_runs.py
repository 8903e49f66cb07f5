"""Reads what examples end with: a table, and curves."""

import re


def table(done):
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^│ (.+?) +│ (.*?) +│$", done.stdout, flags=re.MULTILINE))


def curve(folder, name):
    """A TensorBoard curve: values by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}
