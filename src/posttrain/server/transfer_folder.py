"""The folder for files of weights: written there by the trainer, or sent by PUT.

Files outside it are never read.  The loaded bytes are exactly those whose digest was checked.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

from posttrain.errors import UserError
from posttrain.server.requests import RefusedRequest, brief

KEPT_UPLOADS = 2


class TransferFolder:
    """Files of weights, each of at most `most_bytes`."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"transfer folder {folder}: {error.strerror}.  Name a folder to read and write.") from error
        self.folder, self.most_bytes = folder.resolve(), most_bytes

    async def keep(self, sha256: str, length: str, parts: AsyncIterator[bytes]) -> None:
        """Write a sent file under a temporary name, and rename it when it is complete and has this digest."""
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise RefusedRequest(f"{brief(sha256)}: must be the SHA-256 of the file, 64 digits of 0 to 9 and a to f")
        if length.isdecimal() and len(length) < 20 and int(length) > self.most_bytes:
            raise self._too_large(int(length))
        aside = self.folder / f".tmp-{secrets.token_hex(8)}"
        digest, size = hashlib.sha256(), 0
        try:
            with aside.open("xb") as file:
                async for part in parts:
                    size += len(part)
                    if size > self.most_bytes:
                        raise self._too_large(size)
                    digest.update(part)
                    file.write(part)
            if digest.hexdigest() != sha256:
                fault = f"the body of {size} bytes has the SHA-256 {digest.hexdigest()}"
                raise RefusedRequest(f"weights {sha256}: {fault}.  Send it again.")
            aside.rename(self.uploaded(sha256))
        except OSError as error:
            fault = f"cannot be written ({error.strerror})"
            raise RefusedRequest(f"{self.folder}: {fault}", HTTPStatus.INSUFFICIENT_STORAGE) from error
        finally:
            aside.unlink(missing_ok=True)
        older = sorted(self.folder.glob("uploaded-*"), key=lambda each: each.stat().st_mtime_ns)[:-KEPT_UPLOADS]
        for each in older:
            each.unlink(missing_ok=True)

    def uploaded(self, sha256: str) -> Path:
        return self.folder / f"uploaded-{sha256}.safetensors"

    def read(self, path: str, sha256: str) -> bytes:
        """The content of a file, or of the sent one if `path` is empty.  Raises RefusedRequest."""
        named = self.folder / path if path else self.uploaded(sha256)
        where = path[:200] or f"weights {sha256[:80]}"
        try:
            found = named.resolve(strict=True)
            if not found.is_relative_to(self.folder):
                raise RefusedRequest(
                    f"{where}: is not in this server's transfer folder, {self.folder}", HTTPStatus.FORBIDDEN
                )
            with open(os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise RefusedRequest(f"{where}: is not a file")
                if status.st_size > self.most_bytes:
                    raise self._too_large(status.st_size)
                content = file.read()
        except FileNotFoundError as error:
            remedy = "Write it there first" if path else f"Send it first, by PUT to /weights/{sha256[:80]}"
            raise RefusedRequest(f"{where}: no such file in {self.folder}.  {remedy}.", HTTPStatus.NOT_FOUND) from error
        except (OSError, ValueError) as error:
            raise RefusedRequest(f"{where}: cannot be read ({error})") from error
        if (digest := hashlib.sha256(content).hexdigest()) != sha256:
            raise RefusedRequest(f"{where}: its {len(content)} bytes have the SHA-256 {digest}, but {sha256} was given")
        return content

    def _too_large(self, size: int) -> RefusedRequest:
        rule = f"weights of {size} bytes: must be at most {self.most_bytes} for this model"
        return RefusedRequest(rule, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
