"""build_ggml.py: where ggml comes from, what stops a build, and that a second run does nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_build import BuildError, extension, forward, info, native, source

REPOSITORY = Path(__file__).resolve().parents[2]
CDEF = REPOSITORY / "pyggmlkv" / "binding" / "cdef"
ARCHIVE = "libggml_python-0.20.2.post1.tar.gz"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a build needs of the repository, without the submodule."""
    target = tmp_path / "checkout"
    target.mkdir()
    shutil.copy(REPOSITORY / "build_ggml.py", target)
    shutil.copytree(
        REPOSITORY / "ggml_build", target / "ggml_build", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(CDEF, target / "pyggmlkv" / "binding" / "cdef")
    return target


@pytest.fixture
def fake_ggml(tmp_path: Path) -> Path:
    """A folder that looks like ggml and whose CMake file refuses."""
    tree = tmp_path / "fake-ggml"
    (tree / "include").mkdir(parents=True)
    (tree / "include" / "ggml.h").write_text("")
    (tree / "CMakeLists.txt").write_text(
        "set(GGML_VERSION_MAJOR 1)\nset(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n"
        'message(FATAL_ERROR "this tree refuses")\n'
    )
    return tree


def build(checkout: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the checkout's build_ggml.py with a cache folder of its own, unless the environment names one."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYGGMLKV_")}
    variables = inherited | {"PYGGMLKV_CACHE": str(checkout.parent / "cache")} | environment
    command = [sys.executable, str(checkout / "build_ggml.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=checkout)


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The run failed with a message that has these words, and without a traceback."""
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in ("build_ggml: ", *words)), result.stderr


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def test_archive_with_another_hash_is_refused_and_put_aside(tmp_path: Path) -> None:
    archive = tmp_path / ARCHIVE
    archive.write_bytes(b"not the pinned one")
    with pytest.raises(BuildError, match=source.GGML.sha256):
        source.verify(archive, source.GGML.sha256)
    assert [path.name for path in tmp_path.iterdir()] == [f"{ARCHIVE}.wrong-hash"]


def test_archive_with_the_right_hash_is_kept(tmp_path: Path) -> None:
    archive = tmp_path / ARCHIVE
    archive.write_bytes(b"content")
    source.verify(archive, hashlib.sha256(b"content").hexdigest())
    assert archive.exists()


def test_wrong_hash_ends_the_build_with_a_message(checkout: Path) -> None:
    downloads = checkout.parent / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / ARCHIVE).write_bytes(b"tampered")
    refused(build(checkout), ARCHIVE, hashlib.sha256(b"tampered").hexdigest(), source.GGML.sha256)
    assert not (checkout / "pyggmlkv" / "_lib").exists()


@pytest.mark.parametrize(("variable", "language"), [("CC", "C"), ("CXX", "C++")])
def test_missing_compiler_ends_the_build_with_a_message(
    checkout: Path, fake_ggml: Path, variable: str, language: str
) -> None:
    result = build(checkout, "--source", fake_ggml, **{variable: "no-such-compiler"})
    refused(result, f"no {language} compiler", f"{variable}=no-such-compiler", "install")


def test_failing_cmake_ends_the_build_with_its_words(checkout: Path, fake_ggml: Path) -> None:
    refused(build(checkout, "--source", fake_ggml), "configuring ggml failed", "this tree refuses")


def test_folder_that_is_not_ggml_is_refused(checkout: Path, tmp_path: Path) -> None:
    refused(build(checkout, "--source", tmp_path), str(tmp_path), "include/ggml.h")


def test_unknown_backend_is_refused_with_the_names(checkout: Path, fake_ggml: Path) -> None:
    refused(build(checkout, "--source", fake_ggml, "--backends", "cpu,abacus"), "abacus", "vulkan")


def test_prefix_of_a_checkout_without_a_build_is_refused(checkout: Path) -> None:
    refused(build(checkout, "--print-prefix"), "run build_ggml.py first")


def test_second_run_changes_nothing(checkout: Path) -> None:
    options, given = info.recorded_options(REPOSITORY) or (native.BuildOptions(), None)
    in_use = source.find_source(REPOSITORY, given)
    arguments = ["--backends", ",".join(options.backends), "--build-type", options.build_type]
    arguments += ["--portable"] if options.portable else []
    cache = {"PYGGMLKV_CACHE": str(source.cache_folder()), "PYGGMLKV_GGML_SOURCE": str(in_use.path)}
    first = build(checkout, *arguments, **cache)
    assert first.returncode == 0, first.stderr
    before = snapshot(checkout)
    second = build(checkout, *arguments, **cache)
    assert second.returncode == 0 and second.stdout.startswith("up to date"), second.stdout
    assert {
        path: stamp for path, stamp in snapshot(checkout).items() if before.get(path) != stamp
    }.keys() <= {str(checkout / "build" / "ggml.json")}


def test_source_is_looked_for_in_the_documented_order(
    fake_ggml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    given, variable = tmp_path / "given", tmp_path / "variable"
    pin = source.GGML
    unpacked = (
        cache / "source" / f"{pin.distribution}-{pin.distribution_version}-{pin.sha256[:12]}" / pin.subfolder
    )
    for tree in (root / "ggml", given, variable, unpacked):
        shutil.copytree(fake_ggml, tree)
    monkeypatch.setenv("PYGGMLKV_GGML_SOURCE", str(variable))
    found = [source.find_source(root, given, cache), source.find_source(root, None, cache)]
    monkeypatch.delenv("PYGGMLKV_GGML_SOURCE")
    found.append(source.find_source(root, None, cache))
    shutil.rmtree(root / "ggml")
    found.append(source.find_source(root, None, cache))
    assert [item.path for item in found] == [given, variable, root / "ggml", unpacked]
    assert [item.kind for item in found] == ["given", "given", "submodule", "distribution"]


def test_version_is_read_from_the_source(fake_ggml: Path) -> None:
    assert source.find_source(REPOSITORY, fake_ggml).version == "1.2.3"


@pytest.mark.parametrize("text", ["", "cpu", "rpc", " CPU , "])
def test_cpu_and_rpc_are_always_built(text: str) -> None:
    assert native.parse_backends(text) == ("cpu", "rpc")


def test_portable_builds_load_backends_and_local_builds_are_native() -> None:
    flags = {portable: native.BuildOptions(portable=portable).cmake_flags() for portable in (True, False)}
    assert [flags[True][name] for name in ("GGML_BACKEND_DL", "GGML_CPU_ALL_VARIANTS", "GGML_NATIVE")] == [
        "ON",
        "ON",
        "OFF",
    ]
    assert [flags[False][name] for name in ("GGML_BACKEND_DL", "GGML_CPU_ALL_VARIANTS", "GGML_NATIVE")] == [
        "OFF",
        "OFF",
        "ON",
    ]


def test_libraries_ship_once_under_the_name_the_loader_asks_for(tmp_path: Path) -> None:
    (tmp_path / "libggml.so.0.20.2").write_bytes(b"elf")
    (tmp_path / "libggml.so.0").symlink_to("libggml.so.0.20.2")
    (tmp_path / "libggml.so").symlink_to("libggml.so.0")
    (tmp_path / "libggml-cpu-haswell.so").write_bytes(b"elf")
    assert sorted(native.shared_libraries(tmp_path)) == ["libggml-cpu-haswell.so", "libggml.so.0"]


def test_a_cmake_cache_whose_cmake_has_gone_is_configured_again(tmp_path: Path) -> None:
    build_folder = tmp_path / "build"
    build_folder.mkdir()
    (build_folder / "build.ninja").write_text("")
    (build_folder / "CMakeCache.txt").write_text(f"CMAKE_COMMAND:INTERNAL={tmp_path}/gone/cmake\n")
    assert not native.configured(native.NativeBuild(build_folder, tmp_path / "prefix"))
    assert not (build_folder / "CMakeCache.txt").exists()


def test_forwarders_of_a_portable_build_compile(tmp_path: Path) -> None:
    include = info.recorded_include(REPOSITORY)
    assert include is not None, "build first: python build_ggml.py"
    headers = extension.bound_headers(tuple(native.BACKENDS))
    text = extension.preamble(CDEF, headers, forward.forwarders(CDEF, native.BACKENDS))
    (tmp_path / "portable.c").write_text(text)
    command = [*os.environ.get("CC", "cc").split(), "-D_GNU_SOURCE", "-fsyntax-only", "-I", str(include)]
    result = subprocess.run(
        [*command, str(tmp_path / "portable.c")], capture_output=True, text=True, check=False
    )
    assert "error" not in result.stderr and result.returncode == 0, result.stderr
    assert "#define ggml_backend_cpu_init pyggmlkv_forward_ggml_backend_cpu_init" in text


def test_build_record_names_version_and_flags_and_no_folder() -> None:
    facts = info.read_shipped(REPOSITORY / "pyggmlkv")
    assert facts["ggml_version"] and facts["flags"]["GGML_LLAMAFILE"] == "ON" and "cpu" in facts["backends"]
    assert str(REPOSITORY) not in json.dumps(facts) and str(Path.home()) not in json.dumps(facts)


def test_extension_finds_its_libraries_from_any_folder(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    code = "from pyggmlkv._ggml import ffi, lib; print(ffi.string(lib.ggml_version()).decode())"
    command = [sys.executable, "-c", code]
    environment["PYTHONPATH"] = str(REPOSITORY)
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert result.stdout.strip() == info.read_shipped(REPOSITORY / "pyggmlkv")["ggml_version"], result.stderr
