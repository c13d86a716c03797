# SPDX-License-Identifier: Apache-2.0
"""The gRPC server of a gateway process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from starlette.types import ASGIApp

from mizzen.common.addresses import join_address
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.grpc import inference_pb2 as pb
from mizzen.gateway.grpc.health_service import HealthService
from mizzen.gateway.grpc.inference_service import InferenceService

NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


async def start_grpc(
    config: GatewayConfig, app: ASGIApp, gateway: Gateway, *, shared: bool = False
) -> grpc.aio.Server:
    """Start the gRPC server at `--grpc-port`, with the certificate of the HTTP API if that has one.

    Args:
        config: Options of the gateway.
        app: Application of the HTTP API, which runs the calls.
        gateway: State of the gateway.
        shared: Whether further processes of the gateway listen on the same port.

    Raises:
        OSError: the port is in use.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_concurrent_streams", config.max_in_flight + config.queue_size),
            ("grpc.so_reuseport", int(shared)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ],
        maximum_concurrent_rpcs=config.max_in_flight + config.queue_size,
    )
    service = InferenceService(app, gateway)
    server.add_generic_rpc_handlers((new_handlers(service),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(gateway, frozenset({NAME})), server)
    address = join_address(config.host, config.grpc_port)
    try:
        if config.tls_cert and config.tls_key:
            server.add_secure_port(address, new_credentials(Path(config.tls_cert), Path(config.tls_key)))
        else:
            server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address} (--grpc-port): {error}") from error
    await server.start()
    return server


def new_handlers(service: InferenceService) -> grpc.GenericRpcHandler:
    """Return the handlers of the calls of the Inference service, with their messages."""
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
        ),
        "Embed": grpc.unary_unary_rpc_method_handler(
            service.embed, pb.EmbedRequest.FromString, pb.EmbedResponse.SerializeToString
        ),
        "Abort": grpc.unary_unary_rpc_method_handler(
            service.abort, pb.AbortRequest.FromString, pb.AbortResponse.SerializeToString
        ),
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(
            service.get_model_info, pb.GetModelInfoRequest.FromString, pb.ModelInfo.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler(NAME, handlers)


def new_credentials(cert: Path, key: Path) -> grpc.ServerCredentials:
    """Return TLS credentials that read the files again when they have changed.

    Files that cannot be read leave the previous certificate in use.
    """
    last: list[bytes] = []

    def fetch() -> Any:  # None keeps the previous certificate
        try:
            content = [key.read_bytes(), cert.read_bytes()]
        except OSError:
            return None
        if content == last:
            return None
        last[:] = content
        return grpc.ssl_server_certificate_configuration([(content[0], content[1])])

    initial = grpc.ssl_server_certificate_configuration([(key.read_bytes(), cert.read_bytes())])
    return grpc.dynamic_ssl_server_credentials(initial, fetch)
