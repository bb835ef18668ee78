"""The proof to a web server of who we are, by the Kerberos ticket (SPNEGO), from the GSSAPI library of this machine."""

from __future__ import annotations

import base64
import binascii
import ctypes
from types import TracebackType
from typing import final

_LIBRARY = "libgssapi_krb5.so.2"

# cited: RFC 2744.
_ERRORS = 0xFFFF0000
_CONTINUE_NEEDED = 1
_INITIATE = 1
_MUTUAL, _REPLAY = 2, 4
_MAJOR, _MINOR = 1, 2
"""The kinds of gss_display_status: of GSSAPI itself, and of the mechanism."""
_SPNEGO_OID = b"\x2b\x06\x01\x05\x05\x02"
"""cited: RFC 4178, 1.3.6.1.5.5.2."""


class GssError(Exception):
    """A refusal of the Kerberos library or of the KDC, in its words."""


class _Oid(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint32), ("elements", ctypes.c_char_p)]


class _OidSet(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("elements", ctypes.POINTER(_Oid))]


class _Bytes(ctypes.Structure):
    _fields_ = [("length", ctypes.c_size_t), ("value", ctypes.c_void_p)]


@final
class Negotiation:
    """One proof to the web server of a host, which may prove in return that it is that host."""

    def __init__(self, host: str) -> None:
        """Raises:
        GssError: there is no Kerberos library, or no ticket that is good.
        """
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as problem:
            raise GssError(f"no {_LIBRARY} here: {problem}") from problem
        self._kerberos = ctypes.POINTER(_OidSet).in_dll(self._library, "gss_mech_set_krb5")
        self._spnego = _Oid(len(_SPNEGO_OID), _SPNEGO_OID)
        self._context, self._name = ctypes.c_void_p(), ctypes.c_void_p()
        self._is_open = True
        # Asked first, because SPNEGO says of a missing ticket that there is no mechanism.
        self._look_at_ticket()
        service = f"HTTP@{host}".encode()
        kind = ctypes.c_void_p.in_dll(self._library, "GSS_C_NT_HOSTBASED_SERVICE")
        self._call("gss_import_name", ctypes.byref(_told(service)), kind, ctypes.byref(self._name))

    def __enter__(self) -> Negotiation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        minor = ctypes.c_uint32()
        self._library.gss_delete_sec_context(ctypes.byref(minor), ctypes.byref(self._context), None)
        self._library.gss_release_name(ctypes.byref(minor), ctypes.byref(self._name))

    def claim(self) -> str:
        """The value of the Authorization header."""
        return f"Negotiate {base64.b64encode(self._step(b'')).decode()}"

    def check(self, challenges: list[str]) -> None:
        """Look at what the server proves in the WWW-Authenticate headers of its answer, if it does.

        Raises:
            GssError: it is not the host that was asked for.
        """
        proof = next((words for words in map(_negotiate_words, challenges) if words), None)
        if proof is not None and self._is_open:
            try:
                self._step(base64.b64decode(proof))
            except binascii.Error as problem:
                raise GssError(f"the server's proof is none: {problem}") from problem
            if self._is_open:
                raise GssError("the server wants more words than one to believe a Kerberos ticket")

    def _look_at_ticket(self) -> None:
        credential = ctypes.c_void_p()
        self._call(
            "gss_acquire_cred", None, ctypes.c_uint32(0), self._kerberos, ctypes.c_int(_INITIATE),
            ctypes.byref(credential), None, None, mechanism=self._kerberos.contents.elements,
        )  # fmt: skip
        self._library.gss_release_cred(ctypes.byref(ctypes.c_uint32()), ctypes.byref(credential))

    def _step(self, told: bytes) -> bytes:
        answer = _Bytes()
        status = self._call(
            "gss_init_sec_context", None, ctypes.byref(self._context), self._name, ctypes.byref(self._spnego),
            ctypes.c_uint32(_MUTUAL | _REPLAY), ctypes.c_uint32(0), None, ctypes.byref(_told(told)), None,
            ctypes.byref(answer), None, None, mechanism=ctypes.pointer(self._spnego),
        )  # fmt: skip
        self._is_open = bool(status & _CONTINUE_NEEDED)
        return self._take(answer)

    def _call(self, name: str, *words: object, mechanism: object = None) -> int:
        minor = ctypes.c_uint32()
        function = getattr(self._library, name)
        function.restype = ctypes.c_uint32
        status = int(function(ctypes.byref(minor), *words))
        if status & _ERRORS:
            told = [*self._words(status, _MAJOR, None), *self._words(minor.value, _MINOR, mechanism)]
            raise GssError(f"GSSAPI, {name}: {'; '.join(told)}")
        return status

    def _words(self, status: int, kind: int, mechanism: object) -> list[str]:
        found: list[str] = []
        minor, more, text = ctypes.c_uint32(), ctypes.c_uint32(), _Bytes()
        while not found or more.value:
            failed = self._library.gss_display_status(
                ctypes.byref(minor), ctypes.c_uint32(status), ctypes.c_int(kind), mechanism, ctypes.byref(more),
                ctypes.byref(text),
            )  # fmt: skip
            if failed:
                break
            found.append(self._take(text).decode(errors="replace"))
        return found

    def _take(self, given: _Bytes) -> bytes:
        data = ctypes.string_at(given.value, given.length) if given.value else b""
        self._library.gss_release_buffer(ctypes.byref(ctypes.c_uint32()), ctypes.byref(given))
        return data


def is_asked_for(challenges: list[str]) -> bool:
    """Whether the WWW-Authenticate headers of a refusal ask for a ticket."""
    return any(_negotiate_words(challenge) is not None for challenge in challenges)


def _negotiate_words(challenge: str) -> str | None:
    scheme, _, words = challenge.strip().partition(" ")
    return words.strip() if scheme.lower() == "negotiate" else None


def _told(data: bytes) -> _Bytes:
    return _Bytes(len(data), ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p))
