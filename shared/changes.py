"""What a chapter changes against the one before, read from the source of both: the page CHANGES.md.

It parses and never imports. A chapter's parts are the classes and functions, but `main`, of its `04_engine.py` and of
its modules without a number; methods are compared along the classes that they are inherited from.

    two folders -> Part a class or function -> replaced, added, inherited, equal -> Markdown
"""

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared.chapters import ROOT, Chapter

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Part:
    """A class or function at the top of a module."""

    name: str
    file: str  # as chapter/module.py
    text: str
    summary: str
    bases: tuple[str, ...] = ()
    is_class: bool = False
    methods: dict[str, str] = field(default_factory=dict)  # name -> source


def parts(folder: Path) -> dict[str, Part]:
    """The parts of the chapter in `folder`, in the order of its files."""
    files = [folder / "04_engine.py", *sorted(f for f in folder.glob("[a-z]*.py") if f.name != "engine.py")]
    return {part.name: part for file in files for part in parts_of(file.read_text(), f"{folder.name}/{file.name}")}


def parts_of(source: str, file: str) -> Iterator[Part]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | Function) and node.name != "main":
            text = segment(source, node)
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base) for base in node.bases)
                methods = {each.name: segment(source, each) for each in node.body if isinstance(each, Function)}
                yield Part(node.name, file, text, summary, bases, True, methods)
            else:
                yield Part(node.name, file, text, summary)


def segment(source: str, node: ast.ClassDef | Function) -> str:
    """A definition with its decorators, as if it stood at the left margin."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in lines)


def same(one: str, other: str) -> bool:
    """Whether two definitions do the same: comments, layout and docstrings don't count."""
    return code(one) == code(other)


def code(definition: str) -> str:
    tree = ast.parse(definition)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def methods(part: Part, known: dict[str, Part]) -> dict[str, tuple[str, str]]:
    """All methods that a class has from the `known` ones: name -> the class it comes from, its source."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(part.bases):
        if base in known:
            found |= methods(known[base], known)
    return found | {name: (part.name, source) for name, source in part.methods.items()}


@dataclass
class Change:
    """A function that is another one than before."""

    name: str
    was: str
    old: str
    new: str

    def diff(self) -> str:
        lines = difflib.unified_diff(self.old.splitlines(), self.new.splitlines(), n=1000, lineterm="")
        return "\n".join(list(lines)[3:])  # without the head: the heading says what is compared


def compare(old: dict[str, Part], new: dict[str, Part]) -> tuple[list[list[str]], list[Change]]:
    """A row of the table for each new part, and every function that has changed. `old`: of all chapters before."""
    rows, changes = [], []
    known = old | new
    for part in new.values():
        what = "new"
        before: dict[str, tuple[str, str]] = {}
        if part.is_class:
            inherited = [base for base in part.bases if base in known]
            before = {name: each for base in reversed(inherited) for name, each in methods(known[base], known).items()}
            ours = [base for base in inherited if base in old]
            if inherited:
                what = f"extends {listed(inherited)}" + ("" if ours else " of this chapter")
        anew = part.name in old and what == "new"  # written again under the same name, and inherits nothing of ours
        if anew:
            what = "as before" if same(old[part.name].text, part.text) else "changed"
            before = methods(old[part.name], old)
        replaced = [name for name in part.methods if name in before and not same(before[name][1], part.methods[name])]
        changes += [
            Change(f"{part.name}.{name}", ".".join((before[name][0], name)), before[name][1], part.methods[name])
            for name in replaced
        ]
        added = [name for name in part.methods if name not in before]
        gone = [name for name in before if name not in part.methods] if anew else []
        kept = len(before) - len(replaced) - len(gone)
        if what == "changed" and not (replaced or added or gone):  # a function, or the fields of a class
            changes.append(Change(part.name, part.name, old[part.name].text, part.text))
        details = [what]
        if before:
            details += [f"replaces {listed(replaced)}"] if replaced else []
            details += [f"adds {listed(added)}"] if added else []
            details += [f"drops {listed(gone)}"] if gone else []
            details += [f"keeps {kept} method{'s' if kept > 1 else ''}"] if kept else []
        file = Path(part.file).name
        rows.append([f"`{part.name}`", f"[{file}]({file})", part.summary.replace("|", "\\|"), "; ".join(details)])
    return rows, changes


def engine_of(chapter: dict[str, Part]) -> Part:
    """The class that a chapter is about: the last one in 04_engine.py whose name ends in Engine."""
    return [part for part in chapter.values() if part.file.endswith("04_engine.py") and part.name.endswith("Engine")][
        -1
    ]


def engine_changes(old: dict[str, Part], new: dict[str, Part]) -> tuple[list[Change], list[str], list[str]]:
    """Two engines that don't inherit from each other, method by method: changed, equal, gone."""
    before, after = methods(engine_of(old), old), methods(engine_of(new), new)
    both = [name for name in after if name in before]
    equal = [name for name in both if same(before[name][1], after[name][1])]
    changed = [
        Change(f"{after[n][0]}.{n}", f"{before[n][0]}.{n}", before[n][1], after[n][1]) for n in both if n not in equal
    ]
    return changed, equal, [name for name in before if name not in after]


def imported(folder: Path) -> dict[str, list[str]]:
    """What a chapter takes from each earlier one without a change."""
    taken: dict[str, set[str]] = {}
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ch"):
                chapter = str(node.module).split(".")[0]
                if chapter != folder.name:
                    taken.setdefault(chapter, set()).update(alias.name for alias in node.names)
    return {chapter: sorted(taken[chapter]) for chapter in sorted(taken)}


def page(before: Chapter, after: Chapter, root: Path = ROOT) -> str:
    """CHANGES.md of the chapter `after`."""
    folders = sorted(f for f in root.glob("ch[0-9][0-9]_*") if f.name < after.folder)
    earlier = {name: part for folder in folders for name, part in parts(folder).items()}
    old, new = parts(root / before.folder), parts(root / after.folder)
    rows, changes = compare(earlier, new)
    lines = [
        f"# Chapter {after.number} against chapter {before.number}",
        "",
        "Written by `python -m shared.chapters` from the source; a test fails when it is stale.",
        "",
        "## Classes and functions",
        "",
        "| name | file | what it is | against the chapters before |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
    one, other = engine_of(old), engine_of(new)
    if one.name not in other.bases:
        changed, equal, gone = engine_changes(old, new)
        changes += changed
        lines += [
            f"`{other.name}` takes the place of `{one.name}`. Of its methods, "
            f"{listed([change.was.split('.')[1] for change in changed])} changed, "
            f"{listed(equal)} stayed as {'they were' if len(equal) > 1 else 'it was'}, "
            f"{listed(gone)} {'are' if len(gone) > 1 else 'is'} gone.",
            "",
        ]
    taken = imported(root / after.folder)
    if taken:
        lines += ["## Taken over unchanged", ""]
        lines += [f"- from {chapter}: {listed(names)}" for chapter, names in taken.items()]
        lines += [""]
    lines += ["## Same name, other code", ""] if changes else []
    for change in changes:
        title = f"### `{change.name}`" + (f", was `{change.was}`" if change.was != change.name else "")
        lines += [title, "", "```diff", change.diff(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
