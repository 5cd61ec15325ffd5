"""Rewrite JSON schemas into what xgrammar enforces, and tell which keywords are left.

xgrammar reads one of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type` in a schema, in
this order, and ignores the others beside it. It also ignores what it does not know. So what a
schema demands in several ways is first merged (`schema_merge`), and written as one schema for each
type; what is not known to be enforced is left out and named. The result may allow less than the
schema, but never more, save for what is named.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from tieredkv.fields import names_of
from tieredkv.server.patterns import PatternError, of_length, written_in_json
from tieredkv.server.schema_merge import (
    UNEVALUATED,
    EmptyError,
    ObjectSchema,
    Schema,
    common,
    key_of,
    merged,
    types_of,
)

Facts = tuple[set[str], dict[str, set[bytes]]]

MAX_BRANCHES = 256
"""Branches of a `oneOf` that are compared."""

_TRIED_BRANCHES = (256, 16, 1)
"""What branches of choices may be multiplied to; fewer if the result is too large."""

MAX_PARTS = 10_000
"""Parts of a schema after what it demands in several ways is merged."""

MAX_MULTIPLES = 1024
MAX_COUNT = 1 << 20
"""Characters, items and properties; no answer has more."""

_BEYOND = 1 << 63
"""xgrammar's integers have 64 bits."""

_UNKNOWN = names_of("""
    not if then else dependentRequired dependentSchemas dependencies contains $dynamicRef
    $recursiveRef
""")
"""Keywords that are not enforced."""

_OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    ),
}
_OF_TYPE["integer"] = _OF_TYPE["number"]
_ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")

_MERGED = names_of("""
    type enum multipleOf properties additionalProperties patternProperties propertyNames items
    prefixItems anyOf oneOf
""")
_KEPT = names_of(" ".join(kw for kws in _OF_TYPE.values() for kw in kws)) | _MERGED

_COMBINING = names_of("$ref $dynamicRef allOf anyOf oneOf if contains dependentSchemas")
_REST = (
    ("unevaluatedProperties", "additionalProperties", UNEVALUATED),
    ("unevaluatedItems", "items", ""),
)
_KEPT |= {UNEVALUATED, "unevaluatedItems", "unevaluatedProperties"}
_TOLD = _KEPT | _UNKNOWN | {"$ref", "allOf", "const"}
"""All keywords that matter."""

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?"
    "(?:Z|[+\\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9\\-]*[A-Za-z0-9])?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_FORMATS = {
    "email": f"^{_ATOM}(?:\\.{_ATOM})*@{_LABEL}(?:\\.{_LABEL})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "ipv4": f"^(?:{_OCTET}\\.){{3}}{_OCTET}$",
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Formats that xgrammar writes wrongly: on 31 February, or with escapes that JSON does not have."""

_KNOWN_FORMATS = names_of("""
    duration ipv6 hostname uuid uri uri-reference uri-template
""")
_NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri-reference",
}
"""Formats of which xgrammar knows only a part."""

FORMATS = frozenset({*_FORMATS, *_KNOWN_FORMATS, *_NARROWER})
"""All formats that texts are held to."""

_ANY_NAME = {"", ".*", "^.*$", "^.*", ".*$", ".+", "^.+$"}
"""Patterns that fit all names of properties, or nearly all."""

_LENGTHS = {"uuid": 36, "date": 10}
_KEYS_LEFT_OUT = names_of("""
    title default description examples deprecated readOnly writeOnly $comment $schema
""")
"""Names that xgrammar ignores when it tells schemas apart, even as names of properties."""


class TooLargeError(ValueError):
    """A schema has too many parts once it is merged."""


def rewritten(schema: Schema, find: Callable[[str], Schema]) -> tuple[Schema, set[str]]:
    """Return a schema as xgrammar enforces it, and the keywords that are not enforced.

    Args:
        schema: a valid one, whose references are known to be there.
        find: returns what a reference names.

    Raises:
        EmptyError: no value follows the schema.
        TooLargeError: it has too many parts.
    """
    for max_branches in _TRIED_BRANCHES:
        writer = _Writer(find, max_branches)
        try:
            made = writer.write(schema)
        except TooLargeError:
            continue
        if made is False or any(writer.named[name] is False for name in writer.begun):
            raise EmptyError
        named = {name: part for name, part in writer.named.items() if part is not False}
        if "$ref" in made:
            made = named[made["$ref"].rpartition("/")[2]]
        return (made | {"$defs": named} if named else made), writer.left
    raise TooLargeError


class _Writer:
    """Writes one schema.

    Attributes:
        left: keywords that are not enforced.
        named: parts that are referred to, by their names.
        begun: names of parts that refer to themselves.
    """

    def __init__(self, find: Callable[[str], Schema], max_branches: int) -> None:
        self.left = set[str]()
        self.named: dict[str, Schema] = {}
        self.begun = set[str]()
        self._find, self._max_branches = find, max_branches
        self._names, self._num_parts = dict[bytes, str](), 0

    def write(self, part: Schema) -> Schema:
        """Return a part as it can be enforced; False if no value follows it."""
        if isinstance(part, bool):
            return {} if part else False
        if part.keys() & {"$ref", "allOf"}:
            return self._once(part)
        return self._made(part)

    def _once(self, part: ObjectSchema) -> Schema:
        """Write a part that may be met again, and refer to it: so recursion ends."""
        told = {key: part[key] for key in part.keys() & _TOLD}
        key = msgspec.json.encode(told, order="deterministic")
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"p{len(self._names)}"
            self.named[name] = None
            self.named[name] = self._made(part)
        elif self.named[name] is None:
            self.begun.add(name)
        return False if self.named[name] is False else {"$ref": f"#/$defs/{name}"}

    def _made(self, part: ObjectSchema) -> Schema:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise TooLargeError
        try:
            base, choices = merged([*self._leaves(part)], self.left)
            if choices:
                return self._chosen(base, choices)
            return self._typed(base)
        except EmptyError:
            return False

    # --- What a schema demands in several ways

    def _leaves(
        self, part: Schema, within: frozenset[str] = frozenset(), *, is_outer: bool = True
    ) -> Iterator[ObjectSchema]:
        """Yield schemas without references and `allOf`, all of which must be followed."""
        if part is False:
            raise EmptyError
        if part is True:
            return
        self._note_unknown(part)
        if "$ref" in part:
            if part["$ref"] in within:
                raise EmptyError
            inner = within | {part["$ref"]}
            yield from self._leaves(self._find(part["$ref"]), inner, is_outer=False)
        for each in part.get("allOf", ()):
            yield from self._leaves(each, within, is_outer=False)
        leaf = {key: value for key, value in part.items() if key in _KEPT}
        if "const" in part:
            leaf["enum"] = common(leaf.get("enum", [part["const"]]), [part["const"]])
        is_combined = bool(part.keys() & _COMBINING)
        for keyword, plain, beside in _REST:
            if keyword not in leaf:
                continue
            others = leaf.pop(keyword)
            if not is_combined:
                leaf.setdefault(plain, others)
            elif is_outer and beside:
                leaf[beside] = others
            else:
                self.left.add(keyword)
        yield leaf

    def _note_unknown(self, part: ObjectSchema) -> None:
        unknown = part.keys() & _UNKNOWN
        if not part.keys() & {"then", "else"}:
            unknown -= {"if"}
        if "if" not in part:
            unknown -= {"then", "else"}
        self.left |= unknown

    def _chosen(self, base: ObjectSchema, choices: list[tuple[str, list[Schema]]]) -> Schema:
        """Write the branches of a choice, each with all that must be followed beside it."""
        (kind, options), *others = choices
        if (base or others) and math.prod(len(each) for _, each in choices) > self._max_branches:
            self.left.add(kind)
            return self._chosen(base, others) if others else self._typed(base)
        if kind == "oneOf" and not self._is_disjoint(options):
            self.left.add("oneOf")
        beside = [*([base] if base else []), *({key: each} for key, each in others)]
        branches = [self.write({"allOf": [*beside, it]} if beside else it) for it in options]
        kept = [it for it in branches if it is not False]
        if not kept:
            raise EmptyError
        return kept[0] if len(kept) == 1 else {"anyOf": kept}

    def _is_disjoint(self, branches: Sequence[Schema]) -> bool:
        """Whether no value fits two of the branches, as far as types and constants tell."""
        if len(branches) > MAX_BRANCHES:
            return False
        facts = [self._facts(branch) for branch in branches]
        return not any(
            _may_overlap(one, other) for i, one in enumerate(facts) for other in facts[:i]
        )

    def _facts(self, branch: Schema) -> Facts:
        """Return the types of a branch, and which values it and its required properties may be.

        The values of the branch itself have an empty text as their key.
        """
        base = self._plainly(branch)
        types, values = {*types_of(base)}, dict[str, set[bytes]]()
        parts = base.get("properties", {}) if types <= {"object"} else {}
        needed = {name: parts[name] for name in base.get("required", ()) if name in parts}
        listed = {"": base, **{f"/{name}": self._plainly(it) for name, it in needed.items()}}
        for name, part in listed.items():
            if "enum" in part:
                values[name] = {*map(key_of, part["enum"])}
        return types | ({"integer"} if "number" in types else set()), values

    def _plainly(self, part: Schema) -> ObjectSchema:
        """Return what a part demands, without its choices."""
        left = set(self.left)
        try:
            base, _ = merged([*self._leaves(part)], self.left)
        except EmptyError:
            base = {"enum": []}
        self.left = left
        return base

    # --- One schema for each type

    def _typed(self, base: ObjectSchema) -> Schema:
        if "enum" in base:
            return self._listed(base)
        types = [*types_of(base)] or [
            kind for kind in _ALL_TYPES if base.keys() & {*_OF_TYPE.get(kind, ())}
        ]
        if not types:
            return {}
        if "number" in types and "integer" in types:
            types.remove("integer")
        made = []
        for kind in types:
            known = {*_OF_TYPE.get(kind, ()), UNEVALUATED}
            of_kind = {key: value for key, value in base.items() if key in known}
            try:
                made.append(_WRITERS[kind](self, of_kind))
            except EmptyError:
                continue
        if not made:
            raise EmptyError
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _listed(self, base: ObjectSchema) -> Schema:
        from jsonschema import Draft202012Validator

        rest = {key: value for key, value in base.items() if key not in ("enum", "format")}
        text = msgspec.json.encode(rest)
        # References are not known to the validator, and patterns may take for ever.
        if UNEVALUATED in base or b'"$ref"' in text or b'"pattern' in text:
            self.left.add("enum beside other keywords")
            rest = {"type": [*types_of(base)] or [*_ALL_TYPES]}
        check = Draft202012Validator(rest)
        values = [it for it in base["enum"] if check.is_valid(it)]
        kept = [it for it in values if _is_exact(it)]
        if not values:
            raise EmptyError
        if not kept:
            self.left.add("enum of large numbers")
            return {"type": "number"}
        return _told_apart({"enum": kept}, msgspec.json.encode(kept))

    def _string(self, base: ObjectSchema) -> Schema:
        least, most = _bounds(base, "minLength", "maxLength")
        form, pattern, made = base.get("format"), None, ObjectSchema(type="string")
        form = _NARROWER.get(form or "", form)
        if form == "regex":
            self.left.add("format")
        if "pattern" in base:
            try:
                pattern = written_in_json(base["pattern"])
            except PatternError:
                self.left.add("pattern")
        if pattern is not None:
            form = None  # where both are given, the pattern mostly says the same more precisely
        elif form in _FORMATS:
            pattern = written_in_json(_FORMATS[form])
        elif form in _KNOWN_FORMATS:
            made["format"] = form
        is_bounded = least > 0 or most is not None
        if pattern is not None:
            made["pattern"] = pattern
        elif "format" not in made and is_bounded:
            made["pattern"] = of_length(least, most)
            return made
        length = _LENGTHS.get(form or "", -1)
        if is_bounded and not least <= length <= (length if most is None else most):
            self.left.add("minLength and maxLength beside pattern and format")
        return made

    def _number(self, base: ObjectSchema) -> Schema:
        step = Fraction(str(base["multipleOf"])) if "multipleOf" in base else None
        if step is not None and step.denominator == 1:
            return self._integer(base)
        if step is not None:
            self.left.add("multipleOf")
        made = {key: base[key] for key in base if key != "multipleOf"}
        low = max(
            (made[key] for key in ("minimum", "exclusiveMinimum") if key in made), default=None
        )
        high = min(
            (made[key] for key in ("maximum", "exclusiveMaximum") if key in made), default=None
        )
        if low is not None and high is not None:
            is_open = made.get("exclusiveMinimum") == low or made.get("exclusiveMaximum") == high
            if low > high or (low == high and is_open):
                raise EmptyError
            if high - low < 1e-5:  # xgrammar writes six digits
                return {"enum": [low if low == high else (low + high) / 2]}
        return made | {"type": "number"}

    def _integer(self, base: ObjectSchema) -> Schema:
        lows = [math.ceil(base["minimum"])] if "minimum" in base else []
        lows += [math.floor(base["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in base else []
        highs = [math.floor(base["maximum"])] if "maximum" in base else []
        highs += [math.ceil(base["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in base else []
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and high is not None and low > high:
            raise EmptyError
        step = Fraction(str(base.get("multipleOf", 1)))
        made: ObjectSchema = {"type": "integer"}
        if step.numerator != 1:  # of an integer, each multiple of 1/n is one of n/n
            every = step.numerator
            if low is not None and high is not None and (high - low) // every <= MAX_MULTIPLES:
                values = [*range(-(-low // every) * every, high + 1, every)]
                if not values:
                    raise EmptyError
                return {"enum": values}
            if low is None and high is None and every <= MAX_MULTIPLES:
                return made | {"multipleOf": every}
            self.left.add("multipleOf")
        for key, bound, worst in (("minimum", low, -_BEYOND), ("maximum", high, _BEYOND)):
            if bound is None:
                continue
            if abs(bound) < _BEYOND:
                made[key] = bound
            elif (bound > 0) == (worst > 0):
                made[key] = worst - (1 if worst > 0 else -1)
            else:
                self.left.add(key)
        return made

    def _array(self, base: ObjectSchema) -> Schema:
        heads = [self.write(it) for it in base.get("prefixItems", ())]
        rest = self.write(base.get("items", True))
        least, most = _bounds(base, "minItems", "maxItems")
        if False in heads:
            rest, heads = False, heads[: heads.index(False)]
        if most is not None and len(heads) >= most:
            rest, heads = False, heads[:most]
        if rest is False and least > len(heads):
            raise EmptyError
        if base.get("uniqueItems") and most not in (0, 1) and (rest is not False or heads[1:]):
            self.left.add("uniqueItems")
        made: ObjectSchema = {"type": "array", "items": rest}
        if heads:
            made["prefixItems"] = heads
        made |= {"minItems": least} if least else {}
        made |= {"maxItems": most} if most is not None and rest is not False else {}
        return made

    def _object(self, base: ObjectSchema) -> Schema:
        described = base.get("patternProperties", {})
        if len(described) == 1 and "properties" not in base and described.keys() <= _ANY_NAME:
            base = {key: value for key, value in base.items() if key != "patternProperties"}
            base["additionalProperties"] = next(iter(described.values()))
        others = self.write(base.get("additionalProperties", base.get(UNEVALUATED, True)))
        properties = {name: self.write(it) for name, it in base.get("properties", {}).items()}
        required, patterns = [*base.get("required", ())], dict[str, Schema]()
        for pattern, it in base.get("patternProperties", {}).items():
            try:
                patterns[written_in_json(pattern)] = self.write(it)
            except PatternError:
                self.left.add("patternProperties")
        if base.get("patternProperties"):
            others = self._beside_patterns(base, properties, patterns, others)
        if "propertyNames" in base:
            others = self._beside_names(base["propertyNames"], properties, patterns, others)
        if any(it is False for it in properties.values()):
            others = False
            properties = {name: it for name, it in properties.items() if it is not False}
        missing = [name for name in required if name not in properties]
        if missing and patterns:
            self.left.add("required beside patternProperties")
        elif missing and others is False:
            raise EmptyError
        elif missing:
            properties |= dict.fromkeys(missing, others)
        made: ObjectSchema = {"type": "object", "additionalProperties": others}
        made |= {"properties": properties} if properties else {}
        made |= {"patternProperties": patterns} if patterns else {}
        needed = [name for name in required if name in properties]
        made |= {"required": needed} if needed else {}
        self._bound_count(base, made, len(required))
        names = msgspec.json.encode(sorted(properties))
        is_odd = properties.keys() & _KEYS_LEFT_OUT or b"\\" in names
        return _told_apart(made, msgspec.json.encode([made])) if is_odd else made

    def _beside_patterns(
        self,
        base: ObjectSchema,
        properties: ObjectSchema,
        patterns: dict[str, Schema],
        others: Schema,
    ) -> Schema:
        """Return what further properties may be beside those that patterns describe.

        Where nothing is said of them, there are none: xgrammar takes any key for one of them.
        """
        starts = [_start(pattern) for pattern in base["patternProperties"]]
        names = [*starts, *properties]
        clash = any(start is None for start in starts) and len(names) > 1
        clash = clash or any(
            name != start and name.startswith(start or "\0")
            for start in starts
            for name in names
            if name
        )
        if clash or len({*starts}) < len(starts):
            self.left.add("patternProperties")
        for pattern in [it for it, value in patterns.items() if value is False]:
            del patterns[pattern]
        if "additionalProperties" in base and others not in ({}, False):
            self.left.add("patternProperties")
            patterns.clear()
            return others
        return False

    def _beside_names(
        self, names: Schema, properties: ObjectSchema, patterns: dict[str, Schema], others: Schema
    ) -> Schema:
        """Return what further properties may be, given what all names must follow."""
        if patterns:
            self.left.add("propertyNames")
            return others
        form = self.write({"allOf": [{"type": "string"}, names]})
        if isinstance(form, dict) and "$ref" in form:
            form = self.named[form["$ref"].rpartition("/")[2]]
        if form is False or "enum" in (form or ()):
            allowed = form["enum"] if form else []
            for name in [it for it in properties if it not in allowed]:
                properties[name] = False
            if others is not False:
                properties |= {name: others for name in allowed if name not in properties}
            return False
        if form == {"type": "string"}:
            return others
        if properties or "pattern" not in (form or ()) or others is False:
            if properties or others is not False:
                self.left.add("propertyNames")
            return others
        patterns[form["pattern"]] = others
        return False

    def _bound_count(self, base: ObjectSchema, made: ObjectSchema, num_required: int) -> None:
        least, most = _bounds(base, "minProperties", "maxProperties")
        is_closed = made["additionalProperties"] is False and "patternProperties" not in made
        if most is not None and most < num_required:
            raise EmptyError
        if is_closed and least > len(made.get("properties", ())):
            raise EmptyError
        if least > num_required:
            if least > 1 and not is_closed:  # a further name may come twice
                self.left.add("minProperties")
            made["minProperties"] = least
        if most is not None and not (is_closed and most >= len(made.get("properties", ()))):
            made["maxProperties"] = most


_WRITERS: dict[str, Callable[[_Writer, ObjectSchema], Schema]] = {
    "string": _Writer._string,
    "number": _Writer._number,
    "integer": _Writer._integer,
    "array": _Writer._array,
    "object": _Writer._object,
    "boolean": lambda _, base: {"type": "boolean"},
    "null": lambda _, base: {"type": "null"},
}


def _bounds(base: ObjectSchema, least: str, most: str) -> tuple[int, int | None]:
    """Return how many there must be and may be; None if that is not bounded."""
    low, high = int(base.get(least, 0)), base.get(most)
    if low > MAX_COUNT or (high is not None and low > high):
        raise EmptyError
    return low, None if high is None or high > MAX_COUNT else int(high)


def _start(pattern: str) -> str | None:
    """Return the text that names begin with to match a pattern; None if it is not told."""
    text = pattern.removeprefix("^")
    is_plain = all(it.isalnum() or it in "-_" for it in text)
    return text if pattern != text and text and is_plain else None


def _told_apart(made: ObjectSchema, told: bytes) -> ObjectSchema:
    """Mark a schema, so that xgrammar does not take another for the same one."""
    return made | {"$anchor": "a" + hashlib.blake2b(told, digest_size=8).hexdigest()}


def _may_overlap(one: Facts, other: Facts) -> bool:
    types, others = one[0], other[0]
    if types and others and not types & others:
        return False
    return all(one[1][name] & other[1][name] for name in one[1].keys() & other[1].keys())


def _is_exact(value: Any) -> bool:
    """Whether xgrammar writes all numbers of a value as they are."""
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    if isinstance(value, bool) or not isinstance(value, int):
        return True
    return abs(value) < _BEYOND
