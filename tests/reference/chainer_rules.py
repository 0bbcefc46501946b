"""What Chainer's records come to without its defects, computed from what each case was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Content = Mapping[str, Any]


def events_of_applied_updates(content: Content, path: str) -> list[Any]:
    """Give the hooks of an update with the count of applied updates; a skipped update calls none."""
    number = int(path.split(".")[1])
    events = content["steps"][number]["events"]
    if _was_skipped(content["steps"][number]):
        return []
    before = num_applied_updates(content, f"steps.{number}.t") - 1
    return [[hook, owner, before + ("post" in hook)] for hook, owner, _ in events]


def num_applied_updates(content: Content, path: str) -> int:
    """Count the applied updates up to a step."""
    return sum(not _was_skipped(step) for step in content["steps"][: int(path.split(".")[1]) + 1])


def _was_skipped(step: Content) -> bool:
    return not any(hook == "rule_pre" for hook, *_ in step["events"])


def rate_at_resume(content: Content, _path: str) -> Any:
    """Give the rate of a resumed schedule: the one there was when it was saved."""
    resumed = content["resume_after_calls"]
    recorded = content["lr_after_resume_initialize"]
    return recorded if resumed is None else _recorded_if_close(recorded, _rate(content, resumed))


def scheduled_rate(content: Content, path: str) -> Any:
    """Give the rate after a number of calls, whether resumed or not."""
    count = int(path.split(".")[1])
    return _recorded_if_close(content["lr_after_initialize_then_each_call"][count], _rate(content, count))


def _rate(content: Content, count: int) -> float:
    options, before = content["kwargs"], content["lr_before"]
    if content["extension"] == "WarmupShift":
        start = before if options["warmup_start"] is None else options["warmup_start"]
        done = min(count / options["warmup_iter"], 1.0)
        return float(start + done * (options["init"] - start))
    base = before if options["init"] is None else options["init"]
    return float(base * options["gamma"] ** sum(count >= milestone for milestone in options["step_value"]))


def checked_when_due(content: Content, path: str) -> Any:
    """Give what early stopping fires and has, if a check is made when it is due, also at the limit."""
    options = content["kwargs"]
    is_max = options["mode"] == "max" or (options["mode"] == "auto" and "accuracy" in options["monitor"])
    best, count = float("-inf" if is_max else "inf"), 0
    values: list[float] = []
    results = []
    for calls, value in _calls(content):
        fired = None
        if calls is not None:
            values += [] if value is None else [value]
            fired = _completes(content, options["max_trigger"], calls)
            if value is not None and _completes(content, options["check_trigger"], calls):
                mean, values = _mean(values), []
                is_better = mean > best if is_max else mean < best
                best, count = (mean, 0) if is_better else (best, count + 1)
                fired = fired or count >= options["patience"]
        results.append((fired, {"best": best, "count": count}))
    return _result(content, path, results)


def best_but_not_nan(content: Content, path: str) -> Any:
    """Give what a trigger for the best value fires and has, if NaN is never the best."""
    (_, interval), is_max = content["args"], content["trigger"] == "MaxValueTrigger"
    best: float | None = None
    values: list[float] = []
    results = []
    for calls, value in _calls(content):
        fired = None
        if calls is not None:
            values += [] if value is None else [value]
            fired = False
            if _completes(content, interval, calls):
                mean, values = _mean(values), []
                fired = not math.isnan(mean) and (best is None or (mean > best if is_max else mean < best))
                best = mean if fired else best
        results.append((fired, {"_best_value": best}))
    return _result(content, path, results)


def fires_at_exact_positions(content: Content, path: str) -> Any:
    """Give what an interval fires, if positions are compared as exact numbers."""
    called = [calls for calls, _ in _calls(content)]
    results = [(None if calls is None else _completes(content, content["args"], calls), {}) for calls in called]
    return _result(content, path, results)


def _calls(content: Content) -> Sequence[tuple[tuple[int, int] | None, float | None]]:
    """List for each iteration that of the last call and itself, or None where there is no call; and the value."""
    every, recorded = content["called_every"], content.get("values", [None] * len(content["fired"]))
    values = [None if value is None else float(value) for value in recorded]
    iterations = range(1, len(content["fired"]) + 1)
    called = [None if now % every else (now - every, now) for now in iterations]
    return list(zip(called, values, strict=True))


def _completes(content: Content, interval: Sequence[Any], calls: tuple[int, int]) -> bool:
    """Return whether a period ends between two calls."""
    period, unit = interval
    per_epoch = 1 if unit == "iteration" else Fraction(str(content["iters_per_epoch"]))
    before, now = (Fraction(call) / per_epoch // Fraction(str(period)) for call in calls)
    return bool(before != now)


def _mean(values: Sequence[float]) -> float:
    """Return the mean; infinities of both signs have none."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def _result(content: Content, path: str, results: Sequence[tuple[Any, Mapping[str, Any]]]) -> Any:
    """Find what a path asks for: ``fired.<index>`` or ``attrs.<index>.<name>``."""
    kind, index, *name = path.split(".")
    fired, attributes = results[int(index)]
    if kind == "fired":
        return fired
    value = attributes[name[0]]
    # As it is recorded.
    value = str(value) if value in (math.inf, -math.inf) else value
    return _recorded_if_close(content["attrs"][int(index)][name[0]], value)


def _recorded_if_close(recorded: Any, value: Any) -> Any:
    """Return what is recorded if only roundings differ: the original adds and multiplies step by step."""
    both = isinstance(recorded, float) and isinstance(value, float)
    return recorded if both and math.isclose(recorded, value, rel_tol=1e-12) else value


def steps_without_memory(content: Content, path: str) -> list[Any]:
    """Give the weights or velocities, if no velocity outlives a momentum of 0."""
    field = path.split(".")[1]
    name, (lr, momentum) = field[-1], (content["lr"], content["momentum"])
    has_rate = content["optimizer"] == "MomentumSGD"
    weights, velocities = list(content[f"init_{name}"]["data"]), [0.0] * len(content[f"init_{name}"]["data"])
    found = []
    for updated, grads in zip(content["steps"]["rules_updated"], content[f"grad_{name}_unscaled"], strict=True):
        if updated:
            moves = [-(lr if has_rate else 1.0) * float(grad) for grad in grads]
            kept = [momentum * old if momentum else 0.0 for old in velocities]
            velocities = [old + move for old, move in zip(kept, moves, strict=True)]
            steps = [(1.0 if has_rate else lr) * velocity for velocity in velocities]
            weights = [weight + step for weight, step in zip(weights, steps, strict=True)]
        found.append(list(velocities if field.startswith("v_") else weights))
    return found


CHAINER_RULES: Sequence[Callable[[Content, str], Any]] = (
    events_of_applied_updates,
    num_applied_updates,
    rate_at_resume,
    scheduled_rate,
    checked_when_due,
    best_but_not_nan,
    fires_at_exact_positions,
    steps_without_memory,
)
