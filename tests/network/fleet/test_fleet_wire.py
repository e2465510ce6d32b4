"""What travels between a server and its clients, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fleet_kit import same
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core.client_steps import CLIENT_STEPS, Basis, ClientStep, Mask
from polytempo.core.errors import Refused
from polytempo.core.messages import Dispatch
from polytempo.core.objective import OBJECTIVES
from polytempo.core.optimizer import Adam
from polytempo.core.task import TASKS, Task
from polytempo.network import fleet
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.outbox import Outbox
from polytempo.network.fleet.payload import Payload, read_payload
from polytempo.network.fleet.reading import (
    MOST_FRAME,
    Reader,
    Whole,
    read_from_client,
    read_from_server,
    read_task,
)
from polytempo.network.fleet.sending import CHUNK, Writer
from polytempo.nodes.star import (
    Acknowledge,
    Decline,
    Examine,
    Finished,
    Hello,
    Hurry,
    Scores,
    Swapped,
    Upload,
    Welcome,
    Work,
)

SIZE = 200_000  # several chunks
MOST = 2 * 4 * SIZE + 1_000_000
TASK = Task(
    steps=3,
    optimizer=Adam(beta1=0.8),
    keep_optimizer=True,
    client_steps=(Mask(share=0.5), Basis(directions=2)),
    objective=OBJECTIVES.create("proximal:mu=0.1"),
)
MODEL = torch.rand(SIZE)
FROM_SERVER = [
    Welcome(3, {"seed": 1, "layout": [["a", [2, 3]]], "task": None}),
    Work(Dispatch(3, 17, MODEL, TASK, True, {"anchor": torch.rand(SIZE), "candidate 1": MODEL})),
    Work(Dispatch(3, 17, torch.rand(5).double(), Task())),
    Examine(2, MODEL, 3),
    Hurry(17),
    Acknowledge(17),
    Decline(17, "it came too late"),
    Finished("over"),
]
EXTRAS = {"mask": torch.ones(1, 9, dtype=torch.bool), "choice": torch.tensor([[7]])}
FROM_CLIENT = [
    Hello(1, "abc", "classification", 10, 5),
    Hello(1, "", "classification", 10, 0, training=0, offering=4),
    Upload(17, MODEL, 10, EXTRAS, 1.5),
    Swapped(17, 16, 0),
    Swapped(17, 16, None),
    Scores(0, {"loss": 0.25, "top 5": 1e300}),
    Scores(0, {"loss": 0.25}, {"loss": 0.0}),
]


def frames(message):
    """All frames of an outgoing message."""
    return [message.head, *(message.blob.frame(k) for k in range(len(message.blob or ())))]


def heard(reader, found):
    """The messages that these frames bring."""
    return [whole for data in found if (whole := reader.take(data)) is not None]


def name_of(message):
    return type(message).__name__


@pytest.mark.parametrize("message", FROM_SERVER, ids=name_of)
def test_what_the_server_says_arrives(message):
    found = frames(Writer().from_server(message))
    assert all(len(frame) <= MOST_FRAME for frame in found)
    (whole,) = heard(Reader(pb.FromServer, 10 * MOST), found)
    assert same(read_from_server(whole), message)


@pytest.mark.parametrize("message", FROM_CLIENT, ids=name_of)
def test_what_a_client_says_arrives(message):
    (whole,) = heard(Reader(pb.FromClient, MOST), frames(Writer().from_client(message)))
    assert same(read_from_client(whole, SIZE, torch.float32), message)


def test_small_messages_and_two_models_share_a_stream():
    writer, reader, outbox = Writer(), Reader(pb.FromServer, 10 * MOST), Outbox()
    for message in (FROM_SERVER[1], FROM_SERVER[3], FROM_SERVER[5]):
        outbox.post(writer.from_server(message))
    outbox.post(writer.from_server(Hurry(17)))  # about the work that is on its way: after it
    found = []
    while not outbox.empty:
        frame = outbox.next()
        try:
            frame.send(None)
        except StopIteration as stop:
            found.append(stop.value)
    kinds = [name_of(read_from_server(whole)) for whole in heard(reader, found)]
    assert kinds[0] == "Acknowledge"
    assert kinds.index("Hurry") > kinds.index("Work")
    assert sorted(kinds) == ["Acknowledge", "Examine", "Hurry", "Work"]


def test_only_the_newest_model_waits():
    writer, outbox = Writer(), Outbox()
    for number in range(3):
        outbox.post(writer.from_server(Work(Dispatch(0, number, torch.rand(3), Task()))))
    (whole,) = heard(Reader(pb.FromServer, MOST), [run(outbox.next()), run(outbox.next())])
    assert read_from_server(whole).dispatch.number == 2 and outbox.empty


def run(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


def test_too_many_small_messages_are_an_overflow():
    outbox = Outbox(most=3)
    for number in range(3):
        outbox.post(Writer().from_server(Acknowledge(number)))
    with pytest.raises(OverflowError):
        outbox.post(Writer().from_server(Acknowledge(3)))


def test_a_model_for_many_is_encoded_once():
    writer = Writer()
    sent = [writer.from_server(Work(Dispatch(k, k, MODEL, TASK))) for k in range(3)]
    assert sent[0].blob is sent[1].blob is sent[2].blob
    assert sent[0].blob.frame(0) is sent[1].blob.frame(0)
    other = writer.from_server(Work(Dispatch(3, 3, MODEL.clone(), TASK)))
    assert other.blob is not sent[0].blob


# -- vectors ---------------------------------------------------------------------------------------

TENSORS = {
    "F32": torch.rand(3, 5),
    "F64": torch.rand(2).double(),
    "F16": torch.rand(3).half(),
    "BF16": torch.rand(1).bfloat16(),
    "I64": torch.arange(4),
    "U8": torch.arange(3, dtype=torch.uint8),
    "BOOL": torch.tensor([[True, False, True]]),
    "none": torch.empty(0),
    "one": torch.tensor(2.5),
}


def as_bytes(tensors):
    return b"".join(Payload(tensors).parts)


def read(data):
    return read_payload(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_payloads_are_safetensors_files():
    assert same(safetensors.torch.load(as_bytes(TENSORS)), TENSORS)
    assert same(read(safetensors.torch.save(TENSORS, metadata={"by": "another"})), TENSORS)
    assert same(read(as_bytes(TENSORS)), TENSORS)
    cut = Payload(TENSORS)
    assert b"".join(cut.cut(k, k + 7) for k in range(0, cut.size, 7)) == as_bytes(TENSORS)


def header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"1234567",
        bytes(8),
        (2**63).to_bytes(8, "little"),
        header() + b"more",
        header(a=F32),
        header(a=F32) + bytes(9),
        header(a=F32, b=F32) + bytes(8),
        header(a=F32, b={**F32, "data_offsets": [4, 12]}) + bytes(12),
        header(a={**F32, "data_offsets": [8, 16]}) + bytes(16),
        header(a={**F32, "shape": [2**60, 2**60]}) + bytes(8),
        header(a={**F32, "shape": [-2]}) + bytes(8),
        header(a={**F32, "shape": [2.0]}) + bytes(8),
        header(a={**F32, "shape": [True, 2]}) + bytes(8),
        header(a={**F32, "dtype": "F8_E4M3"}) + bytes(8),
        header(a={**F32, "dtype": ["F32"]}) + bytes(8),
        header(a={**F32, "more": 1}) + bytes(8),
        header(a=None),
        header(
            **{str(k): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for k in range(99)}
        ),
        (9).to_bytes(8, "little") + b'["a", "b"]'[:9],
        (400).to_bytes(8, "little") + b"[" * 400,
        (60_000).to_bytes(8, "little") + b"[" * 60_000,
    ],
)
def test_bytes_that_are_no_payload_are_refused(data):
    with pytest.raises(Refused):
        read(data)


# -- refusals --------------------------------------------------------------------------------------


def upload(tensors=None, **fields):
    """An upload as a hostile client may send it."""
    payload = Payload({"vector": torch.rand(SIZE)} if tensors is None else tensors)
    head = pb.Upload(number=1, samples=1, payload=pb.Payload(id=1, bytes=payload.size), **fields)
    data = torch.frombuffer(bytearray(payload.cut(0, payload.size)), dtype=torch.uint8)
    return Whole("upload", head, data)


VECTOR = {"vector": torch.rand(SIZE)}


@pytest.mark.parametrize(
    ("whole", "why"),
    [
        (upload({}), "the vector none"),
        (upload({"vector": torch.rand(SIZE + 1)}), "expected torch.float32"),
        (upload({"vector": torch.rand(SIZE).half()}), "expected torch.float32"),
        (upload({"vector": torch.rand(SIZE, 1)}), "expected torch.float32"),
        (upload(VECTOR | {"mask": torch.ones(1)}), "a tensor called"),
        (upload(VECTOR | {"extra ../x": torch.ones(1)}), "a tensor called"),
        (upload(VECTOR | {f"extra {k}": torch.ones(1) for k in range(17)}), "17 extras"),
        (upload(seconds=float("nan")), "nan seconds"),
        (upload(seconds=-1.0), "-1.0 seconds"),
        (Whole("hello", pb.Hello(model="x" * 65)), "at most 64"),
        (Whole("hello", pb.Hello(problem="a\nb")), "printable"),
        (Whole("hello", pb.Hello(samples=2**60)), "not a number"),
        (Whole("scores", pb.Scores(handed=pb.Sums(values={"loss": float("inf")}))), "inf"),
        (Whole("scores", pb.Scores(handed=pb.Sums(values={"a/b": 1.0}))), "a/b"),
        (
            Whole("scores", pb.Scores(handed=pb.Sums(values={str(k): 1.0 for k in range(65)}))),
            "65 figures",
        ),
        (Whole("work", pb.Work()), "does not say"),
        (Whole("upload", pb.Upload()), "no vectors"),
    ],
)
def test_what_does_not_fit_is_refused(whole, why):
    with pytest.raises(Refused, match=why):
        read_from_client(whole, SIZE, torch.float32)


def client_frame(**said):
    return pb.FromClient(**said).SerializeToString()


def announced(size, number=1):
    return client_frame(upload=pb.Upload(payload=pb.Payload(id=number, bytes=size)))


def chunk(size, number=1):
    return client_frame(chunk=pb.Chunk(payload=number, data=bytes(size)))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([b"\xff\xff\xff"], "not in the protocol"),
        ([b""], "fields"),
        ([client_frame(hello=pb.Hello(protocol=1)) + b"\xf8\x07\x01"], "does not know"),
        ([b"\x0a\x04\xf8\x07\x01\x00"], "does not know|not in the protocol"),
        ([announced(MOST + 1)], "at most"),
        ([announced(0)], "at most"),
        ([announced(1000), announced(1000)], "before the last one"),
        ([announced(1000), announced(1000, 2)], "before the last one"),
        ([chunk(10)], "never announced"),
        ([announced(CHUNK + 1), chunk(10)], "where 262144 were due"),
        ([announced(10), chunk(11)], "where 10 were due"),
        ([announced(10), chunk(0)], "where 10 were due"),
        ([announced(10), chunk(10), chunk(10)], "never announced"),
    ],
)
def test_frames_that_do_not_belong_together_are_refused(found, why):
    with pytest.raises(Refused, match=why):
        heard(Reader(pb.FromClient, MOST), found)


def test_announcing_takes_no_memory():
    reader = Reader(pb.FromClient, 2**50)
    assert reader.take(announced(2**49)) is None
    assert reader.expected == 2**49


@given(st.lists(st.binary(max_size=200), max_size=5), st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_understood(found, server):
    reader = Reader(pb.FromServer if server else pb.FromClient, 1000)
    try:
        for whole in heard(reader, found):
            read_from_server(whole) if server else read_from_client(whole, 3, torch.float32)
    except Refused:
        pass


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_messages_with_flipped_bytes_are_refused_or_understood(data):
    small = torch.rand(3)
    message = data.draw(
        st.sampled_from(
            [
                Upload(1, small, 10, EXTRAS, 1.5),
                *(m for m in FROM_CLIENT if not isinstance(m, Upload)),
            ]
        )
    )
    found = frames(Writer().from_client(message))
    for _ in range(data.draw(st.integers(1, 4))):
        k = data.draw(st.integers(0, len(found) - 1))
        changed = bytearray(found[k])
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        found[k] = bytes(changed)
    try:
        for whole in heard(Reader(pb.FromClient, 10_000), found):
            read_from_client(whole, 3, torch.float32)
    except Refused:
        pass


# -- tasks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"name": "os:system"},
        {"name": "nobody"},
        {"optimizer": {"name": "fleet_canary:Boom"}},
        {"optimizer": "fleet_canary:Boom"},
        {"client_steps": [{"name": "fleet_canary:Boom"}]},
        {"client_steps": ["fleet_canary:Boom"]},
        {"client_steps": [["fleet_canary:Boom"]]},
        {"schedule": {"name": "cosine", "inner": {"name": "fleet_canary:Boom"}}},
        {"epochs": 0},
        {"unknown": 1},
        {"lr": "fleet_canary:Boom"},
    ],
)
def test_a_task_runs_nothing_that_is_not_registered(change):
    table = json.loads(json.dumps(TASKS.describe(TASK))) | change
    with pytest.raises(Refused):
        read_task(table)
    assert "fleet_canary" not in sys.modules


@pytest.mark.parametrize("table", [None, 3, "task", [], {}, {"name": []}, {"name": None}])
def test_what_is_no_task_is_refused(table):
    with pytest.raises(Refused):
        read_task(table)


def test_a_registered_step_of_the_users_own_is_accepted(monkeypatch):
    monkeypatch.setattr(CLIENT_STEPS, "_known", dict(CLIENT_STEPS._known))

    @CLIENT_STEPS.register("own")
    class Own(ClientStep):
        pass

    globals()["Own"] = Own
    Own.__qualname__ = "Own"
    task = Task(client_steps=(Own(),))
    assert read_task(json.loads(json.dumps(TASKS.describe(task)))) == task


# -- the contract ----------------------------------------------------------------------------------


def test_the_committed_code_is_what_protoc_makes_of_the_proto(tmp_path):
    pytest.importorskip("grpc_tools")
    source = Path(fleet.__file__).parents[3]
    name = "polytempo/network/fleet/fleet"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(source)),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"{name}.proto"),
        ],
        check=True,
        timeout=60,
    )
    for ending in ("_pb2.py", "_pb2.pyi"):
        made, ours = (folder / (name + ending) for folder in (tmp_path, source))
        assert made.read_text() == ours.read_text(), f"run protoc again for {ours.name}"
