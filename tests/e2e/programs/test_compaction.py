"""Programs reach the end of their context, compact their conversation, and go on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.programs.install import path_of
from tests.e2e.programs.recorder import Recorder
from tests.e2e.programs.scripted_model import SMILE, Script, call, write_checkpoint
from tests.e2e.programs.test_programs import BASE, BIN, CODEX, Programs, claude_code
from tests.serving import running

NOTE = "".join(f"This is line {i} of a file that fills the context.\n" for i in range(300))
DONE = f"It went on behind its summary {SMILE}"
SUMMARY = "Here is the summary. Please follow script rest."


@contextmanager
def served(folder: Path, num_tokens: int, scripts: Sequence[Script]) -> Iterator[Programs]:
    """Return what runs programs, with a file to read, against a server with a short context."""
    model = folder / "checkpoint"
    write_checkpoint(model, [*scripts, Script("rest", [DONE])])
    flags = ("--served-model-name", "scripted", "--max-model-len", str(num_tokens))
    with (
        running(folder, *flags, model=str(model), base=BASE, has_disk=False) as server,
        Recorder(server.root) as recorder,
    ):
        for name in ("codex", "claude-code"):
            (folder / name).mkdir()
            (folder / name / "long.txt").write_text(NOTE)
        yield Programs(folder, recorder)


@pytest.mark.clients
def test_codex_compacts_at_the_window_that_it_is_told(tmp_path: Path) -> None:
    num_tokens = 20_000
    read = call("exec_command", cmd="cat long.txt")
    scripts = [Script("long", [read] * 6), Script("summary", [SUMMARY], has_tools=False)]
    with served(tmp_path, num_tokens, scripts) as programs:
        home = tmp_path / "codex-home" / ".codex"
        home.mkdir(parents=True)
        config = CODEX.format(url=programs.url, wire_api="responses")
        (home / "config.toml").write_text(f"model_context_window = {num_tokens}\n{config}")
        asked = "Please follow script long. Without tools, follow script summary."
        may_all = "--dangerously-bypass-approvals-and-sandbox"
        command = [path_of(BIN / "codex"), "exec", "--skip-git-repo-check", may_all, asked]
        run = programs.run("codex", command, {"TIEREDKV_API_KEY": "any"})
    assert run.output.strip() == DONE
    assert {it.status for it in run.exchanges} == {200}
    *before, compacting, after = [it.usage.prompt for it in run.exchanges]
    assert "tools" not in run.exchanges[-2].body or not run.exchanges[-2].body["tools"]
    assert max(before) > 0.85 * num_tokens > after, "the conversation was not compacted"
    assert compacting < num_tokens


@pytest.mark.clients
def test_claude_code_compacts_when_the_server_says_that_the_prompt_is_too_long(
    tmp_path: Path,
) -> None:
    num_tokens = 26_000
    read = call("Bash", command="cat long.txt", description="Read the file")
    asked_by = "Respond with plain text only"
    scripts = [Script("long", [read] * 9), Script("summary", [SUMMARY], asked_by=asked_by)]
    with served(tmp_path, num_tokens, scripts) as programs:
        run = claude_code(programs, "long")
    assert run.output.strip() == DONE
    refused = [it.answer.decode() for it in run.exchanges if it.status != 200]
    assert refused and all("prompt is too long: " in it for it in refused)
    *_, last = run.exchanges
    assert last.status == 200 and last.usage.prompt < num_tokens
