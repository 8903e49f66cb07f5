"""The figures as a markdown table."""

from __future__ import annotations

MB = 1 / 2**20

# label, how to get it from a lane's figures, decimals
ROWS = [
    ("step time, ms", lambda f: f["step_ms"], 0),
    ("host tracing a step as on a TPU, CPU ms", lambda f: f["trace_ms"], 1),
    ("host tracing a step inside the launch, CPU ms a rank", lambda f: f["launch_trace_ms"], 1),
    ("peak memory of the step program, MiB a rank", lambda f: f["program_bytes"] * MB, 1),
    ("of which temporaries, MiB a rank", lambda f: f["temp_bytes"] * MB, 1),
    (
        "peak resident memory above idle, MiB all ranks",
        lambda f: (f["peak_rss_bytes"] - f["idle_rss_bytes"]) * MB,
        1,
    ),
    ("wire bytes a step, as traced, MB a rank", lambda f: f["traced_wire_bytes"] / 1e6, 2),
    ("wire bytes a step, as compiled for CPU, MB a rank", lambda f: f["wire_bytes"] / 1e6, 2),
    ("all-gathers a step", lambda f: f["collectives"]["all-gather"], 0),
    ("reduce-scatters a step", lambda f: f["collectives"]["reduce-scatter"], 0),
    ("all-reduces a step", lambda f: f["collectives"]["all-reduce"], 0),
    ("instructions traced a step", lambda f: f["traced_instructions"], 0),
    ("compile time, s", lambda f: f["compile_s"], 1),
    ("executables of the step over all ranks", lambda f: f["step_executables"], 0),
]


def markdown(ours: dict, in_tree: dict) -> str:
    """Ours, in-tree and their ratio; below 1 is better in every row."""
    lines = ["| | ours | in-tree | ratio |", "|---|---:|---:|---:|"]
    for label, get, decimals in ROWS:
        a, b = get(ours), get(in_tree)
        ratio = f"{a / b:.2f}" if b else "-"
        lines.append(f"| {label} | {a:.{decimals}f} | {b:.{decimals}f} | {ratio} |")
    return "\n".join(lines)
