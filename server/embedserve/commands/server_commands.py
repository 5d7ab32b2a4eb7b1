"""Commands that run a server, and commands that call a running server (running_server.py).

Nothing heavy is imported at the top, so that --help responds immediately.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from embedserve.commands.installation import check_engine
from embedserve.commands.serve_options import REPEATABLE
from embedserve.commands.switch import switch
from embedserve.config import Limits, ServeSettings
from embedserve.processes.cluster_settings import ClusterSettings

Ca = Annotated[
    Path | None,
    typer.Option(help="PEM file of the CAs to trust with https://. Default: the system's."),
]
Cert = Annotated[
    Path | None,
    typer.Option(help="PEM file of the client certificate, if the server requires one."),
]
Key = Annotated[
    Path | None,
    typer.Option(help="PEM file of the client certificate's key. Default: the file of --cert."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the token, if the server requires one. Default: the variable "
        "EMBEDSERVE_TOKEN."
    ),
]
ADDRESS = "http://HOST:PORT, https://HOST:PORT or unix:PATH."


def serve(**values: Any) -> None:
    """Serve the models of a store over REST and gRPC.

    A setting is a flag, a variable such as EMBEDSERVE_HTTP_PORT or a key of the TOML file such as
    http_port; the first of these wins.
    """
    values.pop("config")
    limits = Limits(**{f.name: values.pop(f.name) for f in fields(Limits)})
    values |= {name: tuple(values[name] or ()) for name in REPEATABLE}
    settings = ServeSettings(**values, limits=limits)
    check_engine()
    from embedserve.processes.serve import serve as run

    run(settings)


def cluster(**values: Any) -> None:
    """Serve models in parts: a router on this host, and shards here or in a Ray cluster.

    Shards on this host use free loopback ports, to try parts or to test a store. On several hosts
    without Ray, start the shards with serve --part and the router with serve --shards. A process
    that ends is started again. Variables of serve have no effect.
    """
    check_engine()
    from embedserve.processes.local_cluster import run_cluster

    run_cluster(ClusterSettings(**values | {"model": tuple(values["model"] or ())}))


def admin(
    url: Annotated[str, typer.Argument(help=f"Address of the management port: {ADDRESS}")],
    action: Annotated[
        list[str],
        typer.Argument(
            help="Action: load MODEL, unload MODEL, reload, deltas hold MODEL or deltas go-on "
            "MODEL. MODEL is NAME, NAME@VERSION or NAME@ALIAS.",
            metavar="<action>",
        ),
    ],
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
) -> None:
    """Load or unload a version on a running server, poll its store now, or hold its deltas."""
    from embedserve.commands.admin import ask_server, parse_action
    from embedserve.commands.running_server import server_at

    done, model = parse_action(action)
    ask_server(server_at(url, ca, cert, key, token_file), done, model)


def health(
    host: Annotated[
        str, typer.Option(envvar="EMBEDSERVE_HOST", help="The same as for serve.")
    ] = "127.0.0.1",
    http_port: Annotated[
        int,
        typer.Option(
            envvar="EMBEDSERVE_HTTP_PORT", help="The same as for serve.", min=1, max=65535
        ),
    ] = 8000,
    http_uds: Annotated[
        str,
        typer.Option(
            envvar="EMBEDSERVE_HTTP_UDS",
            help="The same as for serve. The command then uses this socket and no TLS.",
        ),
    ] = "",
    tls_cert: Annotated[
        str,
        typer.Option(
            envvar="EMBEDSERVE_TLS_CERT", help="The same as for serve. The command then uses TLS."
        ),
    ] = "",
    ready: Annotated[
        bool,
        switch("--ready", help="Check that every model is loaded, not only that the server runs."),
    ] = False,
) -> None:
    """Exit with 0 if the server on this host responds; for a container's healthcheck or probe."""
    from embedserve.commands.health import check_health, own_server

    check_health(own_server(host, http_port, bool(tls_cert), http_uds), ready)


def shadow(
    url: Annotated[str, typer.Argument(help=f"Address of a server: {ADDRESS}")],
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
) -> None:
    """Show how the results of shadow versions differ from those of the served versions."""
    from embedserve.commands.running_server import server_at
    from embedserve.commands.shadow import show_shadows

    show_shadows(server_at(url, ca, cert, key, token_file))


def token(
    name: Annotated[str, typer.Argument(help="Name of the caller, for log and metrics.")],
    models: Annotated[
        str | None, typer.Option(help="Models that the caller may use, such as a,b. Default: all.")
    ] = None,
    roles: Annotated[str, typer.Option(help="Roles: embed, admin or embed,admin.")] = "embed",
    expires: Annotated[
        str | None,
        typer.Option(help="Date such as 2027-01-31, or 90d for 90 days from now. Default: never."),
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Rate limit in each process. Default: no limit.")
    ] = None,
    concurrent: Annotated[
        int | None,
        typer.Option(help="Limit of requests in flight in each process. Default: no limit."),
    ] = None,
) -> None:
    """Create a token. Its line for the file of serve --tokens goes to stdout, the token to stderr.

    The token is stored nowhere: give it to its caller now.
    """
    from embedserve.commands.token import make_token

    make_token(name, models, roles, expires, requests_per_second, concurrent)
