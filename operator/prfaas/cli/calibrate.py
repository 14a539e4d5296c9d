"""`prfaas calibrate`: a profile from measured prefills, how sure it is, and whether the one in force still holds."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.arguments import at_least_zero, existing_file, picture

if TYPE_CHECKING:
    from prfaas.api.profile import Profile
    from prfaas.planner.calibration import Calibration

SHOWN = 6
"""Lengths in the table."""
NAMED = 3
"""Left-out samples of one kind that are named."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="a profile from measured prefills",
        description="Fit T(l), S(l) and a link's rate to the lines of a CSV file: tokens,cached,seconds,concurrency "
        "[,age_seconds][,censored][,bytes][,transfer_seconds]; the first line names the columns.",
    )
    parser.add_argument("samples", type=existing_file, metavar="SAMPLES.csv")
    parser.add_argument(
        "--against",
        metavar="PROFILE",
        help="the profile in force, a file or a shipped name: compared with, and source of what samples cannot say "
        "(accelerator, gpus, decode, startup)",
    )
    parser.add_argument("--max-age", type=at_least_zero, metavar="S", help="leave out older samples; default 7 days")
    parser.add_argument("-o", "--output", type=Path, metavar="PROFILE.yaml", help="write a Profile; needs --against")
    parser.add_argument("--plot", type=picture, metavar="OUT", help="draw samples and fit (.png or .svg)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit and print: 0, also when the profile in force has drifted; 1 with one line for what cannot be fitted."""
    from prfaas.planner.calibration import MAX_AGE, calibrate
    from prfaas.planner.calibration_samples import read_samples
    from prfaas.planner.errors import PlanError

    try:
        if args.output and not args.against:
            raise PlanError(
                "-o", "needs --against PROFILE, for the accelerator, gpus, decode and startup of the result"
            )
        in_force = _profile(args.against) if args.against else None
        with args.samples.open(encoding="utf-8", newline="") as lines:
            samples = read_samples(lines, str(args.samples))
        found = calibrate(samples, MAX_AGE if args.max_age is None else args.max_age)
        text = report(found, in_force)
        if args.output and in_force is not None:
            args.output.write_text(document(found, in_force), encoding="utf-8")
        if args.plot:
            plot(args.plot, found, in_force)
    except (PlanError, OSError) as error:
        print(f"prfaas calibrate: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


def report(found: Calibration, in_force: Profile | None) -> str:
    """The fit, its bounds, what was left out and why, and drift, for people."""
    from prfaas.planner.report import aligned

    octave, off = found.worst_octave
    text = [
        f"T(l) = {formula(found)} s, k = l/1000, from {len(found.kept):,} samples; one sample scatters by "
        f"{found.fit.spread:.1%}.",
        f"Valid from {found.shortest:,} uncached to {found.longest:,} tokens in all; beyond that nothing is claimed. "
        f"Worst octave: from {octave:,} tokens, its median sample is {off - 1:+.1%} off the curve.",
        "",
    ]
    rows = [["tokens", "T(l)", "95 % bounds"], ["", "s", "s"]]
    if in_force is not None:
        rows = [[*rows[0], "in force"], [*rows[1], "s"]]
    for tokens in found.lengths(SHOWN):
        bound = found.bound(tokens)
        row = [f"{tokens:,}", f"{bound.seconds:.4g}", f"{bound.low:.4g} to {bound.high:.4g}"]
        if in_force is not None:
            known = tokens <= (in_force.prefill.measured_tokens or tokens)
            row.append(f"{in_force.prefill.seconds(tokens):.4g}" if known else "-")
        rows.append(row)
    text += [*aligned(rows), ""]
    if found.kv is not None:
        text.append(f"S(n) = {found.kv.fixed_bytes:,} + {found.kv.bytes_per_token:,} n bytes.")
    if found.link_gbps is not None:
        text.append(f"Transfers ran at {found.link_gbps:.4g} Gbit/s (bytes over seconds).")
    text += _left_out(found)
    if in_force is not None:
        text.append(_drift(found, in_force))
    return "\n".join(text) + "\n"


def formula(found: Calibration) -> str:
    """T(l) with its figures."""
    a, b, c = found.fit.coefficients
    curve = f"{a:.4g} + {b:.4g} k + {c:.4g} k^2"
    return f"max({found.fit.floor:.4g}, {curve})" if found.fit.floor else curve


def document(found: Calibration, in_force: Profile) -> str:
    """The Profile as YAML, with the fit in its head."""
    import yaml

    content = found.profile(in_force).model_dump(mode="json", by_alias=True, exclude_none=True)
    error = found.bound(found.longest)
    head = [
        f"Fitted to {len(found.kept)} samples ({len(found.left_out)} left out), k = l/1000:",
        f"T(l) = {formula(found)} s",
        f"95 % bounds at {found.longest:,} tokens, the longest measured: {error.low:.4g} to {error.high:.4g} s.",
        "Decode and startup are those of the profile in force" + (", as is kv." if found.kv is None else "."),
    ]
    return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(content, sort_keys=False)


def plot(out: Path, found: Calibration, in_force: Profile | None) -> None:
    """Samples, the fit with its bounds, and the profile in force, both axes logarithmic. Raises PlanError, OSError."""
    from prfaas.cli.plots import figure, save

    drawn, (axes,) = figure()
    alone = [s for s in found.kept if not s.cached and not s.censored]
    part = [s for s in found.kept if s.cached and not s.censored]
    bounds = [found.bound(tokens) for tokens in found.lengths()]
    lengths = [bound.tokens for bound in bounds]
    axes.plot([s.tokens for s in alone], [s.seconds for s in alone], ".", color="0.6", markersize=4, label="samples")
    if part:
        xs, ys = [s.tokens - s.cached for s in part], [s.seconds for s in part]
        axes.plot(xs, ys, "+", color="0.6", markersize=5, label="samples with a cached prefix, over the rest")
    if found.left_out:
        xs = [each.sample.tokens - each.sample.cached for each in found.left_out]
        axes.plot(xs, [each.sample.seconds for each in found.left_out], "x", color="0.3", label="left out")
    axes.fill_between(lengths, [b.low for b in bounds], [b.high for b in bounds], color="0.75", label="95 % bounds")
    axes.plot(lengths, [b.seconds for b in bounds], "-", color="black", linewidth=1.8, label="T(l), fitted")
    if in_force is not None:
        said = [in_force.prefill.seconds(tokens) for tokens in lengths]
        axes.plot(lengths, said, "--", color="black", linewidth=1.2, label="T(l) of the profile in force")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("uncached tokens")
    axes.set_ylabel("prefill, s")
    axes.legend(fontsize=8, frameon=False)
    save(drawn, out)


def _profile(name: str) -> Profile:
    from prfaas.api.profiles import parse_profile, shipped, shipped_names
    from prfaas.planner.errors import PlanError

    if name in shipped_names():
        return shipped(name)
    path = Path(name)
    if not path.is_file():
        raise PlanError("--against", f"{name!r} is neither a file nor one of {', '.join(shipped_names())}")
    try:
        return parse_profile(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(name, " ".join(str(error).split())) from error


def _left_out(found: Calibration) -> list[str]:
    from prfaas.planner.calibration import LeftOut

    def kind(each: LeftOut) -> str:
        return "far off the others" if "times" in each.reason else each.reason

    lines = []
    for reason, count in Counter(kind(each) for each in found.left_out).most_common():
        some = [each for each in found.left_out if kind(each) == reason][:NAMED]
        named = "; ".join(each.sample.where + (f" ({each.reason})" if each.reason != reason else "") for each in some)
        lines.append(f"Left out, {reason}: {count:,}: {named}{'; ...' if count > NAMED else ''}.")
    return lines or ["No sample was left out."]


def _drift(found: Calibration, in_force: Profile) -> str:
    drift = found.drift(in_force)
    figures = (
        f"at {drift.tokens:,} tokens {drift.measured:.4g} s were measured and {drift.in_force:.4g} s are in force "
        f"({drift.ratio - 1:+.1%}); over all samples {drift.mean_ratio - 1:+.1%}."
    )
    return f"{'DRIFT' if drift.significant else 'No drift'}: {figures}"
