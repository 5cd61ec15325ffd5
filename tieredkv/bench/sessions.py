"""`bench sessions`: agents that wait for each answer, think, and go on (closed loop).

Every session is a script that follows from a seed. Its first prompt has a log-normal number of
tokens, of which the first may be those of all sessions, as agents of one program share its system
prompt; each turn then adds the script's answer and some new tokens, and one turn in eight first
replaces the last third of the conversation. What the model answers is measured and thrown away, so
that all arms do the same turns. A conversation that would grow too long loses its last third.

A run begins with empty tiers and ends when the first session does, or the last one; runs of several
seeds are pooled. `common` has the times over the requests that all arms have answered, since an arm
that answers more of them answers later and longer ones. With a trace, the sessions are recorded
ones instead.

Runs are kept in a file as they end, see `kept_runs`. Of a number of sessions, those seeds are
pooled that all arms have run.

Since tiers are empty at first, nothing that an earlier run left behind can serve a request, and
`by_tier` shows what came from VRAM, host memory and disk. To show that the page cache served
nothing, the report complains if `bytes_from_disk`, the bytes that the kernel read from storage for
the worker, are less than 0.95 times `bytes_read`, unless `page_cache` is `warm`.

The arms are `no_disk` (VRAM and host memory only), `load` and `planned` (the disk tier with
`restore = "load"` and `"auto"`). Each has a process and a store of its own.
"""

import itertools
import math
import random
import statistics
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tieredkv.bench import crowd, crowd_figures, raw
from tieredkv.bench.crowd import Answer, Ask, Outcome
from tieredkv.bench.kept_runs import KeptRuns, Run
from tieredkv.bench.progress import bench_progress
from tieredkv.errors import ConfigError
from tieredkv.traces import BLOCK_TOKENS, Request, Trace, read_trace
from tieredkv.types import Progress, Tier, ignore_progress

FIRST_TOKENS, FIRST_SIGMA = 18_000, 0.6
FIRST_RANGE = (8_000, 60_000)
ADDED_TOKENS, ADDED_P90_TOKENS = 600, 6_000
MAX_PROMPT_TOKENS = 72_000
ANSWER_TOKENS = 120
REPLACED_SHARE = 1 / 8
THINK_S, MAX_THINK_S = 1.0, 6.0
P90_SIGMAS = statistics.NormalDist().inv_cdf(0.9)
TRACE_THINK_SHARE = 0.1
TRACE_SESSIONS = 8
TIER_TOKENS: dict[Tier, float] = {Tier.DEVICE: 196_608, Tier.HOST: 131_072}
DISK_TOKENS_PER_SESSION = 40_960
COLUMNS: tuple[str, ...] = ("arm", "sessions", *crowd_figures.COLUMNS, "common.ttft_ms.p50")
PLOTTED = crowd_figures.PLOTTED

Row = dict[str, Any]


class Turn(NamedTuple):
    """One request of a session.

    Attributes:
        think_s: time between the answer before and this request.
        prompt: token ids.
        answer_tokens: length of the answer.
    """

    think_s: float
    prompt: Sequence[int]
    answer_tokens: int


Script = list[Turn]


class Shape(NamedTuple):
    """What sessions look like.

    Attributes:
        turns: requests of a session.
        scale: what all numbers of tokens are divided by.
        trace: file with recorded sessions; None for generated ones.
        first_tokens: median of the first prompts' lengths.
        added_p90_tokens: what nine of ten turns do not exceed in new tokens.
        replaced_share: of the turns, which first replace the last third of the conversation.
        shared_tokens: with which all sessions begin; a shorter first prompt gets one more token.
        until: whose end ends a run, that of the `first` session or of the `last` one.
    """

    turns: int
    scale: float
    trace: Path | None
    first_tokens: int = FIRST_TOKENS
    added_p90_tokens: int = ADDED_P90_TOKENS
    replaced_share: float = REPLACED_SHARE
    shared_tokens: int = 0
    until: str = "first"

    @property
    def workload(self) -> Row:
        """What a report says of the sessions."""
        return self._asdict() | {"trace": self.trace and self.trace.name}

    def scaled(self, num_tokens: float) -> int:
        """Return a number of tokens after division; at least 2, so that an answer has a gap."""
        return max(2, int(num_tokens / self.scale))


def write_script(seed: int, session: int, shape: Shape, vocab_size: int) -> Script:
    """Return a session; it is the same whatever other sessions run beside it."""
    generator = random.Random(f"{seed}/{session}")

    def tokens(count: int, generator: random.Random = generator) -> "array[int]":
        return array("I", generator.choices(range(vocab_size), k=count))

    def log_normal(median: float, sigma: float) -> float:
        return generator.lognormvariate(math.log(median), sigma)

    first = 0.0
    while not FIRST_RANGE[0] <= first <= FIRST_RANGE[1]:
        first = log_normal(shape.first_tokens, FIRST_SIGMA)
    sigma = math.log(shape.added_p90_tokens / ADDED_TOKENS) / P90_SIGMAS
    most, answer_tokens = shape.scaled(MAX_PROMPT_TOKENS) - 1, shape.scaled(ANSWER_TOKENS)
    text, script = tokens(shape.scaled(first)), Script()
    if shape.shared_tokens:
        shared = tokens(shape.scaled(shape.shared_tokens), random.Random(f"{seed}/shared"))
        text = shared + (text[len(shared) :] or text[:1])
    for turn in range(shape.turns):
        think_s = min(MAX_THINK_S, generator.expovariate(1 / THINK_S)) if turn else 0.0
        if turn:
            text = text + tokens(answer_tokens)
            if generator.random() < shape.replaced_share:
                kept = len(text) - len(text) // 3
                text = text[:kept] + tokens(len(text) - kept)
            added = shape.scaled(log_normal(ADDED_TOKENS, sigma))
            if len(text) + added > most:
                text = text[: len(text) - len(text) // 3]
            text = text + tokens(min(added, most - len(text)))
        script.append(Turn(think_s, text, answer_tokens))
    return script


def sessions_of(trace: Trace, turns: int, most_tokens: int) -> Iterator[list[Request]]:
    """Yield the sessions of a trace that have enough turns, in their order, cut to that number.

    A request belongs to the session that its `session` names. Without one, it continues the session
    with which it shares its deepest known block, if it begins with at least half of that one's last
    prompt.

    Args:
        trace: the requests.
        turns: of each session.
        most_tokens: sessions with longer prompts are left out.
    """
    sessions, owner = list[list[Request]](), dict[int, list[Request]]()
    named = dict[object, list[Request]]()
    for request in trace.requests:
        ids, name = request.hash_ids, request.session
        if name is not None:
            session = named.get(name)
        else:
            session = next((owner[each] for each in reversed(ids) if each in owner), None)
            if session is not None and not _continues(ids, session[-1].hash_ids):
                session = None
        if session is None:
            session = []
            sessions.append(session)
        session.append(request)
        if name is not None:
            named[name] = session
        else:
            owner.update(dict.fromkeys(ids, session))
    for session in sessions:
        some = session[:turns]
        if len(some) == turns and max(each.input_length for each in some) <= most_tokens:
            yield some


def _continues(ids: list[int], before: list[int]) -> bool:
    """Return whether a prompt begins with at least half of another one."""
    shared = next(
        (i for i, (one, other) in enumerate(zip(ids, before, strict=False)) if one != other),
        min(len(ids), len(before)),
    )
    return 2 * shared >= len(before)


def replay(recorded: Iterable[Request], seed: int, shape: Shape, vocab_size: int) -> Script:
    """Return a recorded session: think times a tenth, answers of at most 120 tokens."""
    script, before_ms = Script(), None

    def tokens(name: object, count: int) -> list[int]:
        return random.Random(f"{seed}/{name}").choices(range(vocab_size), k=count)

    for request in recorded:
        text, length = array("I"), shape.scaled(request.input_length)
        for each in request.hash_ids:
            text.extend(tokens(each, shape.scaled(request.block_tokens or BLOCK_TOKENS)))
        if request.block_tokens is not None:  # it has no id for what is not a full block
            text.extend(tokens(f"after {request.timestamp}", max(0, length - len(text))))
        pause_ms = request.timestamp - (request.timestamp if before_ms is None else before_ms)
        before_ms = request.timestamp
        think_s = min(MAX_THINK_S, max(0.0, pause_ms / 1e3 * TRACE_THINK_SHARE))
        answer_tokens = shape.scaled(min(ANSWER_TOKENS, request.output_length))
        script.append(Turn(think_s, text[:length], answer_tokens))
    return script


def recorded_sessions(count: int, seed: int, shape: Shape, most_tokens: int) -> list[list[Request]]:
    """Return the recorded sessions of a run; each seed takes others.

    Raises:
        ConfigError: the file is not a trace, or has too few sessions.
    """
    assert shape.trace is not None
    trace = read_trace(shape.trace, ignore_progress)
    known = list(sessions_of(trace, shape.turns, most_tokens))
    some = known[seed * count : (seed + 1) * count]
    if len(some) < count:
        what = f"`{shape.trace}` has {len(known)} sessions of {shape.turns} turns that fit"
        asked = f"{(seed + 1) * count} are needed"
        raise ConfigError(f"{what}, but {asked}; lower --sessions, --seed or --turns")
    return some


def make_scripts(
    count: int, seed: int, shape: Shape, most_tokens: int, vocab_size: int
) -> list[Script]:
    """Return the sessions of a run: generated ones, or those of the trace.

    Raises:
        ConfigError: the trace has too few sessions.
    """
    if shape.trace is None:
        return [write_script(seed, each, shape, vocab_size) for each in range(count)]
    recorded = recorded_sessions(count, seed, shape, most_tokens)
    return [replay(each, seed, shape, vocab_size) for each in recorded]


def measure(
    settings: Row,
    arm: str,
    folder: Path,
    kept: KeptRuns,
    runs: list[Run],
    shape: Shape,
    most_tokens: int,
) -> None:
    """Make those of the runs that are of one arm, in this process, and keep each as it ends."""
    progress = bench_progress()
    with crowd.engine(settings, arm, folder, progress) as it:
        vocab_size = it.core.info.vocab_size
        warm_up = write_script(-1, 0, shape._replace(turns=2, trace=None), vocab_size)
        serve(it, [warm_up], progress, f"{arm}: warming up")
        for run in runs:
            if run.arm != arm:
                continue
            it.empty()
            scripts = make_scripts(run.sessions, run.seed, shape, most_tokens, vocab_size)
            outcome = serve(it, scripts, progress, str(run), shape.until)
            kept.add(run, outcome)
            crowd.tell(str(run), outcome)


def serve(
    it: crowd.Crowd, scripts: list[Script], progress: Progress, stage: str, until: str = "first"
) -> Outcome:
    """Run sessions until the `first` or the `last` one has ended."""
    num_turns = len(scripts[0])
    num_left = 1 if until == "first" else len(scripts)

    def ask(session: int, turn: int, after_s: float) -> Ask:
        think_s, prompt, answer_tokens = scripts[session][turn]
        return Ask(after_s + think_s, session, turn, prompt, answer_tokens)

    def follow(answer: Answer) -> Ask | None:
        progress(stage, min(answer.turn + 1, num_turns - 1), num_turns)
        if answer.turn + 1 == num_turns:
            return None
        return ask(answer.client, answer.turn + 1, answer.ended_s)

    def is_over(answer: Answer) -> bool:
        nonlocal num_left
        num_left -= answer.turn + 1 == num_turns
        return not num_left

    asks = [ask(session, 0, 0.0) for session in range(len(scripts))]
    progress(stage, 0, num_turns)
    try:
        return it.serve(asks, follow, is_over)
    finally:
        progress(stage, 1, 1)


def run(
    _progress: Progress,
    *,
    settings: Row,
    sessions: list[int] | None,
    arms: list[str],
    seeds: list[int],
    runs: Path | None,
    commit: str,
    **options: Any,
) -> Row:
    """Run each arm in a process of its own, which draws its progress itself.

    The file `runs` keeps the runs, of which those that it has are not made again; they are all of
    one commit. The `options` are the fields of `Shape`.

    Raises:
        ConfigError: the prompts do not fit the model, the trace has too few sessions, or the file
            has runs of another kind.
        TieredKVError: a process failed.
    """
    shape = Shape(**options)
    scale, trace = shape.scale, shape.trace
    counts = sessions or ([4, 8, 16, 32] if trace is None else [TRACE_SESSIONS])
    longest = 1 if trace else shape.scaled(MAX_PROMPT_TOKENS) + shape.scaled(ANSWER_TOKENS)
    tokens = {tier: count / scale for tier, count in TIER_TOKENS.items()}
    tokens[Tier.DISK] = max(counts) * DISK_TOKENS_PER_SESSION / scale
    plan = crowd.plan(settings, tokens, longest, "give a larger `--scale`")
    most_tokens = int((plan.most_tokens - shape.scaled(ANSWER_TOKENS)) * scale)
    for count, seed in itertools.product(counts if trace else (), seeds):
        recorded_sessions(count, seed, shape, most_tokens)  # refuses a trace with too few
    facts = {**plan.facts, "workload": shape.workload}
    with tempfile.TemporaryDirectory(prefix="tieredkv-runs-") as folder:
        told = {name: value for name, value in plan.settings.items() if name != "disk_dir"}
        ours = {**facts, "settings": told, "commit": commit, "gpu": raw.hardware()["gpu"]}
        kept = KeptRuns(runs or Path(folder, "runs.jsonl"), ours)
        asked = [Run(*each) for each in itertools.product(arms, counts, seeds)]
        outcomes = make_runs(kept, asked, plan, shape, most_tokens)
    raw_GBps = crowd_figures.raw_rate(outcomes[run] for run in asked if run in outcomes)
    problems = [f"not measured: {run}" for run in asked if run not in outcomes]
    rows = list[Row]()
    for count in counts:
        pooled = [it for it in seeds if all(Run(arm, count, it) in outcomes for arm in arms)]
        if not pooled:
            continue
        by_arm = {arm: [outcomes[Run(arm, count, seed)] for seed in pooled] for arm in arms}
        common = crowd_figures.common_answers(by_arm)
        for arm, some in by_arm.items():
            own_GBps = crowd_figures.raw_rate(some)
            figures = crowd_figures.figures(some, plan.kv_spec, own_GBps)
            row = {"arm": arm, "sessions": count, "seeds": pooled, **figures}
            row |= crowd_figures.common_figures(common[arm])
            row[f"equal_to_{arms[0]}"] = crowd_figures.equal_share(some, by_arm[arms[0]])
            rows.append(row)
            if problem := crowd_figures.bytes_problem(row, plan):
                problems.append(f"{arm} with {count} sessions: {problem}")
    facts["workload"] |= {"seeds": seeds}
    facts["runs"] = [summary(run, outcomes[run]) for run in asked if run in outcomes]
    limits = {"disk_read_GBps": raw_GBps, "h2d_GBps": raw.h2d_GBps()}
    return {**facts, "raw": limits, "rows": rows, "problems": problems}


def make_runs(
    kept: KeptRuns, asked: list[Run], plan: crowd.Plan, shape: Shape, most_tokens: int
) -> dict[Run, Outcome]:
    """Make the runs that are asked for and not kept yet, and return all that are then kept.

    The file is read before the first run and after the last one, as each arm's process adds to it.
    An interruption leaves out what it cut.

    Raises:
        ConfigError: the file is not one of runs, or its runs are of another kind.
        KeyboardInterrupt: no run is kept.
        TieredKVError: a process failed.
    """
    known = kept.read()
    missing = [run for run in asked if run not in known]
    if not missing:
        return known
    arms = list(dict.fromkeys(run.arm for run in missing))
    try:
        crowd.run_arms(plan.settings, arms, measure, kept, missing, shape, most_tokens)
    except KeyboardInterrupt:
        if not (known := kept.read()):
            raise
        return known
    return kept.read()


def summary(run: Run, outcome: Outcome) -> Row:
    """Return what a report says of one run: where it was made, and its main figures."""
    times = crowd_figures.times(outcome.answers)
    return {
        **run._asdict(),
        "cpu": outcome.cpu,
        "raw_GBps": outcome.raw_GBps,
        "answers": len(outcome.answers),
        "answers_per_s": len(outcome.answers) / outcome.wall_s,
        "ttft_ms": times["ttft_ms"],
        "itl_ms": times["itl_ms"],
    }
