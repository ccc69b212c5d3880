"""The cdef files agree with the headers, and scripts/check_cdef.py sees it when they do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ggml_build import info, source
from ggml_build.declarations import Declarations
from scripts import check_cdef

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def include() -> Path:
    return info.recorded_include(REPOSITORY) or source.find_source(REPOSITORY).path / "include"


@pytest.fixture(scope="module")
def upstream(include: Path) -> Declarations:
    return check_cdef.read_upstream(include)


@pytest.fixture
def cdef(tmp_path: Path) -> Path:
    """A copy of the cdef files, to spoil."""
    return shutil.copytree(REPOSITORY / "pyggmlkv" / "binding" / "cdef", tmp_path / "cdef")


@pytest.fixture
def headers(include: Path, tmp_path: Path) -> Path:
    """A copy of the upstream headers, to change."""
    return shutil.copytree(include, tmp_path / "include")


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file.name}"
    file.write_text(text.replace(old, new))


def test_every_public_declaration_is_bound(include: Path) -> None:
    report = check_cdef.check(include, REPOSITORY / "pyggmlkv" / "binding" / "cdef")
    assert report.ok, check_cdef.render(report)
    assert {item.kind for item in report.bound} == {
        "function", "enum", "struct", "typedef", "constant", "string", "variable"
    }  # fmt: skip


def test_missing_function_is_unbound(upstream: Declarations, cdef: Path) -> None:
    replace(cdef / "ggml.h", "size_t ggml_nbytes(const struct ggml_tensor *tensor);\n", "")
    report = check_cdef.compare(upstream, check_cdef.read_ours(cdef))
    assert [(item.kind, item.name, item.header) for item in report.unbound] == [
        ("function", "ggml_nbytes", "ggml.h")
    ]


@pytest.mark.parametrize(
    ("file", "old", "new", "kind", "name"),
    [
        pytest.param(
            "ggml.h",
            "int64_t ggml_nrows(const",
            "int ggml_nrows(const",
            "function",
            "ggml_nrows",
            id="result",
        ),
        pytest.param(
            "ggml-cpu.h",
            "int32_t ggml_get_i32_1d(const struct ggml_tensor *tensor, int i);",
            "int32_t ggml_get_i32_1d(const struct ggml_tensor *tensor);",
            "function",
            "ggml_get_i32_1d",
            id="parameter-count",
        ),
        pytest.param(
            "gguf.h",
            "size_t gguf_get_arr_n(const",
            "size_t gguf_get_arr_n(",
            "function",
            "gguf_get_arr_n",
            id="const",
        ),
        pytest.param("ggml.h", "GGML_TYPE_NVFP4, ", "", "enum", "ggml_type", id="enum-member"),
        pytest.param("ggml.h", "    size_t view_offs;\n", "", "struct", "ggml_tensor", id="struct-field"),
        pytest.param(
            "ggml.h", "int64_t ne[4];", "int64_t ne[5];", "struct", "ggml_tensor", id="array-length"
        ),
        pytest.param(
            "ggml-opt.h",
            "        float wd;\n    } sgd;",
            "    } sgd;",
            "struct",
            "ggml_opt_optimizer_params",
            id="nested",
        ),
        pytest.param(
            "ggml.h",
            "typedef bool (*ggml_abort_callback)(void *data);",
            "typedef int (*ggml_abort_callback)(void *data);",
            "typedef",
            "ggml_abort_callback",
            id="callback",
        ),
    ],
)
def test_difference_is_reported_as_changed(
    upstream: Declarations, cdef: Path, file: str, old: str, new: str, kind: str, name: str
) -> None:
    replace(cdef / file, old, new)
    report = check_cdef.compare(upstream, check_cdef.read_ours(cdef))
    assert [(theirs.kind, theirs.name) for theirs, _ in report.changed] == [(kind, name)]
    assert not report.unbound and not report.gone


def add_function(headers: Path) -> None:
    replace(headers / "ggml-alloc.h", "// Tensor allocator", "GGML_API int ggml_brand_new(void);")


def add_enum_member(headers: Path) -> None:
    replace(
        headers / "ggml.h", "GGML_STATUS_ABORTED = 1,", "GGML_STATUS_ABORTED = 1, GGML_STATUS_PUZZLED = 2,"
    )


def add_constant(headers: Path) -> None:
    replace(headers / "gguf.h", "#define GGUF_VERSION 3", "#define GGUF_VERSION 3\n#define GGUF_LATEST 4")


def add_header(headers: Path) -> None:
    (headers / "ggml-abacus.h").write_text("int ggml_backend_abacus_reg(void);\n")


@pytest.mark.parametrize("change", [add_function, add_enum_member, add_constant, add_header])
def test_what_upstream_adds_fails_the_check(
    headers: Path, cdef: Path, change: Callable[[Path], None]
) -> None:
    change(headers)
    assert not check_cdef.check(headers, cdef).ok


def test_what_upstream_removes_is_gone(headers: Path, cdef: Path) -> None:
    replace(headers / "ggml-alloc.h", "GGML_API void           ggml_gallocr_free(ggml_gallocr_t galloc);", "")
    assert [item.name for item in check_cdef.check(headers, cdef).gone] == ["ggml_gallocr_free"]


def test_constants_with_another_value_still_agree(headers: Path, cdef: Path) -> None:
    replace(
        headers / "ggml.h", "#define GGML_DEFAULT_GRAPH_SIZE 2048", "#define GGML_DEFAULT_GRAPH_SIZE 4096"
    )
    assert check_cdef.check(headers, cdef).ok


def test_exit_code_and_json_say_what_is_wrong(
    include: Path, cdef: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--include", str(include), "--cdef", str(cdef), "--json"]
    assert check_cdef.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["unbound"] == 0
    replace(cdef / "gguf.h", "void gguf_free(struct gguf_context *ctx);\n", "")
    assert check_cdef.main(arguments) == 1
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["unbound"]] == ["gguf_free"]


def test_folder_without_headers_is_an_error_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_cdef.main(["--include", str(tmp_path)]) == 2
    assert "has no ggml.h" in capsys.readouterr().err
