"""Which forms of a message's content a chat template reads: text, or a list of parts. Told from its Jinja tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from jinja2 import TemplateError, nodes


@dataclass(frozen=True)
class ContentFormat:
    """text: contents that are text. parts: contents that are lists of parts."""

    text: bool = True
    parts: bool = False


@lru_cache(maxsize=32)
def content_format(template: str) -> ContentFormat:
    """The forms that a template reads.

    One that loops over contents reads parts, which is what vLLM looks for, too ("openai" in its
    `--chat-template-content-format`); it reads text as well if it tests whether a content is a string.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:  # with the tags that transformers adds to Jinja's
        tree = _compile_jinja_template(template).environment.parse(template)
    except (TemplateError, RecursionError):  # rendering it says what is wrong
        return ContentFormat()
    names = _names(tree)
    if not any(Kind.CONTENT in _kinds(loop.iter, names) and _reads_parts(loop) for loop in tree.find_all(nodes.For)):
        return ContentFormat()
    tests = (test for test in tree.find_all(nodes.Test) if test.name == "string")
    return ContentFormat(text=any(Kind.CONTENT in _kinds(test.node, names) for test in tests), parts=True)


def _reads_parts(loop: nodes.For) -> bool:
    """Whether the items of a loop may be parts, which have a type or a text. Templates for Mistral find calls there."""
    keys = {node.attr for node in loop.find_all(nodes.Getattr) if node.node == _loaded(loop.target)}
    items = [node for node in loop.find_all(nodes.Getitem) if node.node == _loaded(loop.target)]
    keys |= {node.arg.value for node in items if isinstance(node.arg, nodes.Const)}
    return not keys or bool(keys & {"type", "text"})


def _loaded(target: nodes.Node) -> nodes.Node | None:
    """The name of a loop's item as an expression has it."""
    return nodes.Name(target.name, "load") if isinstance(target, nodes.Name) else None


class Kind(Enum):
    """What an expression of a template may stand for. CONTENT: of a message."""

    MESSAGES = auto()
    MESSAGE = auto()
    CONTENT = auto()


Kinds = frozenset[Kind]
NOTHING: Kinds = frozenset()


def _names(tree: nodes.Template) -> dict[str, Kinds]:
    """What each name may stand for anywhere in a template: scopes are not told apart."""
    names: dict[str, Kinds] = {"messages": frozenset({Kind.MESSAGES})}
    bindings = list(_bindings(tree))
    grows = True
    while grows:
        grows = False
        for name, value, is_item in bindings:
            known, found = names.get(name, NOTHING), _kinds(value, names)
            names[name] = known | (_items(found) if is_item else found)
            grows = grows or names[name] != known
    return names


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node, bool]]:
    """Names and what they are bound to by loops, assignments and calls of macros; whether to an item of it."""
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop.target.name, loop.iter, True
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node, False
    parameters = {macro.name: [arg.name for arg in macro.args] for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in parameters:
            for name, value in zip(parameters[call.node.name], call.args, strict=False):
                yield name, value, False
            for keyword in call.kwargs:
                yield keyword.key, keyword.value, False


def _kinds(node: nodes.Node | None, names: dict[str, Kinds]) -> Kinds:
    """What an expression may stand for."""
    if isinstance(node, nodes.Name):
        return names.get(node.name, NOTHING)
    if isinstance(node, nodes.Filter):
        found = _kinds(node.node, names)
        return _items(found) if node.name in ("first", "last") else found
    if isinstance(node, nodes.CondExpr):
        return _kinds(node.expr1, names) | _kinds(node.expr2, names)
    if isinstance(node, nodes.Or | nodes.And | nodes.Add):
        return _kinds(node.left, names) | _kinds(node.right, names)
    if isinstance(node, nodes.Getattr):
        return _field(_kinds(node.node, names), node.attr)
    if isinstance(node, nodes.Getitem):
        found = _kinds(node.node, names)
        if isinstance(node.arg, nodes.Slice):
            return found
        return _field(found, node.arg.value) if isinstance(node.arg, nodes.Const) else _items(found)
    return NOTHING


def _field(kinds: Kinds, key: object) -> Kinds:
    """What is found under a key of a message, or an index of the messages."""
    if key == "content":
        return frozenset({Kind.CONTENT}) if Kind.MESSAGE in kinds else NOTHING
    return _items(kinds) if isinstance(key, int) else NOTHING


def _items(kinds: Kinds) -> Kinds:
    return frozenset({Kind.MESSAGE}) if Kind.MESSAGES in kinds else NOTHING
