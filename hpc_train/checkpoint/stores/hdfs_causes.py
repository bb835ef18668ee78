"""Why HDFS refused, from what its Java exceptions are called: the same words whichever client passed them on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hpc_train.checkpoint.stores.cause import Cause, StoreError
from hpc_train.errors import HpcTrainError

_TELL_THE_SITE = "Wait, or tell the site."
_NEW_TICKET = "Get a new ticket (`kinit`, or from a keytab), in a cache that the compute nodes see (KRB5CCNAME)."
_SPACE_CURE = "Remove old checkpoints (checkpoint.keep, `hpc-train ckpt prune`), or ask the site for more."

TICKET_RUN_OUT = Cause("the Kerberos ticket has run out", True, _NEW_TICKET)
"""May pass: a site's daemon, or a keytab and cron, may renew it in this moment."""
NO_TICKET = Cause("there is no Kerberos ticket", False, _NEW_TICKET)
REFUSED_LOGIN = Cause("Kerberos or the delegation token was refused", False, _NEW_TICKET)

_PATH = re.compile(r"/[^\s\"',;:()\[\]]*")
"""Of a file or a host: what it is called says nothing of the cause."""

# In this order: the first that is found in the words of a failure.
_CAUSES: list[tuple[str, Cause]] = [
    (
        r"SafeModeException|in safe ?mode",
        Cause("the name node is in safe mode, in which nothing can be changed", True, _TELL_THE_SITE),
    ),
    (
        r"StandbyException|in state standby",
        Cause(
            "only a standby name node answered",
            True,
            "Use the name of the service (hdfs://NAME/ and HADOOP_CONF_DIR) and not that of one name node.",
        ),
    ),
    (r"RetriableException|startup mode", Cause("the name node is starting", True, _TELL_THE_SITE)),
    (
        r"LeaseExpiredException|No lease on",
        Cause(
            "the file was removed, or taken over, while it was written",
            False,
            "Is another run writing to this folder? Give each its own checkpoint.folder.",
        ),
    ),
    (
        r"AlreadyBeingCreatedException|RecoveryInProgressException|\b[Ll]ease ?(recovery|holder)",
        Cause("another writer still holds the file's lease", True, "It ends by itself within a minute, or an hour."),
    ),
    # Before refused permissions: Hadoop says some of it as an AccessControlException.
    (
        r"[Cc]lock skew|[Tt]icket not yet valid",
        Cause("the clocks of this node and of Kerberos or HDFS differ", False, "Have the site set them (NTP)."),
    ),
    (
        r"Server .*not found in Kerberos database",
        Cause(
            "Kerberos does not know the host of the URL by this name",
            False,
            "Write its full name in lower case, not an alias or an address; or the site has no HTTP/HOST for its web "
            "ports (see `kvno HTTP/HOST`): use hdfs:// there.",
        ),
    ),
    (
        r"Cannot contact any KDC|[Tt]icket server .*unreachable",
        Cause("no Kerberos server (KDC) answers", True, "May this node reach one (/etc/krb5.conf)? " + _TELL_THE_SITE),
    ),
    (
        r"Cannot find KDC|[Cc]annot determine realm|libgssapi",
        Cause(
            "this node is not set up for Kerberos",
            False,
            "It needs the site's krb5.conf (/etc/krb5.conf, or KRB5_CONFIG) and MIT's libgssapi_krb5.so.2, both of "
            "which kinit has.",
        ),
    ),
    (
        r"[Tt]icket expired|CREDENTIALS_EXPIRED|referenced context has expired",
        TICKET_RUN_OUT,
    ),
    (
        r"NO_CRED|[Nn]o (valid |Kerberos )?credentials|Kerberos tgt|SIMPLE authentication|cannot authenticate via",
        NO_TICKET,
    ),
    (
        r"FileAlreadyExists|ParentNotDirectory|FileExistsError|[Nn]ot a directory",
        Cause("a file stands where a folder is needed", False, "Rename it, or choose another folder.", is_damage=True),
    ),
    (
        r"AccessControlException|Permission denied",
        Cause(
            "no permission",
            False,
            "Choose a folder that this user may write, or have its owner or mode changed (`hdfs dfs -ls`).",
        ),
    ),
    (r"NSQuotaExceededException|quota .*of files", Cause("the quota of names is used up", False, _SPACE_CURE)),
    (r"QuotaExceeded|QuotaByStorageType", Cause("the space quota is used up", False, _SPACE_CURE)),
    (
        r"There are 0 datanode",
        Cause("no data node has reported to the name node, which may have been started just now", True, _TELL_THE_SITE),
    ),
    (
        r"could only be (replicated|written) to|minReplication",
        Cause("no data node took the block: they are full, dead or excluded", False, _SPACE_CURE),
    ),
    (
        r"InvalidToken|token .*expired|GSSAPI|GSSException|SASL|Kerberos",
        REFUSED_LOGIN,
    ),
    (
        r"HTTP status 401",
        Cause(
            "the server did not take the Kerberos ticket, or asks for a password",
            False,
            "webhdfs:// shows tickets alone. Does the site know the user of this one (`klist`)?",
        ),
    ),
    (
        r"No NameNode hosts",
        Cause(
            "this is no name node's address, nor a service that is configured here",
            False,
            "Write hdfs://HOST:PORT/path (the port is 8020 on most sites), or set HADOOP_CONF_DIR, which says what the "
            "name of a service stands for.",
        ),
    ),
    (
        r"PathComponentTooLong|path component name limit",
        Cause("the name is too long for this file system", False, "Choose a shorter one."),
    ),
    (
        r"UnknownHost|lookup address|resolve host|Name or service not known|nodename nor servname",
        Cause(
            "the name node's host is not known here",
            False,
            "Correct the URL, or set HADOOP_CONF_DIR, which says what the name of a service stands for.",
        ),
    ),
    (
        r"[Cc]onnection (refused|reset|closed|aborted)|[Bb]roken pipe|timed? ?out|unreachable|early eof|unexpected end"
        r"|ConnectionRefused|NoRouteToHost|SocketTimeout|EOFException"
        r"|listener disconnected",  # hdfs-native, where a name node dies under a call
        Cause(
            "a name node or data node does not answer",
            True,
            "Is the address right, and may this node reach it? To a data node that has died, writers are sent for 10.5 "
            "minutes, or for 30 s with dfs.namenode.avoid.write.stale.datanode; libhdfs:// goes round it.",
        ),
    ),
    (
        r"[Cc]hecksum",
        # Of one replica. Java's client says so, too, where the data nodes of all others are down.
        Cause("the bytes of a block do not have their checksum", True, _TELL_THE_SITE, is_of_file=True),
    ),
    (
        r"[Bb]locks? (not found|missing)|BlockMissing|BlocksNotFound|DataTransfer|(Not enough|No) active nodes"
        r"|IncompleteRead"  # a data node that breaks off in the middle of an answer over HTTP
        # cited: hdfs-native 0.14, where data nodes die under a file that is written
        r"|All nodes failed for write|Block writer|Failed to (replay packets|complete file|send all packets)"
        r"|No new datanode",
        # Whether they are away or rotten is not told here: `Backend.rot` may know.
        Cause("no data node holds sound bytes of a block, or could take it", True, _TELL_THE_SITE, is_of_file=True),
    ),
]
_OTHER = Cause("HDFS refused", False, "Look at its words:")


@contextmanager
def connecting(url: str) -> Iterator[None]:
    """A client that cannot even be made, in words with a cure.

    Raises:
        StoreError: in place of what it raised.
    """
    try:
        yield
    except HpcTrainError:
        raise
    except Exception as problem:
        told = f"{type(problem).__name__}: {problem}"
        cause = hdfs_cause(told)
        raise StoreError(f"cannot use {url}: {cause.text}. {cause.cure} [{told}]", cause) from problem


def hdfs_cause(words: str) -> Cause:
    """The cause behind a failure, told as class and message."""
    words = _PATH.sub("/", words)
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, words)), _OTHER)
