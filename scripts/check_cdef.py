"""Compares the cdef files with the headers of the ggml in use: bound, unbound, changed, and gone upstream.

Exit code 1 when anything is unbound without a reason listed here, changed or gone. Names and shapes are
compared; values of enums and constants need no comparing, since the compiler fills them in.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ggml_build import BuildError
from ggml_build.declarations import Declaration, Declarations, read_cdefs, read_headers
from ggml_build.extension import BACKEND_HEADERS, CORE_HEADERS
from ggml_build.info import recorded_include
from ggml_build.source import find_source

HEADERS = (*CORE_HEADERS, *BACKEND_HEADERS.values())
NOT_OFFERED = "a backend that build_ggml.py does not offer"
HEADERS_LEFT_OUT = {
    "ggml-cpp.h": "C++ only: smart pointers around the C API",
    "ggml-cann.h": NOT_OFFERED,
    "ggml-et.h": NOT_OFFERED,
    "ggml-hexagon.h": NOT_OFFERED,
    "ggml-opencl.h": NOT_OFFERED,
    "ggml-openvino.h": NOT_OFFERED,
    "ggml-sycl.h": NOT_OFFERED,
    "ggml-virtgpu.h": NOT_OFFERED,
    "ggml-webgpu.h": NOT_OFFERED,
    "ggml-zdnn.h": NOT_OFFERED,
    "ggml-zendnn.h": NOT_OFFERED,
}
NAMES_LEFT_OUT = {
    "ggml_threadpool_get_n_threads": "declared in ggml-cpu.h, defined nowhere: it would not link",
}


@dataclass
class Report:
    """What the comparison found; `ok` is the verdict."""

    bound: list[Declaration] = field(default_factory=list)
    unbound: list[Declaration] = field(default_factory=list)
    changed: list[tuple[Declaration, Declaration]] = field(default_factory=list)
    gone: list[Declaration] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown_headers: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.unbound or self.changed or self.gone or self.unknown_headers)

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "counts": {
                "bound": len(self.bound),
                "unbound": len(self.unbound),
                "changed": len(self.changed),
                "gone": len(self.gone),
                "left_out": len(self.left_out),
            },
            "unbound": [_row(item) for item in self.unbound],
            "changed": [_row(theirs) | {"ours": ours.text} for theirs, ours in self.changed],
            "gone": [_row(item) for item in self.gone],
            "left_out": self.left_out,
            "unknown_headers": self.unknown_headers,
        }


def _row(item: Declaration) -> dict[str, str]:
    return {"kind": item.kind, "name": item.name, "header": item.header, "text": item.text}


def same(theirs: object, ours: object) -> bool:
    """Whether two shapes agree. `array ...` on our side stands for any length: the compiler fills it in."""
    if isinstance(theirs, tuple) and isinstance(ours, tuple):
        return len(theirs) == len(ours) and all(same(a, b) for a, b in zip(theirs, ours, strict=True))
    if isinstance(theirs, str) and isinstance(ours, str) and ours.startswith("array ... of "):
        return theirs.startswith("array ") and theirs.partition(" of ")[2] == ours.removeprefix(
            "array ... of "
        )
    return theirs == ours


def compare(upstream: Declarations, cdefs: Declarations) -> Report:
    """Sort every declaration of either side into the report."""
    report = Report()
    for key, theirs in upstream.items():
        ours = cdefs.get(key)
        if theirs.name in NAMES_LEFT_OUT and ours is None:
            report.left_out[theirs.name] = NAMES_LEFT_OUT[theirs.name]
        elif ours is None:
            report.unbound.append(theirs)
        elif not same(theirs.shape, ours.shape):
            report.changed.append((theirs, ours))
        else:
            report.bound.append(theirs)
    report.gone = [ours for key, ours in cdefs.items() if key not in upstream]
    return report


def read_upstream(include: Path) -> Declarations:
    """Everything that the headers we bind declare. Raises: BuildError when one is missing or is not C."""
    if missing := [name for name in HEADERS if not (include / name).is_file()]:
        raise BuildError(
            f"{include} has no {', '.join(missing)}: is it the include folder of the pinned ggml?"
        )
    return read_headers(include, HEADERS)


def read_ours(cdef: Path) -> Declarations:
    """Everything that the cdef files declare. Raises: BuildError when one is not C."""
    return read_cdefs(cdef / name for name in HEADERS if (cdef / name).is_file())


def check(include: Path, cdef: Path) -> Report:
    """Compare the headers in one folder with the cdef files in another. Raises: BuildError."""
    report = compare(read_upstream(include), read_ours(cdef))
    present = {path.name for path in include.glob("*.h")}
    report.left_out |= {name: why for name, why in HEADERS_LEFT_OUT.items() if name in present}
    report.unknown_headers = sorted(present - set(HEADERS) - set(HEADERS_LEFT_OUT))
    return report


def render(report: Report) -> str:
    """The report for people: everything wrong in full, the rest as counts."""
    lines: list[str] = []
    for title, items in (("unbound", report.unbound), ("gone upstream", report.gone)):
        lines += [f"{title}: {item.kind} {item.name} ({item.header})\n    {item.text}" for item in items]
    for theirs, ours in report.changed:
        lines.append(f"changed: {theirs.kind} {theirs.name} ({theirs.header})")
        lines += [f"    upstream: {theirs.text}", f"    ours:     {ours.text}"]
    lines += [
        f"unknown header: {name} (bind it, or list it with a reason)" for name in report.unknown_headers
    ]
    lines += [f"left out: {name}: {why}" for name, why in report.left_out.items()]
    lines.append(
        f"bound {len(report.bound)}, unbound {len(report.unbound)}, changed {len(report.changed)}, "
        f"gone {len(report.gone)}, left out {len(report.left_out)}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--include", type=Path, help="ggml's include folder (default: of the build in use, else the source)"
    )
    parser.add_argument(
        "--cdef", type=Path, default=ROOT / "pyggmlkv" / "binding" / "cdef", help="folder of cdef files"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        include = options.include or recorded_include(ROOT) or find_source(ROOT).path / "include"
        report = check(include, options.cdef)
    except BuildError as error:
        print(f"check_cdef: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_json(), indent=1) if options.json else render(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
