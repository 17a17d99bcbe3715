"""What `spot` shows: offers as a table, a launch before it is made, and events as lines of JSON."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gemma_neuron.render import emit_lines, size
from gemma_neuron.render.table import table

if TYPE_CHECKING:
    from gemma_neuron.pipeline.spot import LaunchPlan
    from gemma_neuron.spot.offers import Offer, Scan
    from gemma_neuron.spot.poller import Taken


def event_line(fields: dict[str, Any], *, to_stderr: bool = False) -> None:
    """One event, one line of JSON; where standard output belongs to the one document, on stderr."""
    stream = sys.stderr if to_stderr else sys.stdout
    when = datetime.now(UTC).isoformat(timespec="seconds")
    stream.write(json.dumps({"time": when, **fields}) + "\n")
    stream.flush()


def show_scan(scan: Scan) -> None:
    """Offers, best first; then what could not be seen."""
    offered = [offer for offer in scan.offers if offer.offered]
    columns = ("zone", "type", "USD an hour", "last day", "quota", "score", "had", "kept")
    table("", columns, (_row(offer) for offer in offered))
    missing = sorted({f"{o.pool.region} {o.pool.type}" for o in scan.offers} - {
        f"{o.pool.region} {o.pool.type}" for o in offered
    })  # fmt: skip
    lines = [f"not offered: {', '.join(missing)}"] if missing else []
    lines += [f"not seen: {p.region}: {p.doing}: {p.code}: {p.said}" for p in scan.problems]
    lines.append(
        "quota: spot vCPUs in use of those allowed; score: EC2's hint, 1 to 10, low for few types"
    )
    emit_lines(lines)


def show_launch_plan(plan: LaunchPlan) -> None:
    """What would run, where, what it would cost, what would cross regions."""
    show_scan(plan.scan)
    lines = launch_lines(plan)
    if not plan.candidates:
        lines.append("no offer is within quota and price now; it would be waited for")
    emit_lines([*lines, "nothing was bought or made; --apply does"])


def launch_lines(plan: LaunchPlan) -> list[str]:
    """What must be known before anything is bought."""
    request = plan.request
    best = next(iter(plan.candidates), None)
    lines = [f"job {request.job}: gemma-neuron {' '.join(request.command)}"]
    lines += [f"adopts: {box}; nothing would be launched" for box in plan.boxes]
    lines.append(
        f"expected: {plan.hours:.1f} h on a new mirror (compiling took {plan.planned.compile_time.run.minutes:g} min "
        f"for the nearest published port; {size(plan.checkpoint_bytes + plan.port_bytes)} moved, start assumed)"
    )
    lines += _money(plan, best)
    for region in request.regions:
        count = plan.cross_region_bytes(region)
        if count:
            lines.append(
                f"{region}: about {size(count)} would cross to or from the mirror in {plan.bucket_region}, "
                "which AWS bills"
            )
    lines += [f"left out: {why}" for why in plan.left_out.values()]
    if plan.place is not None:
        lines.append(
            f"box: image {plan.place.image}, root {plan.place.root_gib} GiB gp3 encrypted, profile {request.profile}, "
            f"no inbound rule, IMDSv2 only, ends itself after {request.max_hours:g} h; runs {request.toolkit}"
        )
    return lines


def _money(plan: LaunchPlan, best: Offer | None) -> list[str]:
    request, lines = plan.request, []
    if best is not None and best.price is not None:
        lines.append(
            f"price: {best.price:.4f} USD an hour now in {best.pool.zone}: about {best.price * plan.hours:.2f} USD, "
            f"at that price at most {best.price * request.max_hours:.2f} a box (volume and transfer aside)"
        )
    cap = request.max_price
    lines.append(
        "cap: none (EC2's own: the on-demand price)"
        if cap is None
        else f"cap: {cap:.4f} USD an hour"
    )
    for name, price in plan.on_demand.items():
        after = (request.on_demand_after or 0.0) / 60
        shown = "price not known" if price is None else f"{price:.4f} USD an hour"
        over = cap is not None and (price is None or price > cap)
        what = "never, over the cap" if over else f"after {after:g} min"
        lines.append(f"on demand, {name}: {what}, {shown}")
    return lines


def taken_fields(taken: Taken, job: str) -> dict[str, Any]:
    """The document of `spot launch --apply --json`."""
    return {
        "applied": True,
        "job": job,
        "adopted": taken.adopted,
        "rounds": taken.rounds,
        "seconds": round(taken.seconds, 1),
        "box": taken.box.to_json(),
    }


def _row(offer: Offer) -> tuple[str, ...]:
    day = f"{offer.low:.4f} to {offer.high:.4f}" if offer.low is not None and offer.high else "?"
    limit = "?" if offer.quota_vcpus is None else str(offer.quota_vcpus)
    return (
        offer.pool.zone,
        offer.pool.type,
        "?" if offer.price is None else f"{offer.price:.4f}",
        day,
        f"{offer.used_vcpus or 0} of {limit}" + (" (too small)" if offer.lacks_quota else ""),
        "?" if offer.score is None else str(offer.score),
        str(offer.had or ""),
        "" if offer.kept_minutes is None else f"{offer.kept_minutes:.0f} min",
    )
