"""How long this process's Kerberos ticket lasts, as GSSAPI sees it: in a cache of any kind, whatever the language."""

from __future__ import annotations

import ctypes

_LIBRARY = "libgssapi_krb5.so.2"
_INITIATE = 1
"""cited: RFC 2744, GSS_C_INITIATE: to prove who one is, not to check who others are."""
_INDEFINITE = 0xFFFFFFFF
_ERRORS = 0xFFFF0000
_EXPIRED = 11 << 16
"""cited: RFC 2744, GSS_S_CREDENTIALS_EXPIRED."""


def ticket_left_s() -> int | None:
    """Seconds for which the ticket is good, 0 if it has run out; None where there is none, or no Kerberos here."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        # Of Kerberos alone: other mechanisms have limits of their own.
        mechanisms = ctypes.c_void_p.in_dll(library, "gss_mech_set_krb5")
    except (OSError, ValueError):
        return None
    minor, seconds, credential = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_void_p()
    library.gss_acquire_cred.restype = ctypes.c_uint32
    status = library.gss_acquire_cred(
        ctypes.byref(minor), None, ctypes.c_uint32(0), mechanisms, ctypes.c_int(_INITIATE), ctypes.byref(credential),
        None, ctypes.byref(seconds),
    )  # fmt: skip
    if status & _ERRORS:
        return 0 if status & _ERRORS == _EXPIRED else None
    library.gss_release_cred(ctypes.byref(minor), ctypes.byref(credential))
    return None if seconds.value == _INDEFINITE else seconds.value
