"""Checks a measurement of tests/gpu/run: prints a figure, and exits with 1 if it is not good enough.

  judge.py losses METRICS EXPECTED TOLERANCE STEPS    largest relative difference of losses and gradient norms, step by step
  judge.py bandwidth LOG PERCENT               kernels bound by memory, as a share of the copy bandwidth
  judge.py speed OURS TORCH FACTOR MFU         tokens per second of both, and the model's FLOP/s as a percentage of the peak
  judge.py graphs WITH WITHOUT FACTOR          tokens per second of both
  judge.py waits TRACE                         the waits of the program within a step, from the trace of watch.so
  judge.py attention LOG FORWARD BACKWARD      the lowest rates at head dimension 128, as percentages of the peak

EXPECTED is another run's metrics, or a fixture's expected.json.
"""

import json
import re
import sys
from pathlib import Path

PEAK_TFLOPS = 989  # of an H100 or H200 in bf16, dense


def steps(path):
    text = Path(path).read_text()
    if path.endswith("expected.json"):
        return json.loads(text)["steps"]
    return [step for step in map(json.loads, text.splitlines()) if "lm_loss" in step]


def losses(ours, theirs, tolerance, count):
    ours, theirs = steps(ours), steps(theirs)[: int(count)]
    if not len(ours) == len(theirs) == int(count):
        return False, f"{len(ours)} steps, {count} expected"

    def worst(key):
        return max(abs(float(a[key]) / float(b[key]) - 1) for a, b in zip(ours, theirs))

    loss, norm = worst("lm_loss"), worst("grad_norm")
    return max(loss, norm) <= float(
        tolerance
    ), f"{len(ours)} steps: losses within {loss:.1e}, gradient norms within {norm:.1e}"


def bandwidth(log, percent):
    text = Path(log).read_text()
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    at = rows[0].index("of copy")
    shares = {
        row[0]: float(row[at].rstrip("%"))
        for row in rows[1:]
        if len(row) > at and row[at].endswith("%")
    }
    copy = re.search(r"copy: (\S+ \S+)", text).group(1).rstrip(",")
    slow = [
        f"{name} {share:.0f}%"
        for name, share in sorted(shares.items(), key=lambda item: item[1])
        if share < float(percent)
    ]
    figure = f"{len(shares) - len(slow)} of {len(shares)} kernels at {percent}% of {copy} or more"
    return not slow, figure + (f"; below: {', '.join(slow)}" if slow else "")


def rates(path):
    text = Path(path).read_text()
    found = [re.findall(rf"{key}=([0-9.]+)", text) for key in ("tokens_per_second", "tflops")]
    return [float(values[-1]) for values in found]


def graphs(ours, without, factor):
    (ours, _), (without, _) = rates(ours), rates(without)
    return ours >= float(
        factor
    ) * without, f"{ours:.0f} tokens/s, without {without:.0f}, {ours / without:.2f}×"


def speed(ours, torch, factor, least_mfu):
    tokens, tflops = rates(ours)
    mfu = 100 * tflops / PEAK_TFLOPS
    figure, good = f"{tokens:.0f} tokens/s, MFU {mfu:.1f}%", mfu >= float(least_mfu)
    if Path(torch).with_suffix(".failed").exists():
        return False, figure + "; PyTorch failed"
    if not Path(torch).exists():
        return good, figure + "; no PyTorch to compare with"
    theirs, _ = rates(torch)
    return good and tokens >= float(
        factor
    ) * theirs, f"{figure}; PyTorch {theirs:.0f} tokens/s, {tokens / theirs:.2f}×"


def attention(log, forward, backward):
    found = re.findall(
        r"\| (\d+) tokens, d 128 \| forward (\d+) TFLOP/s \| backward (\d+) TFLOP/s",
        Path(log).read_text(),
    )
    rates = [(100 * min(float(row[i]) for row in found) / PEAK_TFLOPS) for i in (1, 2)]
    figure = f"forward {rates[0]:.0f}%, backward {rates[1]:.0f}% of {PEAK_TFLOPS} TFLOP/s at {', '.join(row[0] for row in found)} tokens"
    return rates[0] >= float(forward) and rates[1] >= float(backward), figure


def waits(trace):
    """Steps end with the kernel that checks the gradients' norm. Steps from the third on are steady; earlier ones still load code."""
    steps = [[]]
    for line in Path(trace).read_text().splitlines():
        what, name = line.split(" ", 1)
        steps[-1].append((what, name))
        if name == "judge":
            steps.append([])
    steps = steps[2:-1]
    if not steps:
        return False, "the trace has no steady step"
    names = [[name for what, name in step if what == "wait"] for step in steps]
    kernels = [sum(what == "kernel" for what, _ in step) for step in steps]
    # Kernels queued before the step's first wait, which is for the results of the previous step.
    first = [
        next((i for i, (what, _) in enumerate(step) if what == "wait"), len(step)) for step in steps
    ]
    ahead = [sum(what == "kernel" for what, _ in step[:at]) for step, at in zip(steps, first)]
    others = sorted({name for step in names for name in step} - {"cuEventSynchronize"})
    good = not others and all(a >= 0.9 * n for a, n in zip(ahead, kernels))
    figure = f"{len(steps)} steps of {max(kernels)} kernels: {max(map(len, names))} waits for events behind {min(ahead)} of them"
    return good, figure + (f"; also {', '.join(others)}" if others else "")


if __name__ == "__main__":
    judge = {
        "losses": losses,
        "bandwidth": bandwidth,
        "graphs": graphs,
        "speed": speed,
        "attention": attention,
        "waits": waits,
    }[sys.argv[1]]
    try:
        good, figure = judge(*sys.argv[2:])
    except (AttributeError, IndexError, KeyError, OSError, ValueError) as error:
        # The program printed something else, or nothing: its last line says why.
        log = Path(sys.argv[2])
        lines = log.read_text().split("\n") if log.exists() else []
        last = next(
            (line.strip() for line in reversed(lines) if line.strip()), "nothing was printed"
        )
        good, figure = False, f"no result in {log.name}: {last[:200]} ({type(error).__name__})"
    print(figure)
    sys.exit(not good)
