"""Encryption at rest: token ids, whole states and kept answers are sealed before they go into the file.

AES-256-GCM, each value with a random nonce and bound to its place, so that no value can stand for another. A value that was
written before there was a key begins without the mark, and is read as it is. Names, times, versions, numbers and idempotency
keys are not sealed: sessions are looked up by them. A file with sealed values says so, and whether a key is its own.
"""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from rwkv_batch.errors import StorageFailed, UsageError
from rwkv_batch.secrets import read_secret

MARK = b"\7rwkvseal"  # in front of a sealed value
KEY_BYTES, NONCE_BYTES = 32, 12
PROOF, PROOF_PLACE = b"rwkv_batch sessions", "key"  # sealed in the file, to tell its own key


class Sealer:
    """Seals values with one key. `failed`: what opening raises for a value that was changed, or sealed with another key."""

    def __init__(self, key: bytes):
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise UsageError(
                "--state-key-file: needs a package: pip install -r requirements-encryption.txt", param="state_key_file"
            ) from None
        self._cipher = AESGCM(key)
        self.failed: type[Exception] = InvalidTag

    def seal(self, data: bytes | memoryview, place: str) -> bytes:
        """Return a value for its place in the file."""
        nonce = os.urandom(NONCE_BYTES)
        return MARK + nonce + self._cipher.encrypt(nonce, data, place.encode())

    def open(self, data: bytes, place: str) -> bytes:
        """Return what was sealed, or what was never sealed."""
        if not data.startswith(MARK):
            return data
        nonce, sealed = data[len(MARK) :][:NONCE_BYTES], data[len(MARK) + NONCE_BYTES :]
        return self._cipher.decrypt(nonce, sealed, place.encode())


def read_key(path: str) -> bytes:
    """Return the key in a file that only its owner may read: 64 hexadecimal digits. UsageError."""
    try:
        key = bytes.fromhex(read_secret(path, "state_key_file"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"--state-key-file: {path} must hold {2 * KEY_BYTES} hexadecimal digits, as openssl rand -hex {KEY_BYTES} makes",
            param="state_key_file",
        )
    return key


def check_key(connection: sqlite3.Connection, path: Path, sealer: Sealer | None, *, read_only: bool) -> None:
    """Raise StorageFailed unless the file's values can be read with this key, or without one; a file without gets it."""
    is_sealed = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'kept_key'").fetchone() is not None
    if sealer is None:
        if is_sealed:
            raise StorageFailed(f"{path} is encrypted: give its key with --state-key-file", code="state_key_missing")
        return
    if not is_sealed:
        if not read_only:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE kept_key (proof BLOB NOT NULL)")
            connection.execute("INSERT INTO kept_key VALUES (?)", (sealer.seal(PROOF, PROOF_PLACE),))
            connection.execute("COMMIT")
        return
    proof = connection.execute("SELECT max(proof) FROM kept_key").fetchone()[0]
    try:
        is_own = isinstance(proof, bytes) and proof.startswith(MARK) and sealer.open(proof, PROOF_PLACE) == PROOF
    except (sealer.failed, ValueError):
        is_own = False
    if not is_own:
        raise StorageFailed(f"--state-key-file does not hold the key of {path}", code="state_key_wrong")


def sealed(sealer: Sealer | None, data: bytes | memoryview, place: str) -> bytes | memoryview:
    """A value as it goes into the file."""
    return data if sealer is None else sealer.seal(data, place)


def opened(sealer: Sealer | None, data: bytes, place: str, damaged: Callable[[], Exception]) -> bytes:
    """A value of the file as it was written; raises what `damaged` returns when it was changed."""
    if sealer is None:
        return data
    try:
        return sealer.open(data, place)
    except (sealer.failed, ValueError):
        raise damaged() from None
