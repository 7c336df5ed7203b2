"""``memfit report``: put files of earlier commands on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.options import AsJson
from memfit.cli.output import check_outputs, print_json, print_written
from memfit.documents import kind_of, read_document
from memfit.errors import InvalidParameterError

if TYPE_CHECKING:
    from memfit.graph.model_profile import ModelProfile
    from memfit.graph.plan import Plan
    from memfit.graph.verification import Verification


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="One profile; plans and verifications of it.", show_default=False),
    ],
    html: Annotated[Path, typer.Option("--html", help="Write the report page to this file.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Put a profile, and plans and verifications of it, on one page.

    [dim]memfit report profile.json plan.json verification.json --html page.html[/]
    """
    from memfit.cli.pages import NUM_POINTS, report_data
    from memfit.cli.stages import frontier_of
    from memfit.report.page import write_page

    profiles, plans, verifications = _read(files)
    if len(profiles) != 1:
        raise InvalidParameterError(
            f"a page is about one profile, as `memfit profile TARGET -o profile.json` writes it; got {len(profiles)} "
            f"among {len(files)} files"
        )
    ((profile_file, profile),) = profiles.items()
    fingerprints = {file: other.fingerprint for file, other in plans.items()}
    fingerprints |= {file: other.fingerprint for file, other in verifications.items()}
    for file, fingerprint in fingerprints.items():
        if fingerprint != profile.fingerprint:
            raise InvalidParameterError(f"{file} is about another model than {profile_file}; leave one of them out")
    check_outputs(html, inputs=files)
    plan = next(iter(plans.values()), None)
    # The frontier for as much host memory as the plan uses, so that the plan lies on it.
    host_bytes = plan.host_bytes if plan is not None and profile.link is not None else 0
    points = frontier_of(profile, NUM_POINTS, host_bytes)
    data = report_data(profile, points, title=profile_file.name, plan=plan, verifications=tuple(verifications.values()))
    write_page(html, data)
    if as_json:
        print_json({"html": str(html), "num_points": len(points), "num_marks": len(data.marks)})
    else:
        print_written(html)


def _read(files: list[Path]) -> tuple[dict[Path, ModelProfile], dict[Path, Plan], dict[Path, Verification]]:
    from memfit.graph.model_profile import ModelProfile
    from memfit.graph.plan import Plan
    from memfit.graph.plan_file import PLAN_FORMAT
    from memfit.graph.profile_file import PROFILE_FORMAT
    from memfit.graph.verification import Verification
    from memfit.graph.verification_file import VERIFICATION_FORMAT

    load = {PROFILE_FORMAT: ModelProfile.load, PLAN_FORMAT: Plan.load, VERIFICATION_FORMAT: Verification.load}
    found: dict[str, dict[Path, Any]] = {kind: {} for kind in load}
    for file in files:
        kind = kind_of(read_document(file), file, load)
        found[kind][file] = load[kind](file)
    return found[PROFILE_FORMAT], found[PLAN_FORMAT], found[VERIFICATION_FORMAT]
