"""An engine of inference servers: `posttrain serve MODEL --rl`, or vLLM 0.32.

Weights go to every server as files; after each update a probe compares its log-probs with the trainer's.  A server that
fails or hangs is left out: others sample its completions, and the next update tries it again.
"""

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from posttrain.errors import UserError
from posttrain.generation.http.completion_requests import Allowed, CompletionJob, UnsoundAnswer, completions_of
from posttrain.generation.http.http_sampling import HttpSampling
from posttrain.generation.http.probe import ProbeAnswer, ServerProbe, prefix_logprobs
from posttrain.generation.http.server_calls import EventLoop, ServerCalls, ServerFault, key_of, require_httpx
from posttrain.generation.http.server_checks import Needs, facts_again, first_facts_of, require_sampling
from posttrain.generation.http.servers import Server, ServerPool
from posttrain.generation.http.weight_updates import LEASE_SECONDS, SHARED, send_weights, take_server, uploads
from posttrain.generation.http.weights_files import WeightsFile, WeightsFolder
from posttrain.generation.parity import gap_limit
from posttrain.generation.request import Request, Sampled
from posttrain.generation.rl_protocol import AdapterFields, Facts, OwnFacts
from posttrain.models.context import num_embeddings
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.models.sharding import led_copy
from posttrain.options.rollout import HttpOptions, SamplingParams


class HttpEngine:
    """Samples on servers; an `Engine`.  Close it to end its thread and remove its files."""

    def __init__(self, policy: Policy, options: HttpOptions, *, longest: int, sampling: SamplingParams) -> None:
        """Connect to every server.  Raises UserError if one cannot sample for this policy.

        `longest` is the run's longest prompt and completion, in tokens; `sampling` is how it samples.
        """
        require_httpx()
        self.policy, self.options, self.weights_version = policy, options, -1
        self.tokenizer, self.stop_ids = policy.tokenizer, policy.stop_ids
        self._folder: Path | None = None
        self.needs = Needs(longest=longest, sampling=sampling, transport=options.transport)
        self.allowed = Allowed(stop_ids=policy.stop_ids, vocabulary=num_embeddings(policy.model))
        key = key_of(options)
        self.loop = EventLoop("engine http")
        try:
            addresses = [*options.urls, *([options.evaluation] if options.evaluation else [])]
            calls = [ServerCalls(url, options.seconds, key) for url in addresses]
            facts = self.loop.run(self._connect(calls))
            self.servers = [Server(each, fact) for each, fact in zip(calls, facts, strict=True)]
            self.pool = ServerPool(self.servers, len(options.urls), options.seconds)
            for each in self.servers:
                self.needs.require(each.calls, each.facts)
        except BaseException:
            self.loop.close()
            raise
        self.max_positions = min(policy.max_positions, *(each.facts.max_positions for each in self.servers))
        self.reproducible = self.suppresses = all(each.facts.ours for each in self.servers)
        self.logprob_gap: float | None = gap_limit(policy)
        # Every request has a deadline, after which another server has its turn.
        self.patience_seconds = (options.seconds.sample + options.seconds.connect) * (len(self.servers) + 1)
        self._name_owner(f"process {os.getpid()} ({secrets.token_hex(4)})")
        self._keeping: asyncio.Task[None] | None = None
        adapter = ExportedWeights(policy).adapter()
        self.adapter_base = None if adapter is None else adapter.base_digest
        """The digest of the base where only an adapter is trained; empty if it is not a local folder."""
        self.probe = ServerProbe(policy, min(longest, self.max_positions), sampling)
        self.probe_gap = 0.0
        """The probe's gap after the last update, in nats."""

    def load(self, weights: ExportedWeights, version: int) -> None:
        """Send the weights to all servers, and compare their log-probs with the trainer's."""
        first, whole = not self.pool.versions, led_copy(weights.policy)
        files = self._written(ExportedWeights(whole), version)
        self.pool.versions.append(version)
        answers = self.loop.run(self._update(files, version, strict=first))
        self.probe_gap = self.probe.require_parity(whole, answers, version)
        self.weights_version = version

    def open(self, request: Request) -> HttpSampling:
        """Start sampling; several samplings may be open."""
        for each in self.servers:
            require_sampling(each.calls, each.facts, request.sampling)
        if self.weights_version < 0:
            raise UserError("engine http: open: servers may hold any weights.  Call load first.")
        return HttpSampling(self.pool, self.loop, request, self.allowed, max_positions=self.max_positions)

    def transfer_in(self, folder: Path) -> None:
        """Write files of weights there, unless the recipe names a folder.

        Servers know the run by the folder around it, also when it is resumed.
        """
        self._name_owner(str(folder.resolve().parent))
        if not self.options.transfer_folder:
            self._folder = folder

    def close(self) -> None:
        """End the connections and remove files of weights."""
        if self.loop.thread.is_alive():
            self.loop.run(self._disconnect())
            self.loop.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def describe(self) -> list[str]:
        """Lines for a run's plan: servers, how they get weights, and what they draw tokens with."""
        ways = {
            "by PUT" if uploads(each.facts, self._place(), self.options.transport) else f"as files in {self._place()}"
            for each in self.servers
        }
        lines = [f"{each.url} ({each.facts.kind}, {each.facts.dtype})" for each in self.servers]
        merged = "all weights" if self.adapter_base is None else "adapter and base added up in float32"
        sent = {"the adapter" if self._takes_adapter(each) else merged for each in self.servers}
        lines.append(f"weights {' or '.join(sorted(ways))}, {' and '.join(sorted(sent))}")
        if not self.reproducible:
            lines.append("with its own random numbers: a run cannot be repeated exactly")
        return lines

    def _name_owner(self, name: str) -> None:
        for each in self.servers:
            each.calls.owner = quote(f"{socket.gethostname()}: {name}", safe="/: ()")

    async def _keep_servers(self) -> None:
        """While a run trains, it may not call a server for a long time."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            await self._take_servers()

    async def _take_servers(self, *, keep: bool = True) -> None:
        """Keep the servers that are not left out, or give all back."""

        async def take(server: Server) -> None:
            with suppress(ServerFault):  # the next call that needs the server says it
                seconds = self.options.seconds.connect
                await take_server(server.calls, "lease", seconds=seconds, keep=keep, renews=True)

        await asyncio.gather(*(take(each) for each in self.servers if each.fault is None or not keep))

    async def _connect(self, calls: Sequence[ServerCalls]) -> list[Facts]:
        return list(await asyncio.gather(*(first_facts_of(each, self.policy) for each in calls)))

    async def _disconnect(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await self._take_servers(keep=False)
        for each in self.servers:
            await each.calls.close()

    def _place(self) -> Path:
        """The folder for files of weights, made when it is first needed."""
        if self._folder is None:
            place = self.options.transfer_folder or None
            if place is not None:
                Path(place).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="posttrain-weights-", dir=place)).absolute()
            if place is not None:  # a server of another user reads it
                self._folder.chmod(0o755)
        return self._folder

    def _takes_adapter(self, server: Server) -> bool:
        """Whether a server gets an adapter only: its base is the trained one's."""
        base, facts = self.adapter_base, server.facts
        return bool(base) and isinstance(facts, OwnFacts) and facts.model_digest == base

    def _written(self, weights: ExportedWeights, version: int) -> dict[str, WeightsFile]:
        """The file for each server, by its address."""
        folder, made = WeightsFolder(self._place()), dict[bool, WeightsFile]()
        alone = {each.url: self._takes_adapter(each) for each in self.servers}
        if any(alone.values()):
            exported = weights.adapter()
            assert exported is not None
            fields = AdapterFields(base_digest=exported.base_digest, settings=dict(exported.settings))
            made[True] = folder.write(exported.tensors, version, fields)
        if not all(alone.values()):
            made[False] = folder.write(weights.merged(), version)
        return {url: made[each] for url, each in alone.items()}

    async def _update(self, files: dict[str, WeightsFile], version: int, *, strict: bool) -> list[ProbeAnswer]:
        """Send weights to all servers, side by side; `strict` raises the first fault."""
        self._keeping = self._keeping or asyncio.create_task(self._keep_servers())
        done = await asyncio.gather(
            *(self._update_one(each, files[each.url], version) for each in self.servers), return_exceptions=True
        )
        for server, result in zip(self.servers, done, strict=True):
            if isinstance(result, ProbeAnswer):  # before any is left out, which needs another one to be sound
                server.fault = None
        answers = []
        for server, result in zip(self.servers, done, strict=True):
            if isinstance(result, ProbeAnswer):
                answers.append(result)
            elif strict or not isinstance(result, ServerFault):
                raise result
            else:
                self.pool.leave_out(server, result)
        return answers

    async def _update_one(self, server: Server, file: WeightsFile, version: int) -> ProbeAnswer:
        upload = uploads(server.facts, file.path, self.options.transport)
        if server.fault is not None:
            server.facts = await facts_again(server.calls, self.policy, self.needs)
        try:
            server.paused_seconds = await send_weights(server.calls, file, upload=upload)
        except ServerFault as fault:
            if not upload and "no such file" in fault.said:
                raise ServerFault(server.url, fault.phase, f"{fault.said}.  {SHARED}", said=fault.said) from None
            raise
        return await self._probe(server, version)

    async def _probe(self, server: Server, version: int) -> ProbeAnswer:
        answers = await asyncio.gather(*(self._probe_one(server, job, version) for job in self.probe.jobs))
        return ProbeAnswer(
            url=server.url,
            facts=server.facts,
            sampled=[done for done, _ in answers],
            prefixes=[prefix for _, prefix in answers],
        )

    async def _probe_one(self, server: Server, job: CompletionJob, version: int) -> tuple[Sampled, list[float] | None]:
        number, phase = self.pool.number(), f"probe of weights {version}"
        asked = self.probe.body(job, server.facts, number)
        try:
            answer = await server.generate(phase, asked, seconds=self.options.seconds.sample)
            (sampled,) = completions_of(job, answer, self.probe.request, replace(self.allowed, versions=[version]))
            return sampled, prefix_logprobs(job, answer)
        except UnsoundAnswer as unsound:
            raise ServerFault(server.url, phase, f"{job.first.label}: {unsound}") from None
