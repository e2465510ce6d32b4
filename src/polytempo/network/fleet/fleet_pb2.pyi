from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromClient(_message.Message):
    __slots__ = ("hello", "upload", "swapped", "scores", "chunk")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    upload: Upload
    swapped: Swapped
    scores: Scores
    chunk: Chunk
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., upload: _Optional[_Union[Upload, _Mapping]] = ..., swapped: _Optional[_Union[Swapped, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class FromServer(_message.Message):
    __slots__ = ("welcome", "work", "hurry", "acknowledge", "decline", "examine", "finished", "chunk")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    HURRY_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    work: Work
    hurry: Hurry
    acknowledge: Acknowledge
    decline: Decline
    examine: Examine
    finished: Finished
    chunk: Chunk
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., hurry: _Optional[_Union[Hurry, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("id", "bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    bytes: int
    def __init__(self, id: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("payload", "data")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    payload: int
    data: bytes
    def __init__(self, payload: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "model", "problem", "samples", "tested", "training", "offering")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TESTED_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    OFFERING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    problem: str
    samples: int
    tested: int
    training: int
    offering: int
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., problem: _Optional[str] = ..., samples: _Optional[int] = ..., tested: _Optional[int] = ..., training: _Optional[int] = ..., offering: _Optional[int] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("number", "samples", "seconds", "payload")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    samples: int
    seconds: float
    payload: Payload
    def __init__(self, number: _Optional[int] = ..., samples: _Optional[int] = ..., seconds: _Optional[float] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class Swapped(_message.Message):
    __slots__ = ("number", "replaces", "step")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    replaces: int
    step: int
    def __init__(self, number: _Optional[int] = ..., replaces: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("exam", "handed", "adapted")
    EXAM_FIELD_NUMBER: _ClassVar[int]
    HANDED_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_FIELD_NUMBER: _ClassVar[int]
    exam: int
    handed: Sums
    adapted: Sums
    def __init__(self, exam: _Optional[int] = ..., handed: _Optional[_Union[Sums, _Mapping]] = ..., adapted: _Optional[_Union[Sums, _Mapping]] = ...) -> None: ...

class Sums(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("client", "run")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    client: int
    run: str
    def __init__(self, client: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("number", "client", "preempt", "task", "payload")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    client: int
    preempt: bool
    task: str
    payload: Payload
    def __init__(self, number: _Optional[int] = ..., client: _Optional[int] = ..., preempt: _Optional[bool] = ..., task: _Optional[str] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class Hurry(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("number", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    reason: str
    def __init__(self, number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("exam", "adapt_epochs", "payload")
    EXAM_FIELD_NUMBER: _ClassVar[int]
    ADAPT_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    exam: int
    adapt_epochs: int
    payload: Payload
    def __init__(self, exam: _Optional[int] = ..., adapt_epochs: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
