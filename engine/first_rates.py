"""Times steps at the start, for the first plans; what is learnt later is in `step_timer`."""

from tieredkv.engine.model_runner import ModelRunner
from tieredkv.engine.step_timer import StepTimer

MOST_CPU_TOKENS = 64
"""Tokens of the largest step that is timed at the start on a CPU."""


def time_steps(
    runner: ModelRunner, timer: StepTimer, *, most_tokens: int, max_model_len: int, is_cpu: bool
) -> None:
    """Time steps of several sizes and positions.

    Args:
        runner: computes them.
        timer: learns from them.
        most_tokens: tokens of the largest step.
        max_model_len: the longest context.
        is_cpu: whether the device is a CPU, for which smaller steps have to do.
    """
    most_tokens = min(most_tokens, max_model_len, MOST_CPU_TOKENS if is_cpu else most_tokens)
    sizes = sorted({max(1, most_tokens >> shift) for shift in (0, 2, 4, 6)})
    shapes = [(size, 0) for size in sizes]
    shapes.append((sizes[-1], max_model_len - sizes[-1]))
    shapes.append((1, 0))
    for num_tokens, start in shapes:
        row = runner.idle_row(num_tokens, start)
        for teaches in (False, True):  # the first one of its kind may compile something
            timer.begin()
            runner.execute([row])
            timer.end([row], teaches=teaches)
    runner.synchronize()
    timer.poll()
    timer.rate.doubt()
