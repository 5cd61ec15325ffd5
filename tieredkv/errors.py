"""Every error that tieredkv raises on purpose.

TieredKVError
├─ ConfigError(ValueError)    names the field, the value, what is allowed, the nearest known name
├─ RequestError(ValueError)   the caller's request cannot be served; maps to HTTP 4xx
│  └─ PromptTooLongError       the prompt does not fit the model's context
├─ ShapeError(ValueError)     host-side kernel checks
├─ DeviceError                a CUDA call failed; the message names it
├─ ModelError                 unsupported architecture, weights that do not fit the config
├─ IntegrityError             a `check()` found a broken invariant: always a bug
└─ StorageError(OSError)      path and cause kept
   ├─ StoreFullError          the budget or the disk has no room
   ├─ NoStoreError            the folder holds no store
   ├─ StoreBusyError          another writer owns the folder
   ├─ StoreUnreachableError   the store's writer does not answer
   ├─ UnknownIdError          an id names no block
   ├─ NoServerError           only a server could do it, and none uses the store
   ├─ FormatVersionError      the store was written by another format version
   ├─ MissingKeyError         keys of an encrypted store are missing, wrong or damaged
   │  └─ DamagedTableError    both headers of the key table are damaged, so no key can be read
   ├─ CorruptIndexError       the index contradicts itself: the one verdict of damage
   ├─ StoreFailedError        the store failed for an unknown reason: no verdict
   ├─ BlocksLostError         blocks that a policy promised to the disk could not be stored
   └─ CorruptBlockError       what was read contradicts its record
"""


class TieredKVError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(TieredKVError, ValueError):
    """A setting is unknown, malformed or out of range."""


MAX_RETRY_AFTER_S = 60

MAX_TOLD_CHARACTERS = 200
"""Length to which a client's key or value is cut in an error text."""


class RequestError(TieredKVError, ValueError):
    """A request cannot be served as asked.

    Attributes:
        param: the request field at fault, if one is.
        code: a machine-readable code such as `context_length_exceeded`.
        status: the HTTP status it maps to.
        retry_after_s: when to ask again, where that may help.
    """

    retry_after_s = 1

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def retry_in(self, wait_s: float) -> "RequestError":
        """Tell the client to ask again after this time, in whole seconds from one to a minute."""
        self.retry_after_s = min(1 + int(wait_s), MAX_RETRY_AFTER_S)
        return self


class PromptTooLongError(RequestError):
    """A prompt does not fit the model's context.

    Attributes:
        num_tokens: the length of the prompt; 0 if it was not counted to its end.
        most_tokens: the length that it exceeds.
    """

    num_tokens = most_tokens = 0


class ShapeError(TieredKVError, ValueError):
    """Tensors handed to a kernel do not fit each other."""


class ServerUnreachableError(TieredKVError):
    """A server does not answer at its URL."""


class DeviceError(TieredKVError):
    """A CUDA call failed."""


class ModelError(TieredKVError):
    """A model cannot be loaded or is not supported."""


class IntegrityError(TieredKVError):
    """A `check()` found a broken invariant, which is always a bug in tieredkv."""


class StorageError(TieredKVError, OSError):
    """The disk tier cannot be used; the message names the path and the way out."""


class StoreFullError(StorageError):
    """The byte budget or the filesystem has no room for another block."""


class NoStoreError(StorageError):
    """The folder holds no store, or is not there."""


class StoreBusyError(StorageError):
    """Another writer owns the store; the message names its pid."""


class StoreUnreachableError(StorageError):
    """The store has a writer that does not answer the command line."""


class UnknownIdError(StorageError):
    """An id names no block of any tier."""


class NoServerError(StorageError):
    """Only a server could do it, and none uses the store."""


class FormatVersionError(StorageError):
    """The store was written by another format version and was left untouched."""


class MissingKeyError(StorageError):
    """The master key or the key table of an encrypted store is missing, wrong or damaged.

    Attributes:
        reason: `absent`, `unreadable`, `unsafe` (its owner, mode, kind or names, or a link on the
            way), `foreign` (of another folder), `version` (of another format version),
            `master key` (another one than the table was written with), `no key` (a file or an
            output that holds none) or `damaged`; empty where none of them is told apart.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class DamagedTableError(MissingKeyError):
    """Both headers of the key table are damaged, so none of its keys can be read any more."""

    def __init__(self, message: str, *, reason: str = "damaged") -> None:
        super().__init__(message, reason=reason)


class CorruptIndexError(StorageError):
    """The index contradicts itself; raised on evidence only (`tieredkv.storage.index.verdicts`)."""


class StoreFailedError(StorageError):
    """The store failed without evidence of damage and without another known cause."""


class BlocksLostError(StorageError):
    """Blocks that a retention policy promised to the disk are lost, because the store failed."""


class CorruptBlockError(StorageError):
    """What was read contradicts its record.

    Attributes:
        reason: one of the reasons counted by `verify`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def invalid_value(path: str, value: str, supported: str) -> RequestError:
    """Return the error for a string that is not one of those supported, as `'a', 'b' and 'c'`."""
    listed = f"values are: {supported}" if " and " in supported else f"value is: {supported}"
    message = f"Invalid value: '{value[:MAX_TOLD_CHARACTERS]}'. Supported {listed}."
    return RequestError(message, param=path, code="invalid_value")


def named(kind: str, message: str) -> TieredKVError:
    """Return the error that another process raised, as if it were raised in this one."""
    error = StorageError if kind == "CorruptBlockError" else globals().get(kind)
    if isinstance(error, type) and issubclass(error, TieredKVError):
        return error(message)
    return TieredKVError(message)
