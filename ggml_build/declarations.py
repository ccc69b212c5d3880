"""Reads C declarations, from upstream headers and from our cdef files, into one comparable form.

Headers go through the compiler's preprocessor with stand-ins for the C library, so line markers tell which
header a declaration came from; cdef files have cffi's dots taken out. Does not judge: scripts/check_cdef.py
compares.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycparser import c_ast, c_generator, c_parser

from ggml_build import BuildError

STAND_INS = {
    "stdbool.h": "typedef _Bool bool;",
    "stddef.h": "typedef unsigned long size_t;",
    "stdint.h": "".join(
        f"typedef signed {c} int{n}_t; typedef unsigned {c} uint{n}_t;"
        for n, c in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))
    ),
    "stdio.h": "typedef struct FILE FILE;",
}
PRELUDE = " ".join(STAND_INS.values())
CONSTANT = re.compile(r'\(?-?(0[xX][0-9a-fA-F]+|\d+)\)?|"[^"]*"')


@dataclass(frozen=True)
class Declaration:
    """One named thing.

    `shape` must agree: a canonical type, an enum's names, or a struct's (name, type) pairs.
    """

    kind: str
    name: str
    header: str
    shape: tuple[object, ...]
    text: str


Declarations = dict[tuple[str, str], Declaration]


def read_headers(folder: Path, names: Sequence[str]) -> Declarations:
    """What these headers declare themselves, not what they include. Raises: BuildError when one is not C."""
    text, macros = _preprocess(folder, names)
    found = _collect(_parse(text, "the headers"), set(names))
    for header, name, value in macros:
        if CONSTANT.fullmatch(value) and not name.startswith("_"):
            kind = "string" if value.startswith('"') else "constant"
            found[kind, name] = Declaration(kind, name, header, (), f"#define {name} {value}")
    return found


def read_cdefs(files: Iterable[Path]) -> Declarations:
    """What cdef files declare together, in the order cffi gets them. Raises: BuildError when one is not C."""
    files = list(files)
    found = _collect(_parse(_plain_c(files), "cdef"), {file.name for file in files})
    for file in files:
        for name in re.findall(r"^#define\s+(\w+)\s+\.\.\.", file.read_text(), flags=re.MULTILINE):
            found["constant", name] = Declaration("constant", name, file.name, (), f"#define {name} ...")
    return found


def read_functions(cdef: Path, before: Iterable[Path]) -> list[c_ast.Decl]:
    """The functions of one cdef file as syntax trees; `before` are the files that it builds upon."""
    nodes = _parse(_plain_c([*before, cdef]), cdef.name).ext
    return [node for node in nodes if _is_function(node) and node.coord.file == cdef.name]


def _is_function(node: c_ast.Node) -> bool:
    return isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl)


def _plain_c(files: Iterable[Path]) -> str:
    """The cdef files as one C text with line markers: without comments, constants and cffi's dots."""
    pieces = ['# 1 "prelude"', PRELUDE]
    for file in files:
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), file.read_text(), flags=re.DOTALL)
        text = re.sub(r"^#define.*$", "", text, flags=re.MULTILINE)
        text = text.replace('extern "Python"', "").replace("= ...", "").replace("[...]", "[]")
        text = re.sub(r",\s*\.\.\.(\s*\})", r"\1", text)  # an enum's dots; a function's are before ")"
        text = re.sub(r"^\s*\.\.\.;", "", text, flags=re.MULTILINE)
        pieces.append(f'# 1 "{file.name}"\n{text}')
    return "\n".join(pieces)


def _preprocess(folder: Path, names: Sequence[str]) -> tuple[str, list[tuple[str, str, str]]]:
    """(C text with line markers, the macros without parameters as (header, name, value))."""
    compiler = os.environ.get("CC", "cc").split()
    with tempfile.TemporaryDirectory() as temporary:
        for name, text in STAND_INS.items():
            (Path(temporary) / name).write_text(f"#pragma once\n{text}\n")
        command = [*compiler, "-E", "-dD", "-nostdinc", "-undef", "-I", temporary, "-I", str(folder)]
        includes = "".join(f'#include "{name}"\n' for name in names)
        try:
            result = subprocess.run(
                [*command, "-D_Noreturn=", "-x", "c", "-"],
                input=includes,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise BuildError(f"the preprocessor {compiler[0]} did not start: {error}") from error
    if result.returncode:
        raise BuildError(f"the preprocessor refused the headers in {folder}: {result.stderr.strip()[-500:]}")
    lines, macros, current = [], [], ""
    for line in result.stdout.splitlines():
        if marker := re.match(r'#\s+\d+\s+"([^"]*)"', line):
            current = Path(marker.group(1)).name
        if line.startswith(("#define", "#undef", "#pragma")):
            if current in names and (macro := re.match(r"#define (\w+) (.*)$", line)):
                macros.append((current, macro.group(1), macro.group(2).strip()))
            line = ""
        lines.append(line)
    return "\n".join(lines), macros


def _parse(text: str, name: str) -> c_ast.FileAST:
    try:
        return c_parser.CParser().parse(text, name)
    except c_parser.ParseError as error:
        raise BuildError(f"{name} is not C that pycparser reads: {error}") from error


def _collect(tree: c_ast.FileAST, files: set[str]) -> Declarations:
    found: Declarations = {}
    for node in tree.ext:
        header = Path(node.coord.file or "").name if node.coord else ""
        declaration = _declaration(node, header) if header in files else None
        if declaration is None:
            continue
        key = (declaration.kind, declaration.name)
        if key not in found or declaration.shape:  # a full struct is not replaced by a forward declaration
            found[key] = declaration
    return found


def _declaration(node: c_ast.Node, header: str) -> Declaration | None:
    text = re.sub(r"\s+", " ", c_generator.CGenerator().visit(node)).strip()
    if isinstance(node, c_ast.Typedef):
        inner = getattr(node.type, "type", None)
        shape = _fields(inner) if isinstance(inner, c_ast.Struct) and inner.decls else (_type(node.type),)
        return Declaration("typedef", node.name, header, shape, text)
    if not isinstance(node, c_ast.Decl):
        return None
    if isinstance(node.type, c_ast.Enum):
        names = tuple(item.name for item in node.type.values.enumerators)
        return Declaration("enum", node.type.name, header, names, text)
    if isinstance(node.type, c_ast.Struct):
        return Declaration("struct", node.type.name, header, _fields(node.type), text)
    if isinstance(node.type, c_ast.FuncDecl):
        return Declaration("function", node.name, header, (_type(node.type),), text)
    if _type(node.type) == "pointer const to char":
        return Declaration("string", node.name, header, (), text)
    return Declaration("variable", node.name, header, (_type(node.type),), text)


def _fields(struct: c_ast.Struct) -> tuple[object, ...]:
    fields: list[object] = []
    for item in struct.decls or ():
        inner = getattr(item.type, "type", None)
        nested = isinstance(inner, c_ast.Struct) and inner.decls
        fields.append((item.name, _fields(inner) if nested else _type(item.type)))
    return tuple(fields)


def _type(node: c_ast.Node) -> str:
    """A type in words, without parameter names and `restrict`; an array without a length is `array ...

    Of`.
    """
    if isinstance(node, (c_ast.Decl, c_ast.Typename)):
        return _type(node.type)
    if isinstance(node, c_ast.PtrDecl):
        return " ".join(("pointer", *_qualifiers(node.quals), "to", _type(node.type)))
    if isinstance(node, c_ast.ArrayDecl):
        length = c_generator.CGenerator().visit(node.dim).replace(" ", "") if node.dim else "..."
        return f"array {length} of {_type(node.type)}"
    if isinstance(node, c_ast.FuncDecl):
        parameters = node.args.params if node.args else []
        inside = ", ".join("..." if isinstance(p, c_ast.EllipsisParam) else _type(p) for p in parameters)
        return f"function ({inside}) returning {_type(node.type)}"
    if isinstance(node, c_ast.TypeDecl):
        return " ".join((*_qualifiers(node.quals), _type(node.type)))
    if isinstance(node, c_ast.IdentifierType):
        return " ".join(node.names)
    if isinstance(node, (c_ast.Struct, c_ast.Enum, c_ast.Union)):
        return f"{type(node).__name__.lower()} {node.name}"
    raise BuildError(f"a C type that this reader does not know: {type(node).__name__}")


def _qualifiers(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != "restrict"]
