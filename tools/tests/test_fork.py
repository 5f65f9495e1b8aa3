# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The commands of tools.fork, on a small release, as users run them."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tools.fork import base, patchfile
from tools.fork.errors import ForkError
from tools.fork.git import Git
from tools.fork.series import load
from tools.tests.conftest import BASE_FILES, Fork, pack


def test_tree_holds_the_release_byte_for_byte(fork):
    assert fork.run("tree") == 0
    generated = {"PKG-INFO", "vllm.egg-info/PKG-INFO", "vllm/_version.py"}
    for name, text in BASE_FILES.items():
        if name in generated:
            assert not (fork.tree / name).exists()
        else:
            assert (fork.tree / name).read_bytes() == text.encode(), name
            assert fork.blob(name) == text.encode(), name


def test_tree_with_a_python_that_has_no_extraction_filters(fork, monkeypatch):
    extract = tarfile.TarFile.extractall

    def of_311_2(self, path=".", members=None, *, numeric_owner=False):
        return extract(self, path, members, numeric_owner=numeric_owner)

    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(tarfile.TarFile, "extractall", of_311_2)
    assert fork.run("tree") == 0
    assert fork.blob("vllm/engine.py") == BASE_FILES["vllm/engine.py"].encode()


def test_tree_twice_changes_nothing(two_topics, capsys):
    head = two_topics.git("rev-parse", "HEAD")
    before = {p: p.lstat().st_mtime_ns for p in two_topics.tree.rglob("*.py")}
    capsys.readouterr()
    assert two_topics.run("tree") == 0
    assert "up to date" in capsys.readouterr().out
    assert two_topics.git("rev-parse", "HEAD") == head
    assert {p: p.lstat().st_mtime_ns for p in two_topics.tree.rglob("*.py")} == before


def test_tree_then_export_gives_the_same_bytes(two_topics, tmp_path, capsys):
    before = two_topics.snapshot()
    subprocess.run(["rm", "-rf", str(two_topics.root / "build")], check=True)
    assert two_topics.run("tree") == 0
    capsys.readouterr()
    assert two_topics.run("export") == 0
    assert "nothing to export" in capsys.readouterr().out
    assert two_topics.snapshot() == before


def test_topics_are_commits_with_their_message(two_topics):
    log = two_topics.git("log", "--format=%s|%b", "--reverse").strip()
    assert log.split("\n\n")[1].startswith("[Build] First|Because of\nreasons.")
    assert two_topics.git("rev-list", "--count", "HEAD").strip() == "3"


def test_a_patch_has_no_line_of_context(two_topics):
    text = (two_topics.root / "patches" / "second.patch").read_text()
    hunks = [line for line in text.splitlines() if line.startswith("@@")]
    assert hunks == ["@@ -16 +16 @@", "@@ -9 +9 @@"]
    assert "-line 15" in text and "line 14" not in text and "step_8" not in text


def test_new_files_are_links_to_the_repository(two_topics):
    link = two_topics.tree / "vllm" / "own.py"
    assert os.readlink(link) == "../../../vllm/own.py"
    link.write_text("VALUE = 2\n")
    assert (two_topics.root / "vllm" / "own.py").read_text() == "VALUE = 2\n"
    # An edit through the link is an edit of the repository: nothing to export.
    assert two_topics.run("tree") == 0


def test_the_ledger_follows_the_tree(two_topics):
    series = load(two_topics.root)
    first, second = series.topics
    assert first.hooks == ("setup.py",)
    assert first.tests == ("tests/test_own.py",)
    assert second.files == ("vllm/own.py",)
    assert second.hooks == ("setup.py", "vllm/engine.py")
    assert first.why == "Because of\nreasons."
    text = (two_topics.root / "patches" / "series.toml").read_text()
    assert text.startswith("# A comment that stays.")


@pytest.mark.parametrize("committed", [False, True])
def test_unexported_edits_are_never_overwritten(two_topics, capsys, committed):
    two_topics.edit("setup.py", "line 20\n", "line twenty\n")
    if committed:
        two_topics.commit("fixup! [Build] First")
    for command in (["tree"], ["rebase", "2.0"]):
        assert two_topics.run(*command) == 1
        error = capsys.readouterr().err
        assert "setup.py" in error
        assert "--discard" in error and "export" in error
        assert "line twenty" in (two_topics.tree / "setup.py").read_text()
    assert two_topics.run("verify") == 1
    assert "not exported: setup.py" in capsys.readouterr().err
    assert two_topics.run("tree", "--discard") == 0
    assert "line twenty" not in (two_topics.tree / "setup.py").read_text()
    assert two_topics.run("verify") == 0


def test_a_new_file_in_the_tree_counts_as_an_edit(two_topics, capsys):
    (two_topics.tree / "vllm" / "more.py").write_text("")
    assert two_topics.run("tree") == 1
    assert "vllm/more.py" in capsys.readouterr().err
    # Built and cached files do not.
    (two_topics.tree / "vllm" / "more.py").unlink()
    (two_topics.tree / "vllm" / "_own.so").write_text("")
    assert two_topics.run("tree") == 0
    assert (two_topics.tree / "vllm" / "_own.so").exists()


def test_export_of_uncommitted_edits_is_refused_and_named(two_topics, capsys):
    before = two_topics.snapshot()
    two_topics.edit("setup.py", "line 20\n", "line twenty\n")
    assert two_topics.run("export") == 1
    assert "setup.py" in capsys.readouterr().err
    assert two_topics.snapshot() == before


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_edit_goes_into_its_topic(two_topics, by_hand):
    two_topics.edit("setup.py", "line 20\n", "line twenty\n")
    (two_topics.tree / "vllm" / "more.py").write_text("MORE = 1\n")
    if by_hand:
        two_topics.commit("fixup! [Build] First")
        assert two_topics.run("export") == 0
    else:
        assert two_topics.run("export", "--topic", "first") == 0
    patch = (two_topics.root / "patches" / "first.patch").read_text()
    assert "+line twenty" in patch and "+line five" in patch
    assert (two_topics.root / "vllm" / "more.py").read_text() == "MORE = 1\n"
    assert (two_topics.tree / "vllm" / "more.py").is_symlink()
    assert load(two_topics.root).topic("first").files == ("vllm/more.py",)
    assert two_topics.run("verify") == 0
    assert two_topics.run("tree") == 0


def test_a_fixup_that_conflicts_leaves_everything_as_it_was(two_topics, capsys):
    two_topics.edit("setup.py", "line fifteen\n", "line XV\n")
    two_topics.commit("fixup! [Build] First")
    before, head = two_topics.snapshot(), two_topics.git("rev-parse", "HEAD")
    assert two_topics.run("export") == 1
    assert "setup.py" in capsys.readouterr().err
    assert two_topics.snapshot() == before
    assert two_topics.git("rev-parse", "HEAD") == head
    assert two_topics.git("status", "--porcelain") == ""


def test_a_commit_without_a_topic_is_refused(two_topics, capsys):
    before = two_topics.snapshot()
    two_topics.edit("setup.py", "line 20\n", "line twenty\n")
    two_topics.commit("work in progress")
    assert two_topics.run("export") == 1
    error = capsys.readouterr().err
    assert "work in progress" in error and "Topic: NAME" in error
    assert two_topics.snapshot() == before


def test_a_reworded_and_reordered_series_is_written_back(two_topics):
    start, first, second = two_topics.git("rev-list", "--reverse", "HEAD").split()
    two_topics.git("reset", "--hard", "--quiet", start)
    two_topics.git("cherry-pick", second)
    two_topics.git("commit", "--amend", "-qm", "[Core] Two\n\nWhy.\n\nTopic: second")
    two_topics.git("cherry-pick", first)
    assert two_topics.run("export") == 0
    topics = load(two_topics.root).topics
    assert [t.name for t in topics] == ["second", "first"]
    assert topics[0].title == "[Core] Two" and topics[0].why == "Why."
    # Written by hand before, and still there.
    assert {t.drop_when for t in topics} == {"never"}
    text = (two_topics.root / "patches" / "series.toml").read_text()
    assert "\n\n\n[[topic]]" not in text
    assert two_topics.run("verify") == 0


def test_a_topic_that_goes_takes_its_patch_along(two_topics, capsys):
    start, first, _ = two_topics.git("rev-list", "--reverse", "HEAD").split()
    del start
    two_topics.git("reset", "--hard", "--quiet", first)
    assert two_topics.run("export") == 0
    assert not (two_topics.root / "patches" / "second.patch").exists()
    capsys.readouterr()
    assert two_topics.run("verify") == 1
    assert "vllm/own.py belongs to no topic" in capsys.readouterr().err


def test_add_lists_a_file_and_links_it(two_topics, capsys):
    (two_topics.root / "docs").mkdir()
    (two_topics.root / "docs" / "own.md").write_text("text\n")
    (two_topics.root / "tests" / "test_more.py").write_text("")
    assert two_topics.run("add", "first", "docs/own.md", "tests/test_more.py") == 0
    topic = load(two_topics.root).topic("first")
    assert topic.files == ("docs/own.md",)
    assert topic.tests == ("tests/test_more.py", "tests/test_own.py")
    assert (two_topics.tree / "docs" / "own.md").read_text() == "text\n"
    assert two_topics.run("verify") == 0
    capsys.readouterr()
    for path, needle in [
        ("docs/own.md", "'first' already"),
        ("docs/none.md", "not a file"),
        ("../x", "from the repository's root"),
    ]:
        assert two_topics.run("add", "second", path) == 1
        assert needle in capsys.readouterr().err


# --- one clear error each, and the previous tree still usable -----------------


def usable(fork: Fork) -> bool:
    """Whether the tree is clean, complete and importable as it was."""
    files = (fork.tree / "vllm" / "own.py", fork.tree / "setup.py")
    return fork.git("status", "--porcelain") == "" and all(f.exists() for f in files)


def fails(fork: Fork, capsys, *needles: str, command: str = "tree") -> None:
    capsys.readouterr()
    head = fork.git("rev-parse", "HEAD")
    assert fork.run(command) == 1
    error = capsys.readouterr().err
    for needle in needles:
        assert needle in error, error
    assert "Traceback" not in error
    assert fork.git("rev-parse", "HEAD") == head and usable(fork)


def change_series(fork: Fork, old: str, new: str) -> None:
    file = fork.root / "patches" / "series.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_wrong_hash(two_topics, release, capsys):
    sha = base.sha256(release)
    change_series(two_topics, sha, "1" * 64)
    fails(two_topics, capsys, "1" * 64, sha, "vllm==1.0")


def test_index_cannot_be_reached(two_topics, capsys, monkeypatch):
    change_series(two_topics, load(two_topics.root).base.sha256, "2" * 64)
    monkeypatch.delenv(base.BASE_ENV)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    fails(two_topics, capsys, "package index", "vllm==1.0", base.BASE_ENV)


def test_named_base_is_absent(two_topics, capsys, monkeypatch):
    change_series(two_topics, load(two_topics.root).base.sha256, "2" * 64)
    monkeypatch.setenv(base.BASE_ENV, "nowhere.tar.gz")
    fails(two_topics, capsys, base.BASE_ENV, "nowhere.tar.gz")


def test_patch_does_not_apply(two_topics, capsys):
    patch = two_topics.root / "patches" / "first.patch"
    patch.write_text(patch.read_text().replace("-line 5\n", "-line 6\n"))
    fails(two_topics, capsys, "patches/first.patch", "setup.py")


def test_patch_made_for_another_content(two_topics, capsys):
    patch = two_topics.root / "patches" / "second.patch"
    lines = patch.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if line.startswith("index "))
    lines[index] = f"index {'3' * 40}..{'4' * 40} 100644\n"
    patch.write_text("".join(lines))
    fails(two_topics, capsys, "second", "exactly or not at all", "rebase")


def test_patch_is_missing(two_topics, capsys):
    (two_topics.root / "patches" / "first.patch").unlink()
    fails(two_topics, capsys, "patches/first.patch is missing")


def test_listed_file_is_absent(two_topics, capsys):
    # The tree's link would dangle, so 'usable' is about the rest of it.
    (two_topics.root / "tests" / "test_own.py").unlink()
    fails(two_topics, capsys, "'first'", "tests/test_own.py")


def test_listed_file_exists_upstream(two_topics, capsys):
    change_series(two_topics, '["vllm/own.py"]', '["vllm/own.py", "README.md"]')
    (two_topics.root / "README.md").write_text("the fork's\n")
    fails(two_topics, capsys, "README.md", "patch")


def test_context_line(two_topics, capsys):
    patch = two_topics.root / "patches" / "first.patch"
    text = patch.read_text().replace("@@ -5 +5,2 @@\n", "@@ -4,2 +4,3 @@\n line 4\n")
    patch.write_text(text)
    fails(two_topics, capsys, "patches/first.patch:6", "context line")
    fails(two_topics, capsys, "context line", command="verify")


def test_heading_that_quotes_upstream(two_topics, capsys):
    patch = two_topics.root / "patches" / "first.patch"
    patch.write_text(
        patch.read_text().replace("@@ -5 +5,2 @@", "@@ -5 +5,2 @@ def setup():")
    )
    fails(two_topics, capsys, "patches/first.patch:5", "heading", command="verify")


@pytest.mark.parametrize(
    ("old", "new", "needle"),
    [
        ("[fork]", "[fork", "not valid TOML"),
        ("revision = 3", "revision = 0", "fork.revision"),
        ('name = "first"', 'name = "First One"', "lower-case"),
        ('name = "first"', 'name = "second"', "two topics"),
        ('["tests/test_own.py"]', '["../outside.py"]', "../outside.py"),
        ('["tests/test_own.py"]', '["vllm/own.py"]', "listed by the topics"),
        ('title = "[Build] First"', 'title = ""', "title"),
        ('version = "1.0"', "version = 1", "base.version"),
    ],
)
def test_bad_series(two_topics, capsys, old, new, needle):
    change_series(two_topics, old, new)
    fails(two_topics, capsys, needle)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        (lambda f: (f.root / "vllm" / "stray.py").write_text(""), "vllm/stray.py"),
        (lambda f: (f.root / "vllm" / "__init__.py").write_text(""), "shadow"),
        (lambda f: (f.root / "patches" / "x.patch").write_text(""), "patches/x.patch"),
        (lambda f: change_series(f, '"never"', '""'), "drop_when"),
        (lambda f: change_series(f, '"not reported"', '""'), "upstream"),
        (lambda f: change_series(f, "tests/test_engine.py", "tests/no.py"), "no.py"),
        (
            lambda f: change_series(f, 'hooks = ["setup.py"]', 'hooks = ["README.md"]'),
            "hooks",
        ),
    ],
)
def test_verify_names_what_is_unclean(two_topics, capsys, change, needle):
    change(two_topics)
    capsys.readouterr()
    assert two_topics.run("verify") == 1
    assert needle in capsys.readouterr().err


def test_a_tree_that_is_not_ours_is_left_alone(fork, capsys):
    fork.tree.mkdir(parents=True)
    (fork.tree / "precious").write_text("")
    assert fork.run("tree") == 1
    assert "move it away" in capsys.readouterr().err
    assert (fork.tree / "precious").exists()


# --- another base -------------------------------------------------------------


@pytest.fixture
def next_release(two_topics, tmp_path, monkeypatch):
    """Make release 2.0 out of changed files and let the fork find it."""

    def make(changes: dict[str, str]) -> Path:
        archive = tmp_path / "vllm-2.0.tar.gz"
        pack(archive, "2.0", BASE_FILES | changes)
        monkeypatch.setenv(base.BASE_ENV, str(archive))
        monkeypatch.setattr(base, "download", _no_index)
        return archive

    return make


def _no_index(*args, **kwargs):
    raise ForkError("no such wheel")


MOVED = {"setup.py": "new first line\n" + BASE_FILES["setup.py"]}
CONFLICT = {"setup.py": BASE_FILES["setup.py"].replace("line 15\n", "line 15.0\n")}
TAKEN = {
    "setup.py": BASE_FILES["setup.py"].replace(
        "line 5\n", "line five\nline five and a half\n"
    )
}


def test_rebase_moves_the_patches(two_topics, next_release, capsys):
    archive = next_release(MOVED)
    assert two_topics.run("rebase", "2.0") == 0, capsys.readouterr().err
    series = load(two_topics.root)
    assert series.base.version == "2.0"
    assert series.base.sha256 == base.sha256(archive)
    assert series.cpu_extension.version == "1.0"
    assert "no CPU wheel" in capsys.readouterr().out
    assert "@@ -6 +6,2 @@" in (two_topics.root / "patches" / "first.patch").read_text()
    assert two_topics.run("verify") == 0
    assert (two_topics.tree / "setup.py").read_text().startswith("new first line")
    assert (two_topics.tree / "vllm" / "own.py").read_text() == "VALUE = 1\n"


def test_rebase_stops_at_a_conflict_and_goes_on(two_topics, next_release, capsys):
    next_release(CONFLICT)
    before, head = two_topics.snapshot(), two_topics.git("rev-parse", "HEAD")
    assert two_topics.run("rebase", "2.0") == 1
    error = capsys.readouterr().err
    assert "'second'" in error and "setup.py" in error and "--continue" in error
    assert two_topics.snapshot() == before
    assert two_topics.git("rev-parse", "HEAD") == head
    assert two_topics.run("rebase", "2.0") == 1
    assert "in progress" in capsys.readouterr().err
    # Not resolved yet: the same conflict is named again.
    assert two_topics.run("rebase", "--continue") == 1
    assert "setup.py" in capsys.readouterr().err
    file = two_topics.root / "build" / "rebase" / "setup.py"
    lines = [line for line in file.read_text().splitlines() if line[:7] not in MARKERS]
    file.write_text("\n".join(line for line in lines if line != "line 15.0") + "\n")
    Git(file.parent)("add", "setup.py")
    assert two_topics.run("rebase", "--continue") == 0, capsys.readouterr().err
    assert load(two_topics.root).base.version == "2.0"
    assert "-line 15.0" in (two_topics.root / "patches" / "second.patch").read_text()
    assert two_topics.run("verify") == 0
    assert not file.parent.exists()


MARKERS = ("<<<<<<<", "=======", ">>>>>>>")


def test_rebase_can_be_dropped(two_topics, next_release, capsys):
    next_release(CONFLICT)
    before = two_topics.snapshot()
    assert two_topics.run("rebase", "2.0") == 1
    assert two_topics.run("rebase", "--abort") == 0
    assert two_topics.snapshot() == before
    assert not (two_topics.root / "build" / "rebase").exists()
    assert two_topics.run("verify") == 0
    assert two_topics.run("rebase", "--abort") == 1


def test_rebase_drops_what_upstream_took(two_topics, next_release, capsys):
    next_release(TAKEN | {"tests/test_own.py": "def test_own(): pass\n"})
    status = two_topics.run("rebase", "2.0")
    error = capsys.readouterr().err
    # The new base has our test's path: a file, where the topic has a link.
    assert status == 1 and "tests/test_own.py" in error and "'first'" in error
    Git(two_topics.root / "build" / "rebase")("rebase", "--skip")
    assert two_topics.run("rebase", "--continue") == 0
    assert "dropped" in capsys.readouterr().out
    assert [t.name for t in load(two_topics.root).topics] == ["second"]


# --- for upstream -------------------------------------------------------------


def test_series_applies_to_the_release_with_git_am(two_topics, tmp_path):
    out = tmp_path / "mail"
    assert two_topics.run("series", str(out)) == 0
    patches = sorted(out.iterdir())
    assert [p.name[:5] for p in patches] == ["0001-", "0002-"]
    assert " line 4\n" in patches[0].read_text(), "full context"
    assert "+VALUE = 1" in patches[1].read_text(), "contents, not links"
    plain = tmp_path / "plain"
    for name, text in BASE_FILES.items():
        (plain / name).parent.mkdir(parents=True, exist_ok=True)
        (plain / name).write_bytes(text.encode())
    git = Git(plain)
    git.init()
    git("add", "--all", "--force")
    git("commit", "-qm", "release")
    git("am", *(str(p) for p in patches))
    for name in ("setup.py", "vllm/engine.py", "vllm/own.py", "tests/test_own.py"):
        assert (plain / name).read_bytes() == (two_topics.tree / name).read_bytes()
        assert not (plain / name).is_symlink()
    # A second run into the same folder would mix two series.
    assert two_topics.run("series", str(out)) == 1


# --- pieces -------------------------------------------------------------------


def test_versions():
    root = Path(__file__).resolve().parents[2]
    series = load(root)
    revision = series.revision
    assert series.version("cuda") == f"{series.base.version}+sm70.{revision}"
    assert series.version("cpu") == f"{series.base.version}+sm70.{revision}.cpu"


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        (b"@@ -1 +1 @@\n-a\n+b\n", "before any file"),
        (b"diff --git a/x b/y\n", "rename"),
        (b"diff --git a/x b/x\nhello\n", "not a line of a patch"),
        (b"diff --git a/x b/x\n@@ -1,2 +1 @@\n-a\n+b", "cut short"),
        (b"diff --git a/x b/x\n@@ -1 +0,0 @@\n+a\n", "longer"),
    ],
)
def test_a_file_that_is_no_patch(text, needle):
    with pytest.raises(ForkError, match=needle):
        patchfile.parse(text, "x.patch")


def test_a_patch_without_index_lines_is_a_problem():
    parsed = patchfile.parse(b"diff --git a/x b/x\n@@ -1 +1 @@\n-a\n+b\n", "x.patch")
    assert len(parsed.problems) == 1 and "index" in parsed.problems[0]
    assert (parsed.files[0].added, parsed.files[0].removed) == (1, 1)
