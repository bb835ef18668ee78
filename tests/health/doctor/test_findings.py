from __future__ import annotations

from hpc_train.health.doctor.findings import Finding, format_report, merge, worst_first, would_stop_a_run


def test_equal_findings_of_several_hosts_become_one() -> None:
    low = [Finding("limits.files", "warning", "1024 open files", "ulimit", (f"n{index}",)) for index in range(1, 4)]
    other = Finding("limits.files", "warning", "512 open files", "ulimit", ("n9",))
    merged = merge([*low, other, *low])
    assert [finding.hosts for finding in merged] == [("n1", "n2", "n3"), ("n9",)]
    assert "[n[1-3]] 1024" in format_report(merged, 4)
    assert "[" not in format_report(merge(low), 3).split("1024")[0]


def test_areas_and_findings_come_worst_first_with_the_cure_below() -> None:
    findings = [
        Finding("slurm.version", "ok", "a"),
        Finding("mpi.plugin", "ok", "b"),
        Finding("mpi.trial", "error", "c", "do this"),
        Finding("storage.space", "warning", "d"),
    ]
    assert [finding.id for finding in worst_first(findings)] == [
        "mpi.trial", "mpi.plugin", "storage.space", "slurm.version",
    ]  # fmt: skip
    lines = format_report(findings, 1).splitlines()
    at = next(index for index, line in enumerate(lines) if "mpi.trial" in line)
    assert lines[at + 1].strip() == "cure: do this"
    assert lines[-1] == "1 error, 1 warning, 0 notes, 2 ok: a run would be stopped by the errors."


def test_only_an_error_stops_a_run() -> None:
    assert not would_stop_a_run([Finding("a.b", level, "") for level in ("ok", "note", "warning")])
    assert would_stop_a_run([Finding("a.b", "ok", ""), Finding("a.c", "error", "")])


def test_a_thousand_hosts_with_a_thousand_numbers_stay_readable_and_all_named() -> None:
    findings = [Finding("storage.space", "warning", f"{index} MiB free", "", (f"n{index}",)) for index in range(1000)]
    report = format_report(merge(findings), 1000)
    assert len(report.splitlines()) < 12
    assert "[n[4-999]] 4 MiB free (and 995 alike)" in report


def test_json_gives_back_the_same_finding() -> None:
    finding = Finding("devices.map", "ok", "x", "y", ("n1", "n2"), ("gpu  nic",))
    assert Finding.from_json(finding.as_json()) == finding
    assert finding.as_json()["hostlist"] == "n[1-2]"
