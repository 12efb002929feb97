"""The gateway's shell: its machine, the edge that carries out its jobs, and the HTTP server on a thread of its own."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path

from actors.gateway.edge import Edge
from actors.gateway.http import Service, make_app
from actors.gateway.machine import GatewayMachine
from actors.gateway.metrics import GatewayMetrics
from actors.gateway.seeds import SeedCounter
from actors.gateway.server import HttpServer
from actors.gateway.tokenizer import CheckpointTokenizer
from actors.runtime.context import ActorSpec, NodeContext

NAME = "gateway"


def build(context: NodeContext) -> tuple[ActorSpec, ...]:
    """The gateway of a cluster; its URL goes into the node's readiness. Raises ``ConfigError``.

    ``options.model`` is a checkpoint directory; ``options.served_model_name`` is what clients call it.
    """
    config, options = context.config, context.config.options
    address = f"{config.node}/{NAME}"
    tokenizer = CheckpointTokenizer(Path(options.model))
    machine = GatewayMachine(node=config.node, incarnation=config.incarnation, options=options, address=address)
    edge = Edge(lambda message: context.post(NAME, address, message), GatewayMetrics())
    server = HttpServer(options.host, options.port)
    limits = [limit for limit in (options.max_model_len, tokenizer.max_model_len) if limit]
    service = Service(
        model=options.served_model_name or options.model,
        version=metadata.version("kvferry"),
        run_id=f"{config.run_id}.{config.incarnation}",
        length_max=min(limits, default=0),
        edge=edge,
        tokenizer=tokenizer,
        seeds=SeedCounter(options.seed, config.incarnation),
        clock=time.time,
        stream_interval=options.stream_interval,
    )
    server.start(make_app(service))
    context.on_close(server.stop)
    context.ready_detail(server.url)
    context.log(NAME, "info", "listening", url=server.url, model=service.model)
    return (ActorSpec(NAME, machine, edge),)
