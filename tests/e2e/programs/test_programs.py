"""Programs that people use, each in its own process, against a server whose model is scripted.

Each does a task of several turns: it calls two tools, which read and write a file, and ends with a
structured answer or a text. `make test` runs the packages of its own environment;
`make test-clients` installs all others first and says which it could not install.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.programs.install import ENVIRONMENTS, NODE, path_of
from tests.e2e.programs.recorder import Exchange, Recorder
from tests.e2e.programs.scripted_model import SMILE, Script, call, write_checkpoint
from tests.serving import ask_store, running
from tests.waiting import HANG_S, wait_until

HERE = Path(__file__).parent
BIN = NODE["node"] / "node_modules" / ".bin"
OLDER = NODE["node-older"] / "node_modules" / ".bin"
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # first of all, the Node that was installed
BLOCK_SIZE = 16
NUM_OPENING = 16  # tokens behind the text of the last message, at most
BASE = ("--port", "0", "--device-size", "64MiB", "--host-size", "64MiB")
WRITTEN = "Bern has a river."
COMMAND = f"echo '{WRITTEN}' > answer.txt"
NOTE = "Write down a city with a river."
CITY = {"name": "Bern", "population": 146_000}
DONE = f"All is done {SMILE}"
READ = call("read_note", title="todo")
WRITE = call("write_note", title="answer", text=WRITTEN)


def note_scripts() -> Iterator[Script]:
    """Yield the scripts of programs that have the tools of `notes.py`."""
    read = "I read the note first.\n" + READ
    yield Script("notes", [read, WRITE, json.dumps(CITY), DONE])
    yield Script("notes-city", [read, WRITE, call("City", **CITY), DONE])
    # A form that is asked for in each turn leaves no room for prose beside a call.
    yield Script("notes-bare", [READ, WRITE, json.dumps(CITY), DONE])
    yield Script("notes-result", [READ, WRITE, call("final_result", **CITY), DONE])
    yield Script("notes-json", [READ, WRITE, call("json", **CITY)])
    yield Script("notes-final", [READ, WRITE, call("final_answer", answer=json.dumps(CITY))])
    yield Script("city", [json.dumps(CITY)], has_tools=False)


def agent_scripts(folder: Path) -> Iterator[Script]:
    """Yield the scripts of coding agents, each with the tools that the agent offers.

    Args:
        folder: in which the agents' folders are.
    """
    todo = str(folder / "claude-code" / "todo.txt")
    write = call("Bash", command=COMMAND, description="Write the answer")
    steps = ["I read the file with a tool.\n" + call("Read", file_path=todo), write]
    yield Script("claude-code", [*steps, f"Claude Code is done {SMILE}"])
    yield Script("claude-code-json", [*steps, call("StructuredOutput", **CITY), DONE])
    steps = [call("exec_command", cmd="cat todo.txt"), call("exec_command", cmd=COMMAND)]
    prose = f"I run a command.\n{steps[0]}"
    yield Script("codex", [prose, steps[1], f"Codex is done {SMILE}"])
    yield Script("codex-json", [*steps, json.dumps(CITY)])
    todo = str(folder / "opencode" / "todo.txt")
    write = call("bash", command=COMMAND, description="Write the answer")
    steps = ["I open the file.\n" + call("read", filePath=todo), write]
    yield Script("opencode", [*steps, f"opencode is done {SMILE}"])
    shell = [call("shell", command=["bash", "-lc", it]) for it in ("cat todo.txt", COMMAND)]
    for name, read, write in (
        ("codex-older", *shell),
        ("continue", call("Read", filepath="todo.txt"), call("Bash", command=COMMAND)),
        ("pi", call("read", path="todo.txt"), call("bash", command=COMMAND)),
        (
            "qwen",
            call("read_file", file_path=str(folder / "qwen" / "todo.txt")),
            call("run_shell_command", command=COMMAND, is_background=False),
        ),
    ):
        prose = f"This is {name}.\n{read}"
        yield Script(name, [prose, write, f"{name} is done {SMILE}"])
    edit = f"An edit.\n\nanswer.txt\n<<<<<<< SEARCH\n=======\n{WRITTEN}\n>>>>>>> REPLACE\n"
    # aider's prompts have answers of the assistant as examples, so its own ones are later steps.
    yield Script("aider", [edit] * 5 + [f"aider is done {SMILE}"], has_tools=False)


class Run(NamedTuple):
    """What a program did.

    Attributes:
        output: what it printed to stdout.
        written: the file that it was to write.
        exchanges: its requests to the model, and the answers.
        refused: the other hosts that it asked for.
    """

    output: str
    written: str
    exchanges: Sequence[Exchange]
    refused: set[str]

    def check(
        self, num_answers: int, num_refused: int = 0, is_found_to_marks: bool = False
    ) -> None:
        """Check that no call became text, and that each turn found the one before it.

        Args:
            num_answers: of the model.
            num_refused: requests that the server refuses, after which the program goes on.
            is_found_to_marks: whether hits end at a mark (`cache_control`), not behind the answer.
        """
        assert "tool_call" not in self.output
        assert self.refused == set()
        answered = [it for it in self.exchanges if it.status == 200]
        assert len(answered) == num_answers
        assert len(self.exchanges) == num_answers + num_refused
        for one, other in pairwise(answered):
            before, after = one.usage, other.usage
            computed = before.prompt + before.answer - 1  # the last token is not in the cache
            if one.asks_for_form:  # its text may be written in other tokens than it is read in
                computed = before.prompt
            if is_found_to_marks:
                computed = before.prompt - NUM_OPENING
            assert after.cached >= computed // BLOCK_SIZE * BLOCK_SIZE, (before, after)


class Programs:
    """Runs programs.

    Attributes:
        folder: in which each program has a folder of its own.
        url, root: URL of the API, with and without `/v1`.
    """

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self.folder = folder
        self.url, self.root = recorder.url, recorder.root
        self._recorder = recorder

    def run(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Run:
        """Run a program in its folder; it must succeed."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "todo.txt").write_text(NOTE)
        (folder / "answer.txt").unlink(missing_ok=True)
        home = self.folder / f"{name}-home"
        home.mkdir(exist_ok=True)
        proxy = self._recorder.root
        self._recorder.take(), self._recorder.take_refused()
        done = subprocess.run(
            command,
            cwd=folder,
            env={
                "PATH": PATH,
                "LANG": "C.UTF-8",
                "HOME": str(home),
                "TIEREDKV_URL": self._recorder.url,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy),
                **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
                **(environ or {}),
            },
            input=stdin,
            capture_output=True,
            timeout=HANG_S,
            encoding="utf-8",
        )
        told = f"{done.stdout}\n{done.stderr}"
        exchanges = self._recorder.take()
        asked = [it.answer.decode() for it in exchanges if it.status != 200]
        assert done.returncode == 0, f"{told}\n{asked}"
        answer = folder / "answer.txt"
        written = answer.read_text("utf-8").strip() if answer.exists() else ""
        return Run(done.stdout, written, exchanges, self._recorder.take_refused())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Return what runs programs against one server for all tests."""
    folder = tmp_path_factory.mktemp("programs")
    model = folder / "checkpoint"
    write_checkpoint(model, [*note_scripts(), *agent_scripts(folder)])
    named = ("--served-model-name", "scripted")
    with (
        running(folder, *named, model=str(model), base=BASE, has_disk=False) as server,
        Recorder(server.root) as recorder,
    ):
        yield Programs(folder, recorder)
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def check_notes(programs: Programs, python: str, *command: str) -> Any:
    """Run a program with the tools of `notes.py`, and check what it did."""
    name, (module, *arguments) = "-".join(command), command
    run = programs.run(
        name,
        [python, "-m", f"tests.e2e.programs.{module}", *arguments],
        {"PYTHONPATH": str(HERE.parents[2])},
    )
    outcome = json.loads(run.output.splitlines()[-1])
    assert outcome["city"] == CITY
    assert run.written == WRITTEN
    return run, outcome["text"]


@pytest.mark.parametrize("kind", ["chat", "stream", "responses", "parse"])
def test_openai_in_python(programs: Programs, kind: str) -> None:
    run, text = check_notes(programs, sys.executable, "openai_sdk", kind)
    run.check(num_answers=4)
    assert text == DONE


@pytest.mark.parametrize("kind", ["run", "stream"])
def test_anthropic_in_python(programs: Programs, kind: str) -> None:
    run, text = check_notes(programs, sys.executable, "anthropic_sdk", kind)
    # It asks first for a conversation that the server keeps.
    run.check(num_answers=4, num_refused=1, is_found_to_marks=True)
    assert text == DONE


def task(script: str) -> str:
    """Return what an agent is asked to do."""
    return f"Read todo.txt and do what it says. Please follow script {script}."


def claude_code(programs: Programs, script: str, *flags: str, program: str = "") -> Run:
    """Run Claude Code, or another version of it; the settings are those of docs/agents.md."""
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    environ = {
        "ANTHROPIC_BASE_URL": programs.root,
        "ANTHROPIC_AUTH_TOKEN": "any",
        **dict.fromkeys(models, "scripted"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    program = program or path_of(BIN / "claude")
    command = [program, "-p", task(script), "--allowedTools", "Read,Bash", *flags]
    return programs.run("claude-code", command, environ)


@pytest.mark.clients
def test_claude_code(programs: Programs) -> None:
    run = claude_code(programs, "claude-code")
    run.check(num_answers=3, is_found_to_marks=True)
    assert run.output.strip() == f"Claude Code is done {SMILE}"
    assert run.written == WRITTEN


@pytest.mark.clients
def test_an_older_claude_code(programs: Programs) -> None:
    run = claude_code(programs, "claude-code", program=path_of(OLDER / "claude", "node-older"))
    turns = [it for it in run.exchanges if it.body.get("tools")]  # it asks for other answers, too
    run._replace(exchanges=turns).check(num_answers=3, is_found_to_marks=True)
    assert run.output.strip() == f"Claude Code is done {SMILE}"
    assert run.written == WRITTEN


@pytest.mark.clients
def test_claude_code_answers_with_json(programs: Programs) -> None:
    fields = {"name": {"type": "string"}, "population": {"type": "integer"}}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    flags = ("--output-format", "json", "--json-schema", json.dumps(schema))
    run = claude_code(programs, "claude-code-json", *flags)
    assert json.loads(run.output)["structured_output"] == CITY
    run.check(num_answers=len(run.exchanges), is_found_to_marks=True)
    assert run.written == WRITTEN


@pytest.mark.clients
def test_claude_code_goes_on_after_kill_9(tmp_path: Path) -> None:
    model = tmp_path / "checkpoint"
    write_checkpoint(model, [*note_scripts(), *agent_scripts(tmp_path)])
    config = ("--config", str(HERE.parents[2] / "configs" / "agents.toml"))
    sizes = ("--host-size", "64MiB", "--disk-size", "256MiB", "--disk-dir", str(tmp_path / "kv"))
    flags = (*config, *sizes, "--served-model-name", "scripted", "--restore", "load")
    usages = []
    for again in ((), ("-c",)):
        with (
            running(tmp_path, *flags, model=str(model), base=BASE, has_disk=False) as server,
            Recorder(server.root) as recorder,
        ):
            run = claude_code(Programs(tmp_path, recorder), "claude-code", *again)
            assert run.refused == set()
            usages.append([it.usage for it in run.exchanges])
            wait_until(lambda: is_written(tmp_path / "kv"), "not everything is written")
            server.kill()
    (*_, before), (after, *_) = usages
    # A new process has only what the disk has.
    assert after.cached >= (before.prompt - NUM_OPENING) // BLOCK_SIZE * BLOCK_SIZE, usages


def is_written(folder: Path) -> bool:
    """Return whether the store has all blocks that it is to have, as far as a moment tells."""
    counts = list[int]()
    for _ in range(2):
        counts.append(ask_store(folder, "df")["disk"]["blocks"])
        time.sleep(0.5)
    return counts[0] > 0 and counts[0] == counts[1]


CODEX = """\
model = "scripted"
model_provider = "tieredkv"
check_for_update_on_startup = false

[model_providers.tieredkv]
name = "tieredkv"
base_url = "{url}"
env_key = "TIEREDKV_API_KEY"
wire_api = "{wire_api}"

[analytics]
enabled = false

[features]
apps = false
plugins = false
remote_plugin = false
"""


def codex(
    programs: Programs, script: str, *flags: str, program: str = "", wire_api: str = "responses"
) -> Run:
    """Run Codex, or another version of it; the settings are those of docs/agents.md."""
    name = f"codex-older-{wire_api}" if program else "codex"
    home = programs.folder / f"{name}-home" / ".codex"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(CODEX.format(url=programs.url, wire_api=wire_api))
    may_all = "--dangerously-bypass-approvals-and-sandbox"
    program = program or path_of(BIN / "codex")
    command = [program, "exec", "--skip-git-repo-check", may_all, *flags]
    return programs.run(name, [*command, task(script)], {"TIEREDKV_API_KEY": "any"})


@pytest.mark.clients
def test_codex(programs: Programs) -> None:
    run = codex(programs, "codex")
    run.check(num_answers=3)
    assert run.output.strip() == f"Codex is done {SMILE}"
    assert run.written == WRITTEN


@pytest.mark.clients
@pytest.mark.parametrize("wire_api", ["responses", "chat"])
def test_an_older_codex(programs: Programs, wire_api: str) -> None:
    program = path_of(OLDER / "codex", "node-older")
    run = codex(programs, "codex-older", program=program, wire_api=wire_api)
    if wire_api == "responses":
        run.check(num_answers=3)
    else:  # it does not ask for `usage`
        assert [it.status for it in run.exchanges] == [200] * 3
    assert f"codex-older is done {SMILE}" in run.output
    assert run.written == WRITTEN


@pytest.mark.clients
def test_codex_answers_with_json(programs: Programs) -> None:
    fields = {"name": {"type": "string"}, "population": {"type": "integer"}}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    file = programs.folder / "schema.json"
    file.write_text(json.dumps({**schema, "additionalProperties": False}))
    run = codex(programs, "codex-json", "--output-schema", str(file))
    run.check(num_answers=3)
    assert json.loads(run.output) == CITY


@pytest.mark.clients
def test_opencode(programs: Programs) -> None:
    model = {"name": "scripted", "limit": {"context": 131_072, "output": 4096}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": programs.url, "apiKey": "any"},
        "models": {"scripted": model},
    }
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": "tieredkv/scripted",
        "small_model": "tieredkv/scripted",
        "enabled_providers": ["tieredkv"],
        "provider": {"tieredkv": provider},
    }
    environ = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    run = programs.run("opencode", [path_of(BIN / "opencode"), "run", task("opencode")], environ)
    # It asks a registry for its plugin package, which nothing here needs, and goes on without it.
    assert all("registry" in host for host in run.refused)
    [title, *turns] = sorted(run.exchanges, key=lambda it: "tools" in it.body)
    assert "tools" not in title.body
    run._replace(exchanges=turns, refused=set()).check(num_answers=3)
    assert f"opencode is done {SMILE}" in run.output
    assert run.written == WRITTEN


class Agent(NamedTuple):
    """A coding agent that speaks chat completions.

    Attributes:
        program: its name in `node_modules`.
        flags: before the task.
        settings: JSON files in its home, by their paths.
    """

    program: str
    flags: Sequence[str]
    settings: Mapping[str, Any]


def coding_agents(programs: Programs) -> Mapping[str, Agent]:
    """Return coding agents by their names; the settings are those of docs/agents.md."""
    model = {"name": "scripted", "provider": "openai", "model": "scripted", "apiKey": "any"}
    model |= {"apiBase": programs.url}
    config = {"name": "tieredkv", "version": "1.0.0", "schema": "v1"}
    provider = {"baseUrl": programs.url, "api": "openai-completions", "apiKey": "any"}
    local = {"id": "scripted", "contextWindow": 131_072, "maxTokens": 4096}
    home = programs.folder / "continue-home"
    return {
        "continue": Agent(
            "cn",
            ["--config", str(home / "config.yaml"), "--auto", "-p"],
            {"config.yaml": {**config, "models": [{**model, "capabilities": ["tool_use"]}]}},
        ),
        "pi": Agent(
            "pi",
            ["--provider", "tieredkv", "--model", "scripted", "-p"],
            {".pi/agent/models.json": {"providers": {"tieredkv": {**provider, "models": [local]}}}},
        ),
        "qwen": Agent(
            "qwen",
            ["--auth-type", "openai", "--yolo", "-p"],
            {".qwen/settings.json": {"privacy": {"usageStatisticsEnabled": False}}},
        ),
    }


@pytest.mark.clients
@pytest.mark.parametrize("name", ["continue", "pi", "qwen"])
def test_coding_agents(programs: Programs, name: str) -> None:
    agent = coding_agents(programs)[name]
    for path, settings in agent.settings.items():
        file = programs.folder / f"{name}-home" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))  # JSON is YAML, too
    environ = {"OPENAI_BASE_URL": programs.url, "OPENAI_API_KEY": "any", "OPENAI_MODEL": "scripted"}
    run = programs.run(name, [path_of(BIN / agent.program), *agent.flags, task(name)], environ)
    run.check(num_answers=3)
    assert f"{name} is done {SMILE}" in run.output
    assert run.written == WRITTEN


@pytest.mark.clients
def test_aider(programs: Programs) -> None:
    flags = (
        *("--model", "openai/scripted", "--edit-format", "diff", "--no-stream", "--no-git"),
        *("--yes-always", "--analytics-disable", "--no-check-update", "--no-show-release-notes"),
        *("--no-show-model-warnings", "--no-fancy-input", "--no-pretty", "todo.txt"),
    )
    cache = programs.folder / "aider-home" / ".aider" / "caches"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "model_prices_and_context_window.json").write_text('{"none": {}}')
    environ = {"OPENAI_API_BASE": programs.url, "OPENAI_API_KEY": "any"}
    said = "".join(f"{line}\n" for line in (task("aider"), "Is it done?", "Really?"))
    aider = path_of(ENVIRONMENTS / "aider" / "bin" / "aider", "aider")
    run = programs.run("aider", [aider, *flags], environ, stdin=said)
    assert f"aider is done {SMILE}" in run.output
    assert run.written == WRITTEN
    assert run.refused == set()
    _, *others = [it.usage for it in run.exchanges]
    # Files and a reminder stand behind the history, so that a turn shares what stands before them.
    assert len(others) == 2 and all(it.cached > it.prompt // 2 for it in others), others


def python_of(environment: str) -> str:
    """Return the Python of one of the environments that `make test-clients` makes."""
    return path_of(ENVIRONMENTS / environment / "bin" / "python", environment)


def kinds_of(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with each kind."""
    return pytest.mark.parametrize("kind", kinds)


@pytest.mark.clients
@kinds_of("chat", "responses", "chat-typed", "responses-typed")
def test_openai_agents(programs: Programs, kind: str) -> None:
    run, _ = check_notes(programs, python_of("agents"), "openai_agents", kind)
    run.check(num_answers=3)


@pytest.mark.clients
@kinds_of("tool", "native", "prompted")
def test_pydantic_ai(programs: Programs, kind: str) -> None:
    run, _ = check_notes(programs, python_of("agents"), "pydantic_agent", kind)
    run.check(num_answers=3)


@pytest.mark.clients
@kinds_of("prompted", "tool")
def test_pydantic_ai_with_messages(programs: Programs, kind: str) -> None:
    run, _ = check_notes(programs, python_of("agents"), "pydantic_agent", kind, "anthropic")
    run.check(num_answers=3, is_found_to_marks=True)


@pytest.mark.clients
@kinds_of("function_calling", "json_mode", "json_schema")
def test_langgraph(programs: Programs, kind: str) -> None:
    run, _ = check_notes(programs, python_of("frameworks"), "langgraph_agent", kind)
    run._replace(exchanges=run.exchanges[:3]).check(num_answers=3)


@pytest.mark.clients
@kinds_of("TOOLS", "JSON", "JSON_SCHEMA")
def test_instructor(programs: Programs, kind: str) -> None:
    run, _ = check_notes(programs, python_of("frameworks"), "instructor_client", kind)
    run._replace(exchanges=run.exchanges[:2]).check(num_answers=2)


@pytest.mark.clients
@kinds_of("openai", "anthropic", "openai-typed")
def test_litellm(programs: Programs, kind: str) -> None:
    run, _ = check_notes(programs, python_of("frameworks"), "litellm_client", kind)
    run.check(num_answers=3, is_found_to_marks=kind == "anthropic")


@pytest.mark.clients
@kinds_of("tools", "schema")
def test_llm(programs: Programs, kind: str) -> None:
    home = programs.folder / "llm"
    home.mkdir(exist_ok=True)
    model: dict[str, Any] = {
        "model_id": "scripted",
        "model_name": "scripted",
        "api_base": programs.url,
    }
    model |= {"supports_tools": True, "supports_schema": True}
    (home / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML, too
    flags = {
        "tools": ["--functions", str(HERE / "llm_tools.py")],
        "schema": ["--schema", "name, population int"],
    }
    llm = [python_of("agents"), "-m", "llm", "-m", "scripted", *flags[kind]]
    said = "Please follow script notes. Without tools, follow script city."
    run = programs.run("llm", [*llm, said], {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "any"})
    assert json.loads(run.output.splitlines()[-1].removeprefix("I read the note first.")) == CITY
    run.check(num_answers=3 if kind == "tools" else 1)
    assert run.written == (WRITTEN if kind == "tools" else "")


@pytest.mark.clients
@kinds_of("openai-run", "anthropic-run", "openai-parse")
def test_javascript(programs: Programs, kind: str) -> None:
    is_anthropic = kind == "anthropic-run"
    run = run_in_node(programs, "@anthropic-ai" if is_anthropic else "openai", "clients", kind)
    run.check(num_answers=3, num_refused=int(is_anthropic), is_found_to_marks=is_anthropic)


def run_in_node(programs: Programs, package: str, module: str, *arguments: str) -> Run:
    """Run a program with the tools of `notes.mjs`, and check what it did."""
    node = shutil.which("node", path=PATH) or pytest.skip("node is not installed")
    path_of(HERE / "node_modules" / package)
    name = "-".join((module, *arguments))
    run = programs.run(name, [node, str(HERE / f"{module}.mjs"), *arguments])
    assert json.loads(run.output.splitlines()[-1]) == CITY
    assert run.written == WRITTEN
    return run


@pytest.mark.clients
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@kinds_of("run", "stream", "typed")
def test_ai_sdk(programs: Programs, api: str, kind: str) -> None:
    run_in_node(programs, "ai", "ai_sdk", api, kind).check(num_answers=3)


@pytest.mark.clients
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@kinds_of("run", "typed")
def test_langchain_in_javascript(programs: Programs, api: str, kind: str) -> None:
    run_in_node(programs, "langchain", "agents", "langchain", api, kind).check(num_answers=3)


@pytest.mark.clients
@pytest.mark.parametrize("api", ["chat", "responses"])
@kinds_of("run", "typed")
def test_openai_agents_in_javascript(programs: Programs, api: str, kind: str) -> None:
    run_in_node(programs, "@openai/agents", "agents", "openai", api, kind).check(num_answers=3)


@pytest.mark.clients
@pytest.mark.parametrize(
    "command",
    [
        *(
            "agno chat",
            "agno responses",
            "agno messages",
            "agno chat typed",
            "agno responses typed",
        ),
        *("haystack chat", "haystack responses", "langchain messages", "langchain messages typed"),
        *("smolagents chat", "strands chat", "strands responses", "strands messages"),
    ],
)
def test_more_agents(programs: Programs, command: str) -> None:
    run, _ = check_notes(programs, python_of("more"), "more_agents", *command.split())
    # smolagents writes calls, and agno the answers over Responses, in other words than they came.
    run.check(num_answers=3, is_found_to_marks=command in ("agno responses", "smolagents chat"))
