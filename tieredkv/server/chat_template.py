"""Render chat templates within bounds on loops and on the length of texts.

This module uses Jinja and the functions that transformers provides to templates, but no tokens.
"""

import functools
import inspect
import threading
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, get_args

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from tieredkv.errors import RequestError
from tieredkv.server.template_clock import Moment
from tieredkv.server.threads import Cancellation

MAX_ROUNDS = 1_000_000
"""The limit on rounds of loops and calls of macros together in one rendering."""

MAX_CHARACTERS = 1 << 26
"""The longest rendering, and the longest text or list that a template may make on the way."""

MAX_POWER_BITS = 1 << 16

_ASKING = frozenset({"boolean", "defined", "false", "none", "true", "undefined"})
"""Tests that ask of a variable nothing but whether it is there, true or false."""

_LIMITS = (ArithmeticError, MemoryError, SecurityError)
"""Raised by templates that go beyond a limit of the sandbox."""

_FAULTS = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by templates when a message or tool does not have the form that they expect."""

_LOOKING = frozenset(
    {"endswith", "find", "index", "partition", "rpartition", "rsplit", "split", "startswith"}
)
"""Methods of texts by which templates look for another text."""


RESERVED = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
"""The names of the tokenizer's own parameters, which may not be set as arguments of a template."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""What templates are told for the efforts that they do not know."""


def thinking_arguments(effort: Effort | None, thinks: bool | None) -> dict[str, Any]:
    """Return the arguments by which templates know how much the model is to think.

    Templates of models that may think read `enable_thinking` (Qwen3, GLM) or `thinking` (DeepSeek),
    and gpt-oss's reads `reasoning_effort`; the others ignore them.

    Args:
        effort: as the APIs name it; None if the client does not care.
        thinks: whether the model is to think at all; None if the client does not care.
    """
    told: dict[str, Any] = {}
    if effort is not None:
        told["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if thinks is not None:
        told |= {"enable_thinking": thinks, "thinking": thinks}
    return told


class Spans:
    """Notes where in its output a template writes what it loops over, such as messages and tools.

    Only loops that write straight to the output count: not those in macros or in blocks that are
    assigned to a variable. If a template loops over an object several times, the last one counts.

    Attributes:
        of: where the output of an object's round begins and ends, by the object's key.
    """

    def __init__(self) -> None:
        self.of: dict[Any, tuple[int, int]] = {}
        self._keys: dict[int, Any] = {}
        self._open: dict[int, tuple[Any, int]] = {}  # by the number of the loop

    def follow(self, key: Any, value: Any) -> None:
        """Follow an object, which must live until it has been rendered."""
        self._keys[id(value)] = key

    def begin(self, loop: int, value: Any, place: int) -> None:
        """Note that a loop begins a round with an object when the output is so long."""
        self.end(loop, place)
        if (key := self._keys.get(id(value))) is not None:
            self._open[loop] = key, place

    def end(self, loop: int, place: int) -> None:
        """Note that a loop ends the round that it has begun."""
        if (begun := self._open.pop(loop, None)) is not None:
            self.of[begun[0]] = begun[1], place


class _Spent(threading.local):
    """The rounds of the rendering in this thread so far, its time, and what ends it early.

    Attributes:
        length: of the output so far.
        spans: notes where things are in the output; None if nobody wants to know.
    """

    num_rounds = 0
    cancellation = Cancellation()
    moment = Moment(datetime.min)
    length = 0
    spans: Spans | None = None


_spent = _Spent()


def _count_round() -> None:
    _spent.num_rounds += 1
    if _spent.num_rounds > MAX_ROUNDS:
        raise SecurityError(f"its loops take more than {MAX_ROUNDS} rounds.")
    _spent.cancellation.check()


def _begin_round(loop: int, value: Any) -> None:
    _count_round()
    if _spent.spans is not None:
        _spent.spans.begin(loop, value, _spent.length)


def _end_loop(loop: int) -> None:
    if _spent.spans is not None:
        _spent.spans.end(loop, _spent.length)


def _strftime_now(format: str) -> str:
    return _spent.moment.strftime(format)


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise SecurityError(f"it makes a text or list longer than {MAX_CHARACTERS}.")


def _concat(values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


class _CountingGenerator(CodeGenerator):
    """Compiles templates that count the rounds of their loops and the calls of their macros.

    A loop whose output is not kept in a buffer also notes with what each of its rounds begins.
    """

    _num_loops = 0

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """Count each round of a loop."""
        if frame.buffer is not None or node.recursive or not isinstance(node.target, nodes.Name):
            node.body.insert(0, self._calling(node.lineno, "count_round"))
            super().visit_For(node, frame)
            return
        self._num_loops += 1
        loop, value = nodes.Const(self._num_loops), nodes.Name(node.target.name, "load")
        node.body.insert(0, self._calling(node.lineno, "begin_round", loop, value))
        super().visit_For(node, frame)
        self.visit(self._calling(node.lineno, "end_loop", loop), frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        """Count each call of a macro."""
        node.body.insert(0, self._calling(node.lineno, "count_round"))
        super().visit_Macro(node, frame)

    def _calling(self, lineno: int, name: str, *arguments: nodes.Expr) -> nodes.Stmt:
        function = nodes.EnvironmentAttribute(name)
        statement = nodes.ExprStmt(nodes.Call(function, [*arguments], [], None, None))
        statement.set_environment(self.environment)
        return statement.set_lineno(lineno, override=True)  # type: ignore[return-value]

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Join texts and check the length of the result."""
        self.write("environment.concat_checked((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")


class ChatTemplate:
    """One compiled chat template; several threads may render it.

    Attributes:
        looked_for: constants that the template searches texts for, such as `</think>`.
        names: of the attributes that it reads with a dot, such as `thinking`.
        variables: that it reads, such as `messages` and `enable_thinking`.
        arguments: those of them that are left to who asks, such as `enable_thinking`.
        switches: those of which it asks nothing but whether they are there, true or false.
    """

    def __init__(self, source: str) -> None:
        environment: Any = _compile_jinja_template(source).environment
        binary = environment.call_binop

        def call_binop(context: Context, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    if isinstance(many, str | list | tuple) and isinstance(times, int):
                        _check_length(len(many) * times)
            elif operator == "**" and isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * right > MAX_POWER_BITS:
                    raise SecurityError("it makes a number that is too large.")
            elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _check_length(len(left) + len(right))
            return binary(context, operator, left, right)

        environment.code_generator_class = _CountingGenerator
        environment.intercepted_binops = frozenset({"*", "**", "+"})
        environment.call_binop = call_binop
        environment.count_round = _count_round
        environment.begin_round, environment.end_loop = _begin_round, _end_loop
        environment.concat_checked = _concat
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self.looked_for = frozenset(_looked_for(tree))
        self.names = frozenset(each.attr for each in tree.find_all(nodes.Getattr))
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.arguments = self.variables - RESERVED - environment.globals.keys()
        self.switches = self.arguments - _told_of(tree)

    def render(
        self,
        cancellation: Cancellation,
        moment: Moment,
        max_rounds: int = MAX_ROUNDS,
        spans: Spans | None = None,
        /,
        **variables: Any,
    ) -> str:
        """Return the rendered text.

        Args:
            cancellation: is set once the text is no longer wanted.
            moment: the time that the template is told if it asks for it.
            max_rounds: how many rounds of loops it may take, up to `MAX_ROUNDS`.
            spans: notes where the objects that it follows are in the text.
            variables: for the template.

        Raises:
            RequestError: the template refuses the messages, cannot render them, or breaks a limit.
            CancelledWorkError: the text is no longer wanted.
        """
        _spent.num_rounds, _spent.cancellation = MAX_ROUNDS - max_rounds, cancellation
        _spent.moment, _spent.length, _spent.spans = moment, 0, spans
        texts = list[str]()
        try:
            for text in self._template.generate(**variables):
                texts.append(text)
                _spent.length += len(text)
                _check_length(_spent.length)
        except _LIMITS as error:
            why = f"exceeds a limit of its sandbox: {str(error) or type(error).__name__}"
        except jinja2.TemplateError as error:
            why = f"refuses these messages: {error.message or type(error).__name__}"
        except _FAULTS as error:
            why = f"cannot render these messages: {_fault(error)}."
        else:
            return "".join(texts)
        what = f"The model's chat template {why}"
        raise RequestError(what, param="messages", code="invalid_value")


def _fault(error: Exception) -> str:
    """Return the kind of an error and the line of the template, but none of a client's text."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return type(error).__name__ + (f" in line {lines[-1]}" if lines else "")


def _looked_for(tree: nodes.Template) -> list[str]:
    """Return the constants that a template searches texts for, without surrounding white space."""
    found: list[nodes.Node] = []
    for compare in tree.find_all(nodes.Compare):
        if {operand.op for operand in compare.ops} & {"in", "notin"}:
            found.append(compare.expr)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _LOOKING:
            found += call.args[:1]
    return [
        each.value.strip()
        for each in found
        if isinstance(each, nodes.Const) and isinstance(each.value, str)
    ]


def _told_of(tree: nodes.Template) -> frozenset[str]:
    """Return the variables of which a template asks more than if they are there, true or false.

    They are printed, compared, given to functions, or assigned to another name.
    """
    told = set[str]()

    def visit(node: nodes.Node, *, decides: bool = False, own: str = "") -> None:
        # `decides`: the value is only asked for its truth. `own`: the name that it is assigned to.
        if isinstance(node, nodes.Name):
            if node.ctx == "load" and not decides and node.name != own:
                told.add(node.name)
        elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            visit(node.node, own=node.target.name)
        else:
            passes = isinstance(node, nodes.And | nodes.Or | nodes.CondExpr) or (
                isinstance(node, nodes.Filter) and node.name in ("d", "default")
            )
            asks = isinstance(node, nodes.Not) or (
                isinstance(node, nodes.Test) and node.name in _ASKING
            )
            for child in node.iter_child_nodes():
                is_test = isinstance(node, nodes.If | nodes.CondExpr) and child is node.test
                is_asked = asks or is_test or (passes and decides)
                visit(child, decides=is_asked, own=own if passes else "")

    visit(tree)
    return frozenset(told)


template_of = functools.lru_cache(16)(ChatTemplate)
"""Returns the compiled form of a template's source."""


def variables_of(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the variables that a template may use in addition to the messages."""
    defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
    return {**tokenizer.special_tokens_map, **defaults, **arguments}
