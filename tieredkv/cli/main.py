"""The root command: its overview, its errors and its exit codes.

Exit codes: 0 ok, 1 a problem was found, 2 usage or configuration, 3 a server that does not answer.
A verb's module is imported when the verb is asked for, and slow modules when the verb runs, so that
each verb and its help start quickly.
"""

import errno
import importlib
import io
import os
import signal
import sys
from collections import UserDict
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import tieredkv
from tieredkv import errors
from tieredkv.errors import TieredKVError
from tieredkv.interruptions import repeat_dropped_interruptions

EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130


CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
MODULES = {
    "bench": ("bench",),
    "doctor": ("doctor",),
    "inspect": ("inspect",),
    "serve": ("serve", "generate"),
    "settings": ("config",),
    "sizing": ("replay", "size"),
    "store": ("adopt", "df", "evict", "ls", "prune", "rotate", "verify"),
    "top": ("top",),
    "warm": ("warm",),
}
"""The verbs of each module of this package."""


class VerbCommands(UserDict[str, Any]):
    """The command of each verb; its module is imported when the verb is looked up."""

    def __init__(self) -> None:
        super().__init__({verb: module for module, verbs in MODULES.items() for verb in verbs})

    def __getitem__(self, verb: str) -> click.Command:
        """Import the command of a verb."""
        module = importlib.import_module(f"tieredkv.cli.{self.data[verb]}")
        command: click.Command = getattr(module, verb)
        return command


@click.group(commands=VerbCommands(), invoke_without_command=True, context_settings=CONTEXT)
@click.version_option(tieredkv.__version__, prog_name="tieredkv")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve language models and keep their prompt cache as long as each request asked.

    \b
    Cached prompts live in GPU memory, in pinned host memory and on a local SSD.

    \b
    Try it without a GPU or a checkpoint:
      tieredkv bench ttft --model tiny-random              time a prompt from every tier
      tieredkv generate tiny-random "Once upon a time" --max-tokens 8
      tieredkv serve tiny-random --disk-dir ./kv --default-retention 24h

    \b
    Serve your own model to clients of OpenAI's and Anthropic's APIs:
      tieredkv serve ./Llama-3.1-8B-Instruct --host-size 64GiB --disk-dir /nvme/kv --disk-size 2TiB
      curl localhost:8000/v1/models

    \b
    Look at the cache and change it, whether the server runs or not:
      tieredkv df --disk-dir ./kv                          show blocks and bytes of each tier
      tieredkv ls --disk-dir ./kv                          list prefixes
      tieredkv inspect --disk-dir ./kv ID                  show the blocks of a prefix, tier by tier
      tieredkv evict --disk-dir ./kv --older-than 2h       evict what was unused for two hours
      tieredkv prune --disk-dir ./kv                       drop what nothing can use any more
      tieredkv verify --disk-dir ./kv                      compare every block with its checksums
      tieredkv warm prompts.jsonl --retention 24h          compute prompts before they are needed
      tieredkv rotate --disk-dir ./kv                      replace the master key of the store
      tieredkv adopt --disk-dir /restored/kv               have the keys belong to this copy
      tieredkv top --url http://127.0.0.1:8000             watch a running server

    \b
    Measure and check:
      tieredkv bench disk --dir /nvme                      measure the disk tier beside the disk
      tieredkv doctor --disk-dir ./kv                      check what this machine can do
      tieredkv replay trace.jsonl.gz --host 100GiB         tell what a cache would have found
      tieredkv config show                                 show every setting and its source

    \b
    Every verb has --help and --json. A setting is taken from its flag, else from the environment
    (TIEREDKV_PORT), else from the --config file, else it has its default.

    \b
    Complete verbs and options with the Tab key in bash (in zsh and fish: zsh_source, fish_source):
      eval "$(_TIEREDKV_COMPLETE=bash_source tieredkv)"
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run() -> NoReturn:
    """Run the command line of this process, and end the process at once.

    The interpreter would take up to a second to take apart what torch has loaded, and some
    extension modules print complaints while it does. SIGTERM cleans up as Ctrl-C does.
    """
    _open_closed_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # not ignored, as behind `nohup`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    repeat_dropped_interruptions()
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _open_closed_streams() -> None:
    """Open the standard streams that are closed, so that no other file gets their numbers.

    A closed stdin is then empty, what is written to a closed stdout fails, as it would anyway, and
    what is written to a closed stderr is dropped.
    """
    for fd, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, flags), fd)
            os.set_inheritable(fd, True)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that its encoding lacks are escaped
        sys.stdout.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; errors become one line on stderr."""
    try:
        result = cli.main(arguments, prog_name="tieredkv", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(err=True)
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"hint: see `{context.command_path if context else 'tieredkv'} --help`"
        _complain(f"{error.format_message()}\n{hint}")
        return EXIT_USAGE
    except TieredKVError as error:
        _complain(str(error))
        return _exit_code(error)
    except BrokenPipeError:  # for example `tieredkv ls | head`
        _drop_output()
        return EXIT_PROBLEM
    except OSError as error:
        if error.errno in _OF_PATHS and error.filename is not None:
            _complain(f"`{os.fsdecode(error.filename)}`: {error.strerror}")
            return EXIT_USAGE
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EBADF):
            raise
        _drop_output()  # for example of `tieredkv ls > file` and `tieredkv ls >&-`
        _complain(f"the answer cannot be written: {error.strerror}")
        return EXIT_PROBLEM
    except RuntimeError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):  # while a class was made
            raise
        click.echo(err=True)
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


_OF_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
"""What the system says of paths that were given and cannot be used."""


def _drop_output() -> None:
    """Drop what is still to be written to stdout, where it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: TieredKVError) -> int:
    of_usage = errors.ConfigError | errors.RequestError | errors.ModelError | errors.NoStoreError
    if isinstance(error, of_usage):
        return EXIT_USAGE
    is_silent = isinstance(error, errors.StoreUnreachableError | errors.ServerUnreachableError)
    return EXIT_UNREACHABLE if is_silent else EXIT_PROBLEM


def _complain(message: str) -> None:
    """Write `error: …` and then each hint of the message on its own line."""
    first, *rest = message.strip().splitlines() or ["unknown"]
    click.echo("\n".join([f"error: {first}", *rest]), err=True)
