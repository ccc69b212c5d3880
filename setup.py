"""Hooks build_ggml.py into pip: `pip install`, editable or not, and wheels. Metadata is in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import build_ggml
from ggml_build import BuildError


class BuildGgml(build_ext):
    """Builds in place, whatever setuptools asks for; a wheel then gets copies."""

    def run(self) -> None:
        options, source = build_ggml.options_from_environment()
        try:
            build_ggml.build_in_place(options, source)
        except BuildError as error:
            sys.exit(f"build_ggml: {error}")
        for built in build_ggml.outputs():
            target = self._target(built)
            if target != built:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built, target)

    def _target(self, built: Path) -> Path:
        return built if self.inplace else Path(self.build_lib) / built.relative_to(ROOT)

    def get_outputs(self) -> list[str]:
        return [str(self._target(built)) for built in build_ggml.outputs()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []


limited_api = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp311"}
setup(
    ext_modules=[Extension("pyggmlkv._ggml", sources=[])],
    cmdclass={"build_ext": BuildGgml},
    options={"bdist_wheel": limited_api},
)
