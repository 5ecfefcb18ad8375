"""The pages made from the source: the README's table and each chapter's CHANGES.md say what is there."""

from itertools import pairwise

import pytest

from shared.changes import compare, engine_changes, engine_of, page, parts, parts_of, same
from shared.chapters import BEGIN, CHAPTERS, ROOT, with_table

OLD = '''
class Cache:
    def store(self): ...
    def read(self): return 1

class OldEngine(Cache):
    def step(self):
        """Do it."""
        return 1

def helper(): return 1
'''

NEW = """
class Cache:
    def store(self): ...
    def read(self): return 2

class NewEngine(OldEngine):
    def step(self): return 2
    def more(self): ...

def helper(): return 2
"""


def chapter(source: str) -> dict:
    return {part.name: part for part in parts_of(source, "chXX/04_engine.py")}


def test_what_is_replaced_added_and_kept_by_hand():
    rows, changes = compare(chapter(OLD), chapter(NEW))
    assert [row[-1] for row in rows] == [
        "changed; replaces `read`; keeps 1 method",
        "extends `OldEngine`; replaces `step`; adds `more`; keeps 2 methods",
        "changed",
    ]
    assert [change.name for change in changes] == ["Cache.read", "NewEngine.step", "helper"]
    assert changes[0].diff().splitlines() == ["-def read(self): return 1", "+def read(self): return 2"]


def test_a_class_that_is_written_again():
    """Of what it left out, it kept nothing; fields alone, or a base from elsewhere, were told as new or not at all."""
    old = chapter("class A:\n    x: int\nclass B:\n    def f(self): ...\n    def g(self): ...\nclass C(Module): ...")
    new = chapter("class A:\n    y: int\nclass B:\n    def f(self): ...\nclass C(Module): ...")
    rows, changes = compare(old, new)
    assert [row[-1] for row in rows] == ["changed", "changed; drops `g`; keeps 1 method", "as before"]
    assert [change.diff().splitlines()[-2:] for change in changes] == [["-    x: int", "+    y: int"]]


def test_a_readme_without_the_marks_is_left_alone():
    """All that came after the first mark was lost."""
    with pytest.raises(ValueError, match="end of chapters"):
        with_table(f"# Title\n{BEGIN}\nmore")


def test_comments_and_docstrings_are_no_change():
    """Each chapter explains the same code in its own words."""
    assert same('def f():\n    """One."""\n    return 1', "def f():\n    return 1  # the same")
    assert not same("def f(): return 1", "def f(): return 2")


def test_engines_that_do_not_inherit_are_compared_method_by_method():
    old = chapter("class OldEngine:\n    def a(self): return 1\n    def b(self): return 1\n    def c(self): ...")
    new = chapter("class NewEngine:\n    def a(self): return 2\n    def b(self): return 1\n    def d(self): ...")
    changed, equal, gone = engine_changes(old, new)
    assert ([change.was for change in changed], equal, gone) == (["OldEngine.a"], ["b"], ["c"])


@pytest.mark.parametrize(("before", "after"), list(pairwise(CHAPTERS)), ids=lambda c: c.name)
def test_the_page_of_each_chapter_is_up_to_date(before, after):
    """`python -m shared.chapters` writes it."""
    assert (ROOT / after.folder / "CHANGES.md").read_text() == page(before, after)


@pytest.mark.parametrize(("before", "after"), list(pairwise(CHAPTERS)), ids=lambda c: c.name)
def test_functions_of_the_same_name_are_equal_or_listed(before, after):
    """A copy that had drifted from the chapter before it, without a word."""
    old, new, listed = parts(ROOT / before.folder), parts(ROOT / after.folder), page(before, after)
    for name in old.keys() & new.keys():
        methods = [m for m in new[name].methods if m in old[name].methods] if new[name].is_class else []
        drifted = [f"{name}.{m}" for m in methods if not same(old[name].methods[m], new[name].methods[m])]
        if not new[name].is_class and not same(old[name].text, new[name].text):
            drifted.append(name)
        assert all(f"### `{each}`" in listed for each in drifted)


def test_every_chapter_has_an_engine():
    assert [engine_of(parts(ROOT / c.folder)).name for c in CHAPTERS] == [
        "BaselineEngine", "KVCacheEngine", "AsyncEngine", "PagedEngine", "Engine",
    ]  # fmt: skip


def test_the_readme_has_the_table_of_chapters():
    """`python -m shared.chapters` writes it."""
    readme = (ROOT / "README.md").read_text()
    assert readme == with_table(readme)
    assert sorted(path.name for path in ROOT.glob("ch[0-9][0-9]_*")) == [c.folder for c in CHAPTERS]
