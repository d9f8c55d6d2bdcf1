"""The tables of a plan."""

from __future__ import annotations

from dflash_perf.front import FrontPoint, pareto_front
from dflash_perf.report.report_tables import DASH, Table, format_ratio
from dflash_trt.bundle.memory.cache_bytes import (
    KV_ITEM_BYTES,
    USUAL_CONTEXTS,
    dense_draft_context_bytes,
)
from dflash_trt.deploy.planning.calibration import StoredCalibration
from dflash_trt.deploy.planning.cost import Seconds
from dflash_trt.deploy.planning.decoding import Kind
from dflash_trt.deploy.planning.projection import BASELINE, TAU, Projection, Sensitivity

NOT_REACHABLE = "not reachable"
UNIT = "tokens/s per GPU"
_GRID = tuple(step * 10**power for power in range(5) for step in (1, 2, 3, 4, 5, 6, 8))
_SPAN = 16


def projected_front(plan: Projection, kind: Kind) -> tuple[FrontPoint, ...]:
    """The Pareto front of one way of decoding."""
    return pareto_front(
        FrontPoint(point.interactivity, point.throughput, point.label)
        for point in plan.points[kind]
    )


def answer_table(plan: Projection) -> Table:
    """Each way of decoding at the interactivity: throughput, best layout and what limits it."""
    rows = []
    for kind in plan.points:
        point, fastest = plan.answer(kind), plan.fastest(kind)
        reach = f"at most {fastest.interactivity:,.0f} tokens/s per user ({fastest.label})"
        cells = {
            "decoding": kind,
            "best configuration": point.label if point else reach,
            "limited by": describe_limit(point.step) if point else "",
            UNIT: f"{point.throughput:,.0f}" if point else NOT_REACHABLE,
            f"÷ {next(iter(plan.points))}": format_ratio(plan.ratio(kind) if point else None),
            "τ": format_ratio(point.tau if point else None),
        }
        rows.append(cells)
    return Table.of(rows, words=3)


def describe_limit(step: Seconds) -> str:
    """What takes the largest part of a step's time, and that part."""
    return f"{step.limit} ({step.largest / step.total:.0%})"


def front_table(plan: Projection) -> Table:
    """What each decoding gives at round interactivities, and how the drafter is run there."""
    own = plan.pair.drafter
    fastest = max(plan.fastest(kind).interactivity for kind in plan.points)
    chosen = [x for x in _GRID if fastest / _SPAN <= x <= fastest]
    rows = []
    for asked in sorted({*chosen, *filter(None, [plan.interactivity])}):
        found = {kind: plan.answer(kind, asked) for kind in plan.points}
        drafted = found[own]
        rates = {
            str(kind): DASH if one is None else f"{one.throughput:,.0f}"
            for kind, one in found.items()
        }
        cells = {
            "tokens/s per user": f"{asked:g}",
            **rates,
            "÷ autoregressive": format_ratio(plan.ratio(own, asked)),
            f"{own}'s configuration": DASH if drafted is None else drafted.label,
        }
        rows.append(cells)
    return Table.of(rows)


def block_table(plan: Projection) -> Table:
    """The best block by batch on the layout of the drafter's answer; block 1 is no speculation."""
    rows = []
    for best, plain in plan.blocks():
        cells = {
            "users": f"{best.batch}",
            "limited by": describe_limit(best.step),
            "block": f"{best.verified}",
            "τ": f"{best.tau:.2f}",
            "tokens/s per user": f"{best.interactivity:,.0f}",
            UNIT: f"{best.throughput:,.0f}",
            "÷ autoregressive": f"{best.throughput / plain.throughput:.2f}",
        }
        rows.append(cells)
    return Table.of(rows, words=2)


def memory_table(plan: Projection) -> Table:
    """With the pair's draft: bytes on a GPU by layout, and users that all GPUs hold by context."""
    own = plan.pair.drafter
    longest = plan.pair.target.max_position_embeddings
    asked = sorted({plan.workload.context, *(c for c in USUAL_CONTEXTS if c <= longest)})
    rows = []
    for layout in plan.site.layouts:
        fit = plan.memory(layout, own)
        replicas = plan.site.gpus // layout.gpus
        cells = {
            "layout": layout.label,
            "target": gigabytes(fit.target_weights),
            "draft": gigabytes(fit.draft_weights),
            "KV of a user": f"{fit.target_kv / 1e6:,.0f} MB",
            "draft's KV of a user": f"{fit.draft_kv / 1e6:,.0f} MB",
            "workspace": gigabytes(fit.workspace),
        }
        for context in asked:
            users = replicas * plan.memory(layout, own, context).users
            cells[f"users at {context:,}"] = f"{users:,}"
        rows.append(cells)
    return Table.of(rows)


def sensitivity_table(plan: Projection, stored: StoredCalibration) -> Table | None:
    """The change of the drafter's answer if a parameter is 20 % off; None without an answer."""

    def show(change: float | None) -> str:
        return NOT_REACHABLE if change is None else f"{change:+.0%}"

    def origin(one: Sensitivity) -> str:
        if one.parameter == TAU:
            return plan.acceptance[plan.pair.drafter]
        is_stored = one.value == getattr(stored.parameters, one.parameter)
        return stored.origin[one.parameter] if is_stored else "given"

    rows = tuple(
        (one.parameter, origin(one), f"{one.value:g}", show(one.lower), show(one.higher))
        for one in plan.sensitivity
    )
    header = ("parameter", "origin", "value", "answer at -20 %", "answer at +20 %")
    return Table(header, rows, words=2) if rows else None


def accuracy_table(stored: StoredCalibration) -> Table:
    """The planner's errors against published measurements."""
    rows = [
        {
            "published table": one.table,
            "used": "fitted to it" if one.fitted else "held out",
            "note": one.note,
            "median error": DASH if one.median is None else f"{one.median:.1%}",
            "worst error": DASH if one.worst is None else f"{one.worst:+.1%}",
        }
        for one in stored.accuracy
    ]
    return Table.of(rows, words=3)


def plan_title(plan: Projection) -> str:
    """The title of a plan, on terminals and pages."""
    where = f"{plan.site.gpus} × {plan.site.gpu.title}"
    return f"PROJECTION, not measured: {plan.pair.name} on {where}"


def plan_headline(plan: Projection) -> str:
    """The answer in a sentence or two: the best at the interactivity, or both ends of the front."""
    kinds = list(plan.points)
    quickest = max(kinds, key=lambda kind: plan.fastest(kind).interactivity)
    fastest = plan.fastest(quickest)
    most = f"{fastest.interactivity:,.0f} tokens/s per user ({fastest.label})"
    if plan.interactivity is None:
        plain = plan.fastest(BASELINE).interactivity
        over = f", {fastest.interactivity / plain:.2f} times {BASELINE}"
        best = {kind: max(point.throughput for point in plan.points[kind]) for kind in kinds}
        fullest = max(kinds, key=best.__getitem__)
        return (
            f"For one user, {quickest} gives the most: {most}"
            f"{'' if quickest == BASELINE else over}. For many, {fullest} does: "
            f"{best[fullest]:,.0f} {UNIT}, where interactivity is lowest."
        )
    found = {kind: point for kind in kinds if (point := plan.answer(kind)) is not None}
    asked = f"{plan.interactivity:g} tokens/s per user"
    if not found:
        return f"Nothing reaches {asked}: the most is {quickest}'s, {most}."
    best_kind = max(found, key=lambda kind: found[kind].throughput)
    best_point = found[best_kind]
    answer = f"{best_point.throughput:,.0f} {UNIT} ({best_point.label})"
    ratio, over = plan.ratio(best_kind), ""
    if best_kind != BASELINE:
        over = f"; {BASELINE} does not reach it"
        over = over if ratio is None else f", {ratio:.2f} times {BASELINE}"
    return f"At {asked}, {best_kind} gives the most: {answer}{over}."


def sections(plan: Projection, stored: StoredCalibration) -> list[tuple[str, Table]]:
    """Every table with its heading, in order."""
    own = plan.pair.drafter
    first = []
    if plan.interactivity is not None:
        first = [(f"at {plan.interactivity:g} tokens/s per user", answer_table(plan))]
    found = [
        *first,
        (f"projected fronts, {UNIT}", front_table(plan)),
        (f"best block by users of a replica, {plan.layout.label}", block_table(plan)),
        (f"memory of one GPU with {own}, and users that all GPUs hold", memory_table(plan)),
        (f"how {own}'s answer depends on parameters", sensitivity_table(plan, stored)),
        (f"the model on published measurements ({stored.fitted_by})", accuracy_table(stored)),
    ]
    return [(heading, table) for heading, table in found if table is not None]


def describe(plan: Projection) -> list[str]:
    """The question and the assumptions behind the answer, one line each."""
    target, site, work = plan.pair.target, plan.site, plan.workload
    wide = site.kv_item_bytes == KV_ITEM_BYTES
    lines = [
        f"requests of {work.input_tokens:,} + {work.output_tokens:,} tokens, {work.context:,} "
        f"reserved for each; target: attention in {target.attention_format}, "
        f"{'MLP' if target.experts is None else 'experts'} in {target.mlp_format}; "
        + ("drafts and KV caches in bf16" if wide else "drafts in bf16, KV caches in fp8"),
        f"{site.gpu.title}: {site.gpu.bandwidth / 1e12:g} TB/s, {site.gpu.memory_bytes / 1e9:,.0f} "
        f"GB, {site.gpu.link}; source: {site.gpu.source}",
    ]
    lines += [f"note: {note}" for note in plan.notes]
    for kind, source in plan.acceptance.items():
        decoding = plan.decodings[kind]
        most = max(decoding.drafts())
        lines.append(
            f"{kind}: τ {decoding.tau(most):.2f} with {decoding.verified(most)} rows ({source})"
        )
    own = plan.pair.drafter
    draft = plan.decodings[own].draft
    if draft is not None:
        users = max(plan.memory(layout, own).users for layout in site.layouts)
        dense = dense_draft_context_bytes(draft, users, work.context)
        lines.append(
            "caches are taken to be paged; a draft context that is allocated densely for "
            f"{users:,} users of {work.context:,} tokens takes {gigabytes(dense)} in all"
        )
    if target.experts is not None:
        lines.append(
            "experts are taken to be drawn evenly: real routing touches fewer, but some GPUs more"
        )
    return lines


def gigabytes(size: float) -> str:
    """Bytes as decimal GB, as in data sheets."""
    return f"{size / 1e9:,.1f} GB"
