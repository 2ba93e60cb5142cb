"""The server of a model: OpenAI's routes, and with `--rl` also the routes of an inference server for training."""

from collections.abc import Collection
from pathlib import Path

from posttrain.server.addresses import is_loopback, own_hosts
from posttrain.server.application import application, with_cors
from posttrain.server.listening import HttpServer, listening_socket
from posttrain.server.openai_routes import Service
from posttrain.server.requests import Access
from posttrain.server.rl_routes import TrainingRoutes
from posttrain.server.transfer_folder import TransferFolder
from posttrain.server.weight_loading import most_bytes


class ModelServer(HttpServer):
    """Listens from the start; `serve_until_signal` or `in_thread` starts answering."""

    def __init__(
        self,
        service: Service,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        origins: Collection[str] = (),
        transfer_folder: Path | None = None,
    ) -> None:
        """`origins` are other sites whose pages may send requests.

        `transfer_folder` is for a server for training; None: a server that only answers OpenAI's clients.
        """
        bound = listening_socket(host, port, named=f"host {host}, port {port}")
        self.service = service
        protected = bool(token) or not is_loopback(host)
        access = Access(None if protected else own_hosts(host, bound.getsockname()[1]), token, origins)
        routes = service.routes(access)
        if transfer_folder is not None:
            folder = TransferFolder(transfer_folder, most_bytes(service.policy))
            routes += TrainingRoutes(service, folder).routes(access)
        super().__init__(with_cors(origins, application(routes)), bound, at_end=service.sampler.stop)
