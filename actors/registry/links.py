"""Which prefill and decode instances can hand requests over, as both sides say. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from messages.cluster import InstanceInfo, LinkReport

Linked = tuple[tuple[str, str], ...]
Refused = tuple[tuple[str, str, str], ...]


def join_reports(old: tuple[LinkReport, ...], new: tuple[LinkReport, ...]) -> tuple[LinkReport, ...]:
    """What is known after ``new`` came: the newer life of each peer, and of one life that it is linked before that it
    was refused (a link is tried again, but never given up once it stands). So a report that comes late takes nothing
    back, whatever the order."""
    known = {report.instance: report for report in old}
    for report in new:
        before = known.get(report.instance)
        if before is None or _rank(report) > _rank(before):
            known[report.instance] = report
    return tuple(report for _, report in sorted(known.items()))


def _rank(report: LinkReport) -> tuple[int, bool]:
    return (report.incarnation, not report.refused)


def link_states(
    infos: Mapping[str, InstanceInfo], reports: Mapping[str, tuple[LinkReport, ...]]
) -> tuple[Linked, Refused]:
    """``ClusterView.links`` and ``refused`` of these live instances and what each last reported.

    Reports about a life of a peer that is not the live one count for nothing.
    """
    said = {
        (instance, report.instance): report.refused
        for instance in infos
        for report in reports.get(instance, ())
        if report.instance in infos and infos[report.instance].incarnation == report.incarnation
    }
    linked: list[tuple[str, str]] = []
    refused: list[tuple[str, str, str]] = []
    for prefill in sorted(name for name, info in infos.items() if info.role == "PREFILL"):
        for decode in sorted(name for name, info in infos.items() if info.role == "DECODE"):
            sides = [said.get(pair) for pair in ((prefill, decode), (decode, prefill))]
            if why := next(filter(None, sides), ""):
                refused.append((prefill, decode, why))
            elif None not in sides:
                linked.append((prefill, decode))
    return tuple(linked), tuple(refused)
