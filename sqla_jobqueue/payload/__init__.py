"""A handler's signature as a payload: ``def send(session, order: Order, copies: int = 1)`` is ``{"order_id": 4}``.

The payload is a JSON object named after the parameters, so that SQL, other languages and people read and write it too.
Values are written and read by their annotations with pydantic: datetime, timedelta, Decimal, UUID, Enum, bytes, set,
dataclass, model... An unannotated parameter takes JSON as it is. A parameter annotated with a mapped class, ``Order``
or ``Order | None``, stands as the key of its row, and the handler gets the row.

Writing is strict: ``"1"`` is no int, and a value that would come back changed is refused at the call (NaN, NUL, a
UUID where the annotation says ``Any``). Reading is lax: ``12.0`` is an int when SQL wrote it. What does not fit is
never guessed. Only parameters that were passed are stored, so a default is the one of the code that runs the job.

What JSON or jsonb do not keep: the order of keys, the name of a time zone (the instant is kept), ``-0.0``. Bytes are
base64; within a pydantic model its own configuration decides, and bytes that are not text need
``ser_json_bytes="base64", val_json_bytes="base64"`` there.
"""

from sqla_jobqueue.payload.codec import Bound, Codec
from sqla_jobqueue.payload.entities import EntityParameter, Ref, key_of, ref
from sqla_jobqueue.payload.plain import check_json

__all__ = ["Bound", "Codec", "EntityParameter", "Ref", "check_json", "key_of", "ref"]
