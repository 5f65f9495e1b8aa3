# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``patches/series.toml``: the pinned base and the ordered topics."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tools.fork.errors import ForkError

SERIES = "patches/series.toml"
# Folders that hold nothing but files of the fork: each file there belongs to
# exactly one topic.
FORK_DIRS = ("vllm", "csrc", "cmake", "tests", "benchmarks", "docs")

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
SHA256 = re.compile(r"[0-9a-f]{64}")
TOPIC_TRAILER = "Topic: "


@dataclass(frozen=True)
class Pin:
    """A release on the package index: its name, version and archive's sha256."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Topic:
    """One change of the series.

    Attributes:
        name: Names the patch, ``patches/<name>.patch``.
        title: First line of the commit, in upstream's style.
        why: The commit's body.
        hooks: Upstream files that the patch edits.
        files: Files that the topic adds, tests excepted.
        tests: Test files that the topic adds.
        upstream_tests: Upstream's own test files for what the topic edits;
            they must pass on the merged tree as they do on the base.
        upstream: The related upstream issue or change.
        drop_when: What must be true upstream for the topic to go.
    """

    name: str
    title: str
    why: str
    hooks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    upstream_tests: tuple[str, ...] = ()
    upstream: str = ""
    drop_when: str = ""

    @property
    def patch(self) -> str:
        """Path of the topic's patch in the repository."""
        return f"patches/{self.name}.patch"

    @property
    def added(self) -> tuple[str, ...]:
        """Every file that the topic adds to the tree, tests included."""
        return tuple(sorted({*self.files, *self.tests}))

    @property
    def message(self) -> str:
        """The topic's commit message."""
        return f"{self.title}\n\n{self.why.strip()}\n\n{TOPIC_TRAILER}{self.name}\n"


@dataclass(frozen=True)
class Series:
    """The parsed ``series.toml``.

    Attributes:
        base: The upstream release that the patches apply to.
        cpu_extension: The wheel that upstream's CPU extension is taken from.
        revision: N of the fork's version ``<base>+sm70.N``.
        topics: In the order in which they apply.
    """

    base: Pin
    cpu_extension: Pin
    revision: int
    topics: tuple[Topic, ...] = field(default=())

    def topic(self, name: str) -> Topic:
        """The topic of that name; raises ForkError."""
        for topic in self.topics:
            if topic.name == name:
                return topic
        known = ", ".join(t.name for t in self.topics)
        raise ForkError(f"{SERIES} has no topic {name!r}; it has: {known}")

    def version(self, device: str) -> str:
        """The package version for a target device (PEP 440, local part ``sm70``)."""
        local = f"sm70.{self.revision}"
        if device == "cpu":
            # Upstream picks its CPU platform by this word in the version.
            local += ".cpu"
        return f"{self.base.version}+{local}"


def parse_message(message: str) -> tuple[str | None, str, str]:
    """Split a commit message into (topic name or None, title, why)."""
    lines = message.strip("\n").split("\n")
    name = None
    if lines and lines[-1].startswith(TOPIC_TRAILER):
        name = lines.pop()[len(TOPIC_TRAILER) :].strip()
    return name, lines[0].strip(), "\n".join(lines[1:]).strip("\n")


def _text(table: dict, key: str, where: str, *, required: bool = True) -> str:
    value = table.get(key, "")
    if not isinstance(value, str) or (required and not value.strip()):
        raise ForkError(f"{SERIES}: {where}.{key} must be a non-empty string")
    return value


def _paths(table: dict, key: str, where: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ForkError(f"{SERIES}: {where}.{key} must be a list of paths")
    for path in value:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != path:
            raise ForkError(
                f"{SERIES}: {where}.{key}: {path!r} must be a plain path below the "
                "repository's root"
            )
    if len(set(value)) != len(value):
        raise ForkError(f"{SERIES}: {where}.{key} lists a path twice")
    return tuple(value)


def _pin(document: dict, key: str) -> Pin:
    table = document.get(key)
    if not isinstance(table, dict):
        raise ForkError(f"{SERIES}: the table [{key}] is missing")
    pin = Pin(*(_text(table, part, key) for part in ("name", "version", "sha256")))
    if not SHA256.fullmatch(pin.sha256):
        raise ForkError(f"{SERIES}: {key}.sha256 must be 64 hexadecimal digits")
    return pin


def _topic(table: dict, position: int) -> Topic:
    name = table.get("name", "")
    where = f"topic[{position}]"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ForkError(
            f"{SERIES}: {where}.name is {name!r}: lower-case words joined by '-' "
            "are expected"
        )
    where = f"topic {name!r}"
    title = _text(table, "title", where)
    if "\n" in title:
        raise ForkError(f"{SERIES}: {where}.title must be one line")
    return Topic(
        name=name,
        title=title,
        why=_text(table, "why", where).strip("\n"),
        hooks=_paths(table, "hooks", where),
        files=_paths(table, "files", where),
        tests=_paths(table, "tests", where),
        upstream_tests=_paths(table, "upstream_tests", where),
        upstream=_text(table, "upstream", where, required=False),
        drop_when=_text(table, "drop_when", where, required=False),
    )


def load(root: Path) -> Series:
    """Read ``patches/series.toml`` below ``root``; raises ForkError."""
    path = root / SERIES
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ForkError(f"{SERIES} is missing below {root}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ForkError(f"{SERIES} is not valid TOML: {err}") from err
    fork = document.get("fork", {})
    revision = fork.get("revision") if isinstance(fork, dict) else None
    if not isinstance(revision, int) or isinstance(revision, bool) or revision < 1:
        raise ForkError(f"{SERIES}: fork.revision must be a positive whole number")
    tables = document.get("topic", [])
    if not isinstance(tables, list):
        raise ForkError(f"{SERIES}: topics are [[topic]] tables")
    topics = tuple(_topic(table, i) for i, table in enumerate(tables))
    seen: dict[str, str] = {}
    for topic in topics:
        if topic.name in seen:
            raise ForkError(f"{SERIES}: two topics are named {topic.name!r}")
        seen[topic.name] = topic.name
    owners: dict[str, str] = {}
    for topic in topics:
        for added in topic.added:
            if added in owners:
                raise ForkError(
                    f"{SERIES}: {added} is listed by the topics {owners[added]!r} "
                    f"and {topic.name!r}; one of them must own it"
                )
            owners[added] = topic.name
    return Series(
        base=_pin(document, "base"),
        cpu_extension=_pin(document, "cpu_extension"),
        revision=revision,
        topics=topics,
    )


def save(root: Path, series: Series) -> bool:
    """Write what changed in ``series`` to ``series.toml``, keeping its layout.

    Returns:
        Whether the file's bytes changed.
    """
    import tomlkit

    path = root / SERIES
    before = path.read_text(encoding="utf-8")
    document = tomlkit.parse(before)

    def put(table, key: str, value) -> None:
        current = table.get(key)
        if isinstance(value, tuple):
            if current is not None and tuple(current) == value:
                return
            array = tomlkit.array()
            array.extend(value)
            table[key] = array.multiline(len(value) > 1)
        elif isinstance(value, str) and "\n" in value:
            if (current or "").strip("\n") != value:
                # Parsed, so that the text starts on the line after the quotes.
                escaped = value.replace("\\", "\\\\").replace('"""', '""\\"')
                table[key] = tomlkit.value(f'"""\n{escaped}\n"""')
        elif current is None or (
            current.strip("\n") != value if isinstance(value, str) else current != value
        ):
            table[key] = value

    for key, pin in (("base", series.base), ("cpu_extension", series.cpu_extension)):
        for part in ("name", "version", "sha256"):
            put(document[key], part, getattr(pin, part))
    put(document["fork"], "revision", series.revision)

    old = {table["name"]: table for table in document.get("topic", [])}
    order = [topic.name for topic in series.topics]
    tables = []
    for topic in series.topics:
        table = old.get(topic.name)
        if table is None:
            table = tomlkit.table()
        for key in ("name", "title", "why", "hooks", "files", "tests"):
            if getattr(topic, key) or key in table:
                put(table, key, getattr(topic, key))
        for key in ("upstream_tests", "upstream", "drop_when"):
            if key not in table:
                put(table, key, getattr(topic, key))
        tables.append(table)
    if list(old) != order:
        topics = tomlkit.aot()
        for table in tables:
            topics.append(table)
        document["topic"] = topics
    after = tomlkit.dumps(document)
    # A table that moves takes the blank lines behind it along, and gets another.
    after = re.sub(r"\n{3,}(?=\[\[topic\]\])", "\n\n", after)
    if tomllib.loads(after) == tomllib.loads(before):
        return False
    path.write_text(after, encoding="utf-8")
    return True
