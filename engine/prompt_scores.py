"""Scores the tokens of a prompt whose log-probabilities were asked for, step by step."""

import torch

from tieredkv.engine.sampler import score
from tieredkv.engine.step_buffers import StepOutput
from tieredkv.engine.step_plan import ScheduledRow
from tieredkv.kernels.small_copies import to_device


def score_prompt(scheduled: list[ScheduledRow], output: StepOutput) -> StepOutput:
    """Score the one prompt that is scored in a step, and return the output of the other rows."""
    index = next(i for i, each in enumerate(scheduled) if each.row.all_logits)
    request, row = scheduled[index]
    start, end = row.start, row.context_len
    first = sum(each.row.needs_logits for each in scheduled[:index])
    last = first + end - start
    logits = output.logits[first:last]
    token_ids = to_device(request.token_ids[start + 1 : end + 1], torch.int64, logits.device)
    if not start:  # a preempted request starts again
        request.prompt_scores.clear()
    counts = [request.asked.prompt_logprobs or 0] * (end - start)
    request.prompt_scores.append(score(logits, token_ids, counts))
    others = [*range(first), *range(last, len(output.logits))]
    at = to_device(others, torch.int64, logits.device)
    return StepOutput(*(part[at] for part in output))
