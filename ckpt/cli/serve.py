"""``ckpt serve``: show runs on a page in the browser."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Annotated, Final
from urllib.parse import quote

import typer

from ckpt.catalog.tensor_movement import Movement
from ckpt.catalog.tensor_reader import StepReader
from ckpt.cli import output
from ckpt.cli.options import PlacesArgument, RootsOption, places, tiers_of, with_memory
from ckpt.config import MEMORY
from ckpt.errors import ConfigError
from ckpt.observe.run_view import RunWatch, watch_runs
from ckpt.observe.timed_calls import results_in_time
from ckpt.page.prices import LIST_PRICES, price_of
from ckpt.page.server import address, listen, read_token
from ckpt.page.server import run as run_server
from ckpt.storage.tiers import resolve_tier, resolve_tiers
from ckpt.storage.urls import is_file, is_missing

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_PATIENCE_SECONDS: Final = 2.0
"""How long to wait for the answer of a file system whether a root exists."""
ConfigsOption = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="FILE", help="A run with all tiers of this ckpt.toml; again."),
]


def serve(
    arguments: PlacesArgument = None,
    root: RootsOption = None,
    config: ConfigsOption = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes any free port.")
    ] = 8472,
    token_file: Annotated[
        str | None,
        typer.Option(
            "--token-file", metavar="FILE", help="A file with the token that requests need."
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.2,
            help="The time between two looks at the stores. Default: 2 for folders, else 15.",
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="URL=DOLLARS[,DOLLARS,DOLLARS]",
            help=(
                "What a gigabyte costs a month on the tiers whose URL begins so, and a thousand "
                "puts and listings, and a thousand other requests; again."
            ),
        ),
    ] = None,
) -> None:
    r"""Show runs on a page in the browser, live.

    Each ROOT is a run. Roots that a journal names as tiers of one run are shown together. Each
    --config FILE is a run with all of its tiers. The page only shows, and changes nothing.

    Only this machine can reach the page unless --host names another address. Then requests need a
    token: the one in --token-file, or a new one, which is part of the address that is printed.
    Nothing is encrypted: reach another machine by an SSH tunnel
    (`ssh -L 8472:127.0.0.1:8472 node`) where others can listen.

    \b
    Examples:
      ckpt serve runs/gpt
      ckpt serve /nvme/ckpt /lustre/run42
      ckpt serve --config ckpt.toml --port 9000
      ckpt serve s3://bucket/run42 --price s3://bucket=0.021
      ckpt serve s3://bucket/run42 --price s3://bucket=0.021,0.005,0.0004
      ckpt serve runs/gpt --host 0.0.0.0 --token-file token
    """
    prices = dict(map(price_of, price or ()))
    runs = watched_runs(places(arguments, root), config)
    token = read_token(token_file, is_required=host not in _LOOPBACK_HOSTS)
    listener = listen(host, port)
    output.show_line(f"the page is at {address(listener, host)}")
    if token and token_file is None:
        # Only this line shows a new token.
        query_token = quote(token, safe="")
        output.show_plain(
            f"the address with its token: {address(listener, host)}?token={query_token}"
        )
    run_server(
        runs,
        listener,
        token,
        interval,
        prices={**LIST_PRICES, **prices},
        measure=_measure if find_spec("torch") else None,
    )


def _measure(reader_a: StepReader, reader_b: StepReader, name: str) -> Movement | None:
    from ckpt.exchange.weights.movement import movement

    return movement(reader_a, reader_b, name)


def watched_runs(roots: list[str], configs: list[str] | None) -> list[RunWatch]:
    """Return the runs for ``ckpt serve`` and ``ckpt top`` to show.

    Args:
        roots: The roots of runs. If a journal names several of them as tiers of one run, they are
            one run.
        configs: Configuration files. The tiers of each file are one run. If there are neither roots
            nor files, the tiers that ``resolve_tiers`` returns are the only run.
    """
    tiers_by_config = {file: tiers_of(file) for file in configs or ()}
    if not roots and not tiers_by_config:
        tiers = resolve_tiers(None)
        return watch_runs((), {tiers[-1].url: tiers})
    folders = [root for root in roots if root != MEMORY]
    are_files = results_in_time([partial(is_file, root) for root in folders], _PATIENCE_SECONDS)
    for root, is_file_there in zip(folders, are_files, strict=True):
        if is_file_there:
            raise ConfigError(
                f"{root} is a file: name the folder of a run, or --config FILE if the file has the "
                "tiers of one"
            )
    are_missing = results_in_time(
        [partial(is_missing, root) for root in folders], _PATIENCE_SECONDS
    )
    for root, is_gone in zip(folders, are_missing, strict=True):
        if is_gone:
            output.warn(f"{root} does not exist: it is shown as soon as a job makes it")
    return watch_runs([resolve_tier(url) for url in with_memory(roots)], tiers_by_config)
