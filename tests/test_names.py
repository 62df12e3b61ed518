"""Names are nouns and verbs: the share of pronouns, participles and adverbs only shrinks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (ROOT / "ckpt", ROOT / "backends")

MAX_UNCLEAR = 201
"""The number of unclear names that the product binds. It only shrinks."""

PRONOUNS = """
    all any another both each either everything it its many me mine more most neither none nothing
    one other others ours same several some such that theirs them these they this those two what
    which who whom whose
"""
ADVERBS = """
    about above after again alone already alike apart around aside at away back before behind below
    beside between beyond by down during elsewhere ever everywhere far farther first firsts for
    here how inside into late later meanwhile never now off often on once only out outside over
    since so soon still then there thus to together too under until up when where why with yet
"""
IRREGULAR = """
    begun borne bought bound broken brought built caught chosen cut done drawn driven fallen fed
    felt forgotten found frozen given gone had heard held hidden kept known laid left lent lost made
    meant met overwritten paid proven risen said seen sent shown shut sold spent stuck
    taken taught thought told torn unread unseen withdrawn woken won worn written
"""

NOUNS = """
    bring embed encoding ending feed finding heading holding listing mapping meaning need padding
    ping ring seed setting speed string striping succeed thing timing training
"""
TERMS = "cached closed committed missing out pending required sharded"
"""Participles and adverbs that the field uses as names: ``file.closed``, an ``out`` argument."""

UNCLEAR = frozenset(f"{PRONOUNS} {ADVERBS} {IRREGULAR}".split())
CLEAR = frozenset(f"{NOUNS} {TERMS}".split())
PARTICIPLE = re.compile(r"[a-z]{2,}(ed|ing)")


def bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name
            case _:
                pass


def is_unclear(name: str) -> bool:
    word = name.strip("_").lower()
    if word in CLEAR or name.startswith("__"):
        return False
    return word in UNCLEAR or PARTICIPLE.fullmatch(word) is not None


def unclear_names() -> Counter[str]:
    trees = (ast.parse(path.read_text()) for top in PRODUCT for path in sorted(top.rglob("*.py")))
    return Counter(name for tree in trees for name in bound_names(tree) if is_unclear(name))


def test_pronouns_participles_and_adverbs_become_no_more() -> None:
    unclear = unclear_names()
    assert unclear.total() <= MAX_UNCLEAR, unclear.most_common(20)
