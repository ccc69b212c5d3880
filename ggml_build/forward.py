"""C forwarders for backends loaded at run time (`--portable`): `lib` has the same names in every build.

A portable build cannot link a backend: which CPU variant fits is known only on the user's machine. Each
function of a backend's header becomes a forwarder that looks its symbol up in the loaded module, once.
Before the module is loaded it returns zero. Knows the cdef files only. Upstream: ggml-backend-reg.cpp loads
the modules.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from pathlib import Path

from pycparser import c_ast, c_generator

from ggml_build import BuildError
from ggml_build.declarations import read_functions
from ggml_build.extension import BACKEND_HEADERS, CORE_HEADERS

REGISTRY_NAMES = {
    "cpu": "CPU",
    "rpc": "RPC",
    "blas": "BLAS",
    "vulkan": "Vulkan",
    "cuda": "CUDA",
    "metal": "MTL",
}
RESOLVER = """
#include <dlfcn.h>

/* The module that a registered backend came from, asked for one of its symbols. */
static void *pyggmlkv_resolve(const char *registry_name, const char *symbol) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name(registry_name);
    Dl_info info;
    void *module;
    if (!reg || !dladdr((void *) reg, &info) || !info.dli_fname) {
        return NULL;
    }
    module = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return module ? dlsym(module, symbol) : NULL;
}
"""


def forwarders(cdef: Path, backends: Iterable[str]) -> str:
    """C text that stands in for every function of the backends' headers. Raises: BuildError on Windows."""
    if sys.platform == "win32":
        raise BuildError("--portable is not supported on Windows yet: build without it")
    before = [cdef / name for name in CORE_HEADERS]
    pieces = [RESOLVER]
    for backend in backends:
        file = cdef / BACKEND_HEADERS[backend]
        pieces += [_forwarder(node, REGISTRY_NAMES[backend]) for node in read_functions(file, before)]
        before.append(file)
    return "\n".join(pieces)


def _forwarder(function: c_ast.Decl, registry_name: str) -> str:
    """One function. The macro after it sends cffi's generated call there and not to the header's symbol."""
    generator = c_generator.CGenerator()
    name = f"pyggmlkv_forward_{function.name}"
    parameters = [p for p in (function.type.args.params if function.type.args else []) if not _is_void(p)]
    for index, parameter in enumerate(parameters):
        _name(parameter, f"a{index}")
    result = generator.visit(_named(function.type.type, ""))
    inside = ", ".join(generator.visit(p) for p in parameters) or "void"
    call = f"target({', '.join(f'a{index}' for index in range(len(parameters)))})"
    if result.strip() == "void":
        missing, call = "return;", f"{call};"
    else:
        missing, call = f"{{ static {result} zero; return zero; }}", f"return {call};"
    return (
        f"static {result} {name}({inside}) {{\n"
        f"    static {result} (*target)({inside});\n"
        f'    if (!target) *(void **) &target = pyggmlkv_resolve("{registry_name}", "{function.name}");\n'
        f"    if (!target) {missing}\n"
        f"    {call}\n}}\n#define {function.name} {name}"
    )


def _is_void(parameter: c_ast.Node) -> bool:
    return str(c_generator.CGenerator().visit(parameter)).strip() == "void"


def _named(node: c_ast.Node, name: str) -> c_ast.Node:
    node = copy.deepcopy(node)
    _name(node, name)
    return node


def _name(node: c_ast.Node, name: str) -> None:
    """Give the declared thing this name, down to where C keeps it."""
    while not isinstance(node, c_ast.TypeDecl):
        if isinstance(node, c_ast.Decl):
            node.name = name
        node = node.type
    node.declname = name
