"""`neffbuild merge-report`: one report of those that shards wrote."""

from __future__ import annotations

from pathlib import Path

import click

from neffbuild.cli import options, output


@click.command(name="merge-report")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE…")
@options.json_option
def command(files: tuple[Path, ...], as_json: bool) -> int:
    """Join the reports that `neffbuild compile --shard I/N --json` wrote to FILEs into one.

    Exits 1 when some unit failed, or is in none of the reports. Of a unit that several reports have,
    the best outcome counts.
    """
    from neffbuild.report.merge import merge_reports
    from neffbuild.report.run_files import read_report
    from neffbuild.report.text import report_text, seconds

    merged = merge_reports([read_report(path) for path in files])
    if as_json:
        output.print_json(merged.document)
        return 0 if merged.complete else 1
    output.write(report_text(merged.rows))
    longest = seconds(merged.document["wall_seconds"])
    output.write(f"{len(files)} reports, the longest of {longest}")
    if merged.absent_units:
        where = f": no report of shard {', '.join(merged.absent_shards)}"
        output.write(
            f"{merged.absent_units} more units are in none of the reports"
            + (where if merged.absent_shards else "")
        )
    return 0 if merged.complete else 1
