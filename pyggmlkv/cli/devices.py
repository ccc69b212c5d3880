"""`pyggmlkv devices`: the devices ggml sees, and which ggml this is."""

from __future__ import annotations

import argparse
import json
from importlib import resources

from pyggmlkv.cli import output

NAME = "devices"
HELP = "list the devices ggml sees, with ggml's version, commit and build flags"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    from pyggmlkv.binding import devices

    build = build_info()
    found: list[dict[str, object]] = []
    for device in devices():
        free, total = device.memory
        found.append(
            {
                "name": device.name,
                "description": device.description,
                "type": device.type,
                "memory_free": free,
                "memory_total": total,
            }
        )
    if args.json:
        output.print_json({"ggml": build, "devices": found})
        return 0
    rows = [
        (d["name"], d["type"], _memory(d["memory_free"], d["memory_total"]), d["description"]) for d in found
    ]
    output.print_columns([("device", "type", "memory free / total", "description"), *rows])
    print()
    output.print_columns(
        [(f"ggml {key.removeprefix('ggml_')}", _flat(value)) for key, value in build.items()]
    )
    return 0


def build_info() -> dict[str, object]:
    """What the build wrote down about itself; empty when the package was not built."""
    file = resources.files("pyggmlkv") / "_build_info.json"
    if not file.is_file():
        return {}
    found: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _memory(free: object, total: object) -> str:
    if not isinstance(free, int) or not isinstance(total, int) or not total:
        return "-"
    return f"{output.size(free)} / {output.size(total)}"


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
