"""What a machine grants: no more than its container may have, and all where nothing is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines import host

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
CORES = 64


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 cores, whose control groups are empty, and we in one called a/b."""
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)
    (tmp_path / "own").write_text("3:cpu:/x\n0::/a/b\n")
    (tmp_path / "groups/a/b").mkdir(parents=True)
    return tmp_path / "groups"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.usefixtures("groups")
def test_without_limits_everything_is_ours() -> None:
    assert (host.cores(), host.memory()) == (CORES, WHOLE)


def test_no_limit_is_no_limit(groups: Path) -> None:
    write(groups, memory__max="max", cpu__max="max 100000")
    write(groups / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert (host.cores(), host.memory()) == (CORES, WHOLE)


@pytest.mark.parametrize("place", ["", "a", "a/b"])
def test_a_limit_of_ours_or_of_a_group_around_us_holds(groups: Path, place: str) -> None:
    write(groups / place, memory__max="123456", cpu__max="150000 100000")
    assert (host.cores(), host.memory()) == (2, 123456)


def test_the_least_limit_holds(groups: Path) -> None:
    write(groups, memory__max="123456", cpu__max="300000 100000")
    write(groups / "a/b", memory__max="1234", cpu__max="20000 100000")
    assert (host.cores(), host.memory()) == (1, 1234)


def test_a_limit_of_another_group_is_not_ours(groups: Path) -> None:
    write(groups / "a/c", memory__max="1234", cpu__max="100000 100000")
    assert (host.cores(), host.memory()) == (CORES, WHOLE)


def test_limits_of_the_older_kind_hold(groups: Path) -> None:
    write(groups / "memory", **{"memory__limit_in_bytes": "4321"})
    write(groups / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert (host.cores(), host.memory()) == (2, 4321)


def test_a_machine_that_says_nothing_is_taken_whole(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "OWN", groups / "missing")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (host.cores(), host.memory()) == (1, WHOLE)
