"""Records what was built: `_build_info.json` ships with the package, `build/ggml.json` stays in the checkout.

The first has no path of this machine in it; the second says where the install prefix lies and how to build
the same again. Does not build anything.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ggml_build.native import BuildOptions, NativeBuild
from ggml_build.source import Source

SHIPPED = "_build_info.json"


def shipped(source: Source, options: BuildOptions, native: NativeBuild, fingerprint: str) -> dict[str, Any]:
    """What `_build_info.json` says: ggml's version and commit, the flags, the compiler."""
    cache = _cmake_cache(native.build)
    return {
        "ggml_version": source.version,
        "ggml_commit": source.commit,
        "ggml_source": source.kind,
        "backends": list(options.backends),
        "backend_dl": options.portable,
        "native": not options.portable,
        "build_type": options.build_type,
        "openmp": cache.get("GGML_OPENMP_ENABLED") == "ON",
        "compiler": _compiler(native.build),
        "flags": {name: value for name, value in options.cmake_flags().items() if name.startswith("GGML_")},
        "extension": fingerprint,
    }


def read_shipped(package: Path) -> dict[str, Any]:
    """The record in a package folder; empty when there is none or it is damaged."""
    return _read(package / SHIPPED)


def write_shipped(package: Path, facts: dict[str, Any]) -> None:
    (package / SHIPPED).write_text(json.dumps(facts, indent=1) + "\n")


def remember(root: Path, source: Source, options: BuildOptions, native: NativeBuild) -> None:
    """Note in the checkout what its in-place build is made of."""
    given = str(source.path) if source.kind == "given" else None
    facts = {"prefix": str(native.prefix), "given": given, "options": asdict(options) | {"jobs": None}}
    (root / "build").mkdir(exist_ok=True)
    (root / "build" / "ggml.json").write_text(json.dumps(facts, indent=1) + "\n")


def recorded_prefix(root: Path) -> Path | None:
    """Install prefix of the in-place build, None when there is none."""
    prefix = _read(root / "build" / "ggml.json").get("prefix")
    return Path(prefix) if prefix and Path(prefix).is_dir() else None


def recorded_include(root: Path) -> Path | None:
    prefix = recorded_prefix(root)
    return prefix / "include" if prefix else None


def recorded_options(root: Path) -> tuple[BuildOptions, Path | None] | None:
    """(options, source folder if one was named) of the in-place build, None when there is none."""
    facts = _read(root / "build" / "ggml.json")
    if not facts:
        return None
    options = BuildOptions(**(facts["options"] | {"backends": tuple(facts["options"]["backends"])}))
    return options, Path(facts["given"]) if facts["given"] else None


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _cmake_cache(build: Path) -> dict[str, str]:
    path = build / "CMakeCache.txt"
    text = path.read_text(errors="replace") if path.exists() else ""
    return dict(re.findall(r"^(\w+):\w+=(.*)$", text, flags=re.MULTILINE))


def _compiler(build: Path) -> str | None:
    """Compiler name and version as CMake found them, such as "GNU 12.2.0"."""
    for path in build.glob("CMakeFiles/*/CMakeCCompiler.cmake"):
        facts = dict(
            re.findall(r'set\((CMAKE_C_COMPILER_ID|CMAKE_C_COMPILER_VERSION) "([^"]*)"\)', path.read_text())
        )
        return " ".join(facts.values())
    return None
