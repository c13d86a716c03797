# SPDX-License-Identifier: Apache-2.0
"""`mizzen serve`: runs a gateway and an engine on this machine, as the same processes that run in pods."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mizzen.commands import options
from mizzen.commands.children import (
    KILL_GRACE_SECONDS,
    ChildExited,
    ChildProcesses,
    SignalReceived,
    StopRequested,
    describe_exit,
    shell_exit_code,
)
from mizzen.commands.model_source import RemoteModel, fetch_model, find_model
from mizzen.commands.progress import StartupProgress, create_progress
from mizzen.commands.readiness import ReadinessProbe
from mizzen.common.addresses import address_family, join_address
from mizzen.common.extras import SERVE_MODULES, require_modules
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.playground.paths import PLAYGROUND_PATH
from mizzen.server.config import EngineConfig

POLL_SECONDS = 0.1
SET_BY_SERVE = {
    "engine": {"model", "wire_bind", "keys", "engine_id", "revision", "termination_message", "http_host"},
    "gateway": {
        "access_log",
        "admin_host",
        "admin_token_file",
        "engine",
        "keys",
        "namespace",
        "service",
        "services_config_map",
        "services_file",
        "suspended",
    },
}
ANY_PORT = {
    "http_port": "Port of the engine's /healthz, /readyz, /metrics; 0 chooses a free port",
    "admin_port": "Port of the gateway's /healthz, /readyz, /metrics; 0 chooses a free port",
}
LOCAL = "127.0.0.1"
SERVE_EXTRAS = "gateway,worker"
DEVICES = ("auto", "cuda", "cpu")
DEVICE_HELP = "Device that the model runs on; auto is cuda if there is a GPU, and otherwise cpu"


@dataclasses.dataclass(frozen=True, slots=True)
class ServeConfig:
    """Configurations of engine and gateway, and the temporary folder for keys, token and socket."""

    engine: EngineConfig
    gateway: GatewayConfig
    folder: Path


def serve_settings() -> list[options.Setting]:
    """Return the settings of engine and gateway that are options of `serve`; shared settings appear once."""
    settings = {}
    for config, process in ((EngineConfig, "engine"), (GatewayConfig, "gateway")):
        for setting in options.settings(config):
            if setting.name in SET_BY_SERVE[process] or setting.name in settings:
                continue
            if setting.name in ANY_PORT:
                setting = dataclasses.replace(setting, default=0, help=ANY_PORT[setting.name])
            if setting.name == "device":
                setting = dataclasses.replace(setting, default="auto", choices=DEVICES, help=DEVICE_HELP)
            settings[setting.name] = setting
    return list(settings.values())


def reserve_port(reserved: contextlib.ExitStack, host: str, port: int, option: str = "--port") -> int:
    """Bind a port until `reserved` is closed, and return its number.

    Args:
        reserved: Stack that closes the socket.
        host: Host name or IP address to bind.
        port: Port to bind; 0 chooses a free port.
        option: Option that sets the port, for the error message.

    Raises:
        typer.BadParameter: the port cannot be bound; the message names the option.
    """
    listener = reserved.enter_context(socket.socket(address_family(host)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
    try:
        listener.bind((host, port))
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on port {port} of {host}: {error.strerror}; choose another port with {option}, "
            "or 0 for a free port"
        ) from error
    return listener.getsockname()[1]


def _reserve_ports(reserved: contextlib.ExitStack, values: dict[str, Any]) -> dict[str, int]:
    """Bind the ports of the gateway and of the engine until `reserved` is closed, and return them by name."""
    return {
        "port": reserve_port(reserved, values["host"], values["port"]),
        "http_port": reserve_port(reserved, LOCAL, values["http_port"], "--http-port"),
        "admin_port": reserve_port(reserved, LOCAL, values["admin_port"], "--admin-port"),
    }


def _check_ports(values: dict[str, Any]) -> None:
    with contextlib.ExitStack() as reserved:
        _reserve_ports(reserved, values)


def choose_device(device: str, tensor: int, progress: StartupProgress) -> str:
    """Return the device to run on, cuda or cpu; `auto` chooses cpu only if no GPU is found, and says so.

    Raises:
        typer.BadParameter: the device is cuda, and there are not enough GPUs.
    """
    if device == "cpu":
        return device
    from mizzen.server.gpus import check_gpus, find_gpus

    found = find_gpus()
    if device == "auto" and not found.count:
        progress.note(f"no GPU found ({found.problem}): --device auto chooses cpu, which is slow")
        return "cpu"
    try:
        check_gpus(tensor, found)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return "cuda"


def _check_model(model: Path) -> None:
    from mizzen.gateway.text.model import build_text_model
    from mizzen.gateway.text.tokenizer import read_files

    try:
        build_text_model("", read_files(model))  # raises the error that the gateway would report later
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{str(model)!r}: {error}") from error


def build_config(model: Path, values: dict[str, Any], folder: Path) -> ServeConfig:
    """Return the configurations of engine and gateway; write CURVE keys and the admin token to `folder`.

    Args:
        model: Folder of the model.
        values: Values of the options of `serve_settings`, by name.
        folder: Temporary folder for keys, token and socket.

    Raises:
        typer.BadParameter: an option is invalid; the message names the option and the allowed values.
    """
    from mizzen.server.config_check import check_config
    from mizzen.wire.curve_keys import write_keys

    _check_model(model)
    with contextlib.ExitStack() as reserved:
        values = {
            **values,
            "served_name": values["served_name"] or model.resolve().name,
            **_reserve_ports(reserved, values),
        }
        wire_port = reserve_port(reserved, LOCAL, 0)
    write_keys(folder)
    (folder / "admin.token").write_text(secrets.token_urlsafe(32))
    endpoint = f"ipc://{folder}/wire"
    if len(endpoint) > 100:  # Linux limits the path of a Unix socket to 107 bytes
        endpoint = f"tcp://{LOCAL}:{wire_port}"
    engine = {
        **_fields(EngineConfig, values),
        "model": str(model),
        "wire_bind": endpoint,
        "keys": str(folder),
        "http_host": LOCAL,
        "engine_id": "local",
        "termination_message": str(folder / "reason"),
    }
    gateway = {
        **_fields(GatewayConfig, values),
        "engine": (endpoint,),
        "keys": str(folder),
        "admin_host": LOCAL,
        "admin_token_file": str(folder / "admin.token"),
        "access_log": "off",
    }
    config = ServeConfig(options.build(EngineConfig, engine), options.build(GatewayConfig, gateway), folder)
    try:
        check_config(config.engine)  # raises the error that the engine would report later
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return config


def _fields(config: type, values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(config) if field.name in values}


def base_url(gateway: GatewayConfig) -> str:
    """Return the URL at which clients on this machine reach the gateway."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(gateway.host, gateway.host)
    scheme = "https" if gateway.tls_cert else "http"
    return f"{scheme}://{join_address(host, gateway.port)}/v1"


def process_command(command: str, config: Any) -> Sequence[str]:
    """Return the command line of an engine or gateway process, the same as in a pod."""
    return [sys.executable, "-P", "-m", "mizzen.cli", command, *options.arguments(config)]


def run_processes(config: ServeConfig, progress: StartupProgress) -> int:
    """Run engine and gateway until one exits or a signal requests the exit; return the exit code."""
    children = ChildProcesses()
    children.handle_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    children.handle_signals(signal.SIGUSR2, event=SignalReceived)
    try:
        # Start both before the progress display: a child is terminated with the thread that started it.
        children.start("engine", process_command("engine", config.engine), progress.on_line("engine"))
        children.start("gateway", process_command("gateway", config.gateway), progress.on_line("gateway"))
        with progress:
            return _supervise(children, config, progress)
    finally:
        children.close()


def _supervise(children: ChildProcesses, config: ServeConfig, progress: StartupProgress) -> int:
    readiness = ReadinessProbe(config.engine, config.gateway)
    deadline = time.monotonic() + config.engine.startup_timeout_seconds
    ready = False
    while True:
        event = children.next_event(None if ready else POLL_SECONDS)
        if isinstance(event, StopRequested):
            progress.note("stopping: open streams may finish; another signal stops at once")
            _stop(children, config)
            return 0
        if isinstance(event, ChildExited):
            _stop_after_exit(event, children, config, progress, ready)
            return shell_exit_code(event.code)
        if isinstance(event, SignalReceived):
            _request_trace(children, config, progress, ready)
        if ready:
            continue
        ready = readiness.check()
        progress.update(readiness.state, readiness.progress)
        if ready:
            progress.note(f"serving {config.gateway.served_name} on {config.engine.device}; Ctrl-C stops it")
            url = base_url(config.gateway)
            if config.gateway.playground:
                progress.note(f"the playground is at {url.removesuffix('/v1')}{PLAYGROUND_PATH}")
            print(url, flush=True)
        elif time.monotonic() > deadline:
            progress.note(
                f"not ready after {config.engine.startup_timeout_seconds:g} s ({readiness.state}); give a "
                "larger model more time with --startup-timeout-seconds"
            )
            _stop(children, config)
            return 1


def _stop_after_exit(
    event: ChildExited, children: ChildProcesses, config: ServeConfig, progress: StartupProgress, ready: bool
) -> None:
    """Stop the other process after one has exited, and show why it exited."""
    description = _describe_child_exit(event, config)
    if event.name == "engine":
        if ready:
            progress.note(f"{description}; open requests fail")
        # its drain would wait in vain for the engine
        children.stop("gateway", KILL_GRACE_SECONDS, hurry=True)
    _stop(children, config)
    progress.note(description)  # last, where users look first


def _stop(children: ChildProcesses, config: ServeConfig) -> None:
    """Stop both processes, the gateway first, because its open streams still need the engine."""
    children.stop("gateway", config.gateway.drain_timeout_seconds + KILL_GRACE_SECONDS)
    children.stop("engine", config.engine.drain_timeout_seconds + KILL_GRACE_SECONDS)


def _request_trace(
    children: ChildProcesses, config: ServeConfig, progress: StartupProgress, ready: bool
) -> None:
    """Make the engine take a trace if it is ready; while it is starting, the signal might kill it."""
    if ready and config.engine.profile:
        children.signal("engine", signal.SIGUSR2)
    else:
        progress.note(
            "SIGUSR2 ignored: a trace needs an engine that is ready and was started with --profile FOLDER"
        )


def _describe_child_exit(event: ChildExited, config: ServeConfig) -> str:
    reason_file = config.folder / "reason"
    reason = (
        f": {reason_file.read_text().strip()}" if event.name == "engine" and reason_file.is_file() else ""
    )
    return f"the {event.name} {describe_exit(event.code)}{reason}"


def _serve(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="Folder with config.json, the tokenizer and safetensors; demo for the packaged demo model; "
            "or a model to fetch first: a name on the hub, such as Qwen/Qwen3-0.6B, or a URI (hf://, s3:// "
            "or oci://)."
        ),
    ],
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="On a terminal, show all log lines instead of only warnings and errors."
        ),
    ] = False,
    **values: Any,
) -> None:
    """Serve a model on this machine: one engine and one gateway with the OpenAI API.

    When requests can be served, the URL is written to standard output. All other output goes to standard
    error.
    """
    require_modules(*SERVE_MODULES)
    progress = create_progress(verbose)
    source = find_model(model)
    values["device"] = choose_device(values["device"], values["tensor"], progress)
    if isinstance(source, RemoteModel):
        _check_ports(values)  # before a long download
        fetch_model(source, progress)
        values["served_name"] = values["served_name"] or source.name
        source = source.folder
    folder = Path(tempfile.mkdtemp(prefix="mizzen-"))  # private: mkdtemp makes it 0700
    try:
        config = build_config(source, values, folder)
        code = run_processes(config, progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(code)


command = options.command(_serve, serve_settings(), extras=SERVE_EXTRAS)
