"""`python -m dflash_perf bench NAME`: runs a benchmark; `--help` says which there are."""

from __future__ import annotations

import sys

import click

from dflash_trt.errors import EXIT_FAILED, EXIT_USAGE, DflashError, nearest, one_line


def benches() -> dict[str, click.Command]:
    """All benchmarks; imported late, because child processes of a benchmark import this module."""
    from dflash_perf.bench import (  # noqa: F401 - an import declares a module's benchmark
        kernel_resources,
        kill_campaign,
        peers,
        planner_fit,
        served_demo,
        speed,
        two_checkouts,
    )
    from dflash_perf.bench.base import BENCHES

    return dict(sorted(BENCHES.items()))


class _Benches(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(benches())

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            lines = {name: (one.help or "").partition("\n")[0] for name, one in benches().items()}
            formatter.write_dl(list(lines.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in benches():
            hint = nearest(cmd_name, list(benches()))
            raise DflashError(
                f"no benchmark is called {one_line(cmd_name, 60)!r}{hint}", usage=True
            )
        return benches()[cmd_name]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Benchmarks of this project."""


@cli.group("bench", cls=_Benches)
def _bench() -> None:
    """Runs a benchmark."""


def main(arguments: list[str]) -> int:
    """Runs the command line; 0 done, 1 a failure, 2 wrong usage, 130 interrupted."""
    try:
        cli.main(arguments, prog_name="python -m dflash_perf", standalone_mode=False, obj=arguments)
    except DflashError as error:
        click.echo(f"error: {error.message}", err=True)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        click.echo(f"error: {one_line(error.format_message())}", err=True)
        return EXIT_USAGE
    except OSError as error:
        click.echo(f"error: {error.filename or 'system'}: {error.strerror or error}", err=True)
        return EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
