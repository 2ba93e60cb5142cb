"""The routes of vLLM 0.32 for training by reward, over the in-process engine: token ids and weights.

An update is start, update, pause, finish, resume.  All weights are checked before any of them changes.  Unfinished
completions continue with the new weights from their next token.  After a fault the last good weights stay, and the
trainer begins again with `start`.
"""

import asyncio
import secrets
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.generation import rl_protocol
from posttrain.generation.request import Continuation
from posttrain.generation.rl_protocol import GenerateRequest, OwnFacts, WeightInfo
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.context import num_embeddings
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.rendering import tokenizer_digest
from posttrain.server import requests
from posttrain.server.application import route
from posttrain.server.lease import Lease
from posttrain.server.openai_routes import Service
from posttrain.server.requests import Access, RefusedRequest, brief
from posttrain.server.rl_completions import choice, json_of, read_record, sampling_of, stop_texts
from posttrain.server.transfer_folder import TransferFolder
from posttrain.server.weight_loading import Change, base_digest, change_to

PAUSES = ("abort", "wait", "keep")
PREFIX_BYTES = 12
"""Upper bound of the bytes per prefix token in a request."""


class TrainingRoutes:
    """A trainer's requests to a served policy."""

    def __init__(self, service: Service, folder: TransferFolder) -> None:
        self.service, self.folder, self.sampler = service, folder, service.sampler
        self.model_digest = base_digest(service.policy)
        self.tokenizer_digest = tokenizer_digest(service.policy.tokenizer)
        self.updating = asyncio.Lock()
        """Lock for one call of an update at a time."""
        self.lease = Lease()
        self.started = False
        self.checked: tuple[Change, rl_protocol.UpdateInfo] | None = None
        """Checked weights, which `finish` loads, and their source."""

    def routes(self, access: Access) -> list[Route]:
        sampling = ((rl_protocol.GENERATE, self.generate), (rl_protocol.RELEASE, self.release))
        changing = (
            ("POST", rl_protocol.PAUSE, self.pause),
            ("POST", rl_protocol.RESUME, self.resume),
            ("PUT", rl_protocol.UPLOAD, self.upload),
            ("POST", rl_protocol.START, self.start),
            ("POST", rl_protocol.UPDATE, self.update),
            ("POST", rl_protocol.FINISH, self.finish),
        )
        made = (
            ("GET", rl_protocol.WEIGHT_INFO, self.weight_info),
            ("GET", rl_protocol.IS_PAUSED, self.is_paused),
            ("POST", rl_protocol.INIT, self.init),
            *(("POST", path, self.lease.checked(endpoint, changes=False)) for path, endpoint in sampling),
            *((method, path, self.lease.checked(endpoint, changes=True)) for method, path, endpoint in changing),
        )
        return [route(method, path, access.checked(endpoint)) for method, path, endpoint in made]

    async def generate(self, request: Request) -> Response:
        most_bytes = requests.BODY_BYTES + PREFIX_BYTES * self.service.policy.max_positions
        asked = read_record(GenerateRequest, await requests.json_body(request, most_bytes=most_bytes))
        if asked.model is not None:
            self.service.model(asked.model)
        settings, continuations = sampling_of(asked, self.service.engine)
        sampled = await self.service.sampled(request, self.sampler.submit(settings, continuations))
        texts = stop_texts(self.service.policy.tokenizer, sampled, settings.stop_texts)
        choices = tuple(
            choice(index, each, asked.sampling_params.logprobs, text)
            for index, (each, text) in enumerate(zip(sampled, texts, strict=True))
        )
        answer = rl_protocol.GenerateResponse(request_id=asked.request_id or secrets.token_hex(8), choices=choices)
        return json_of(answer)

    async def release(self, request: Request) -> Response:
        asked = read_record(rl_protocol.ReleaseRequest, await requests.json_body(request))
        let_go = [
            Continuation(prefix=(), draw=each.draw, sample=each.sample, limit=0, key=each.key) for each in asked.streams
        ]
        await run_in_threadpool(self.sampler.drop, let_go)
        return JSONResponse({"message": "Released"})

    async def weight_info(self, request: Request) -> Response:
        service, policy = self.service, self.service.policy
        facts = OwnFacts(
            model_digest=self.model_digest,
            vocabulary=num_embeddings(policy.model),
            tokenizer_digest=self.tokenizer_digest,
            max_positions=policy.max_positions,
            dtype=str(policy.compute_dtype).removeprefix("torch."),
            max_rows=service.engine.max_rows,
            transfer_folder=str(self.folder.folder),
        )
        return json_of(WeightInfo(weight_version=str(service.engine.weights_version), posttrain=facts))

    async def pause(self, request: Request) -> Response:
        """Keep unfinished completions for `resume`, wait for them, or abort them."""
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSES:
            raise RefusedRequest(f"mode = {brief(mode)}: use {', '.join(PAUSES)}")
        if mode == "wait" and not await run_in_threadpool(self.sampler.finish, self.service.seconds):
            self.sampler.resume()
            late = f"mode = wait: completions are not finished in {self.service.seconds:g} seconds.  Use mode=keep"
            raise RefusedRequest(late, HTTPStatus.SERVICE_UNAVAILABLE)
        await run_in_threadpool(self.sampler.pause)
        if mode == "abort":
            await run_in_threadpool(self.sampler.abort)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.sampler.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json_of(rl_protocol.PausedInfo(is_paused=self.sampler.paused))

    async def init(self, request: Request) -> Response:
        self.lease.take(read_record(rl_protocol.InitRequest, await requests.json_body(request)).init_info)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def upload(self, request: Request) -> Response:
        length, name = request.headers.get("Content-Length", ""), request.path_params["sha256"]
        await self.folder.keep(name, length, request.stream())
        return JSONResponse({"message": "Weights received"})

    async def start(self, request: Request) -> Response:
        """Start an update; an earlier unfinished update is dropped."""
        async with self.updating:
            self.started, self.checked = True, None
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: Request) -> Response:
        """Read and check weights.  A fault ends the update without any change."""
        body = await requests.json_body(request)
        async with self.updating:
            self.require_started()
            self.started, self.checked = False, None
            info = read_record(rl_protocol.UpdateRequest, body).update_info
            self.checked = await run_in_threadpool(self.check, info), info
            self.started = True
        return JSONResponse({"message": "Weights updated"})

    def check(self, info: rl_protocol.UpdateInfo) -> Change:
        adapter, held = info.adapter, self.model_digest
        if adapter is not None and (not held or adapter.base_digest != held):
            rule = f"its base has the digest {adapter.base_digest[:80]!r}, but this server's has {held!r}"
            raise RefusedRequest(f"adapter: {rule}.  Serve the base model that is trained.")
        content = self.folder.read(info.path, info.sha256)
        return change_to(self.service.policy, content, info.adapter, self.sampler.hands_off)

    async def finish(self, request: Request) -> Response:
        """Load the checked weights, between two tokens."""
        asked = read_record(rl_protocol.FinishRequest, await requests.json_body(request))
        version = asked.weight_version
        if not (version.isascii() and version.isdecimal() and len(version) < 19):
            raise RefusedRequest(f"weight_version = {brief(version)}: must be a whole number in decimal digits")
        async with self.updating:
            self.require_started()
            if self.checked is None:
                raise RefusedRequest(f"weights are missing.  POST {rl_protocol.UPDATE} first", HTTPStatus.CONFLICT)
            await run_in_threadpool(self.put, *self.checked, int(version))
            self.started, self.checked = False, None  # which holds all tensors of the file
        return JSONResponse({"message": "Weight update finished"})

    def put(self, change: Change, given: rl_protocol.UpdateInfo, version: int) -> None:
        with self.sampler.hands_off():
            service = self.service
            if given.adapter is None:
                self.model_digest = ""  # the base is another one now
            elif not adapted_names(service.policy.model):
                service.require_idle()
            policy = change()
            if policy is not service.policy:  # it has got an adapter
                service.begin_anew(policy)
            service.engine.load(ExportedWeights(policy), version)

    def require_started(self) -> None:
        if not self.started:
            raise RefusedRequest(f"no update was started.  POST {rl_protocol.START} first", HTTPStatus.CONFLICT)
