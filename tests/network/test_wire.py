"""What comes in is read only if everything about it is right."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from nearby import wait_until
from torch import nn

from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.layout import Layout, Parts
from polytempo.network.wire import MOST_HEADER, Wire, check_name
from polytempo.nodes import Identity, Snapshot, Token
from polytempo.nodes.protocol import Pending

WIRE = Wire("test", Layout(nn.Linear(11, 1)))
ANN, TICKET = Identity("ann", 3), Token("bob", 5, 7)
PARAMS = torch.linspace(-1, 1, 12)
HEADER, WEIGHTS = WIRE.write(ANN, TICKET, Snapshot(PARAMS, 0.25, 40))


def header(**changed):
    found = {**json.loads(HEADER), **changed}
    return json.dumps({k: v for k, v in found.items() if v != "absent"}).encode()


def weights(**tensors):
    return safetensors.torch.save(tensors)


def test_a_message_arrives_as_it_was_sent():
    message = WIRE.read(HEADER, WEIGHTS, weights=True)
    assert (message.by, message.token) == (ANN, TICKET)
    assert torch.equal(message.snapshot.params, PARAMS)
    assert (message.snapshot.progress, message.snapshot.iteration) == (0.25, 40)
    claim = WIRE.read(*WIRE.write(ANN, TICKET), weights=False)
    assert (claim.by, claim.token, claim.snapshot) == (ANN, TICKET, None)


BAD_HEADERS = {
    "nothing": b"",
    "no JSON": b"\x80\x04pickled",
    "no table": b"[1, 2]",
    "too long": header(by="a" * (MOST_HEADER + 1)),
    "another protocol": header(protocol=2),
    "another run": header(run="other"),
    "another model": header(model="0" * 16),
    "a name with a slash": header(by="ann/bob"),
    "a name that matches all": header(by="**"),
    "a number as text": header(incarnation="3"),
    "a negative incarnation": header(incarnation=-1),
    "a huge iteration": header(iteration=2**60),
    "a token too short": header(token=["bob", 5]),
    "progress above 1": header(progress=1.5),
    "progress NaN": HEADER.replace(b"0.25", b"NaN"),
    "no progress": header(progress="absent"),
    "no iteration": header(iteration="absent"),
    "a field too many": header(code="import os"),
}
BAD_WEIGHTS = {
    "nothing": b"",
    "a pickle": b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94",
    "cut off": WEIGHTS[:-1],
    "longer": WEIGHTS + b"\0" * 4,
    "far too long": b"\0" * (WIRE.most_payload + 1),
    "another length": weights(params=torch.zeros(11)),
    "another shape": weights(params=torch.zeros(12, 1)),
    "another type": weights(params=torch.zeros(12, dtype=torch.float64)),
    "another name": weights(theta=torch.zeros(12)),
    "two tensors": weights(params=torch.zeros(12), more=torch.zeros(1)),
    "NaN": weights(params=torch.full((12,), torch.nan)),
    "huge": weights(params=torch.full((12,), 1e19)),
    "infinite": weights(params=torch.cat([torch.zeros(11), torch.tensor([torch.inf])])),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_bad_header_is_refused(case):
    with pytest.raises(Refused):
        WIRE.read(BAD_HEADERS[case], WEIGHTS, weights=True)


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused(case):
    with pytest.raises(Refused):
        WIRE.read(HEADER, BAD_WEIGHTS[case], weights=True)


def test_a_claim_brings_no_weights():
    with pytest.raises(Refused, match="nobody asked for"):
        WIRE.read(HEADER, WEIGHTS, weights=False)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_noise_is_refused(head, payload):
    for pair in ((head, WEIGHTS), (HEADER, payload)):
        with pytest.raises(Refused):
            WIRE.read(*pair, weights=True)


@given(st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1))
def test_keys_are_read_as_they_are_written(incarnation, ticket):
    who, token = Identity("a.b-c_1", incarnation), Token("x", incarnation, ticket)
    assert WIRE.parse(WIRE.key("peer", *who)) == who
    assert WIRE.parse(WIRE.key("ticket", *token)) == token


@pytest.mark.parametrize(
    "key", ["peer/ann", "peer/ann/-1", "peer/ann/x", "peer/**", "ticket/ann/1", "other/ann/1", ""]
)
def test_other_keys_are_refused(key):
    with pytest.raises(Refused):
        WIRE.parse(f"polytempo/test/{key}")


@pytest.mark.parametrize("name", ["", "a/b", "*", "-a", "a b", "é", "a" * 65, "a\n"])
def test_names_must_fit_into_keys(name):
    with pytest.raises(PolytempoError, match="invalid peer name"):
        check_name("peer", name)


def test_bad_messages_over_the_network_do_no_harm(place, vector, end_round):
    """Anything that fits through the line may come; the owner stays pending, and then pairs."""
    import zenoh

    ann, eve, bob = place.enter("ann"), place.enter("eve", "never"), place.enter("bob")
    end_round(ann, vector(1))
    wait_until(lambda: "ann" in bob.node.pairing.hints and len(eve.present) == 2)
    wire, said = place.wire(), []
    for kind in ("claim", "exchange"):
        for head in BAD_HEADERS.values():
            replies = eve._session.get(
                wire.key(kind, "ann", 1), attachment=head, payload=WEIGHTS, timeout=60
            )
            said += [reply.err for reply in replies]
    for payload in BAD_WEIGHTS.values():
        replies = eve._session.get(
            wire.key("exchange", "ann", 1), attachment=HEADER, payload=payload, timeout=60
        )
        said += [reply.err for reply in replies]
    bare = eve._session.get(wire.key("claim", "ann", 1), zenoh.handlers.FifoChannel(4), timeout=60)
    said += [reply.err for reply in bare]
    # A claim to everybody, of a ticket that never was; an exchange that was never granted.
    false = wire.write(Identity("eve", 1), Token("ann", 1, 9))
    everybody = wire.key("claim", "**")
    answers = [reply.ok for reply in eve._session.get(everybody, attachment=false[0], timeout=60)]
    assert {str(answer.key_expr) for answer in answers} >= {wire.key("claim", "ann", 1)}
    assert {answer.payload.to_bytes() for answer in answers} == {b"no"}
    good = wire.write(Identity("eve", 1), Token("ann", 1, 1), Snapshot(vector(3), 0.5, 1))
    replies = eve._session.get(
        wire.key("exchange", "ann", 1), attachment=good[0], payload=good[1], timeout=60
    )
    said += [reply.err for reply in replies]
    assert len(said) == 2 * len(BAD_HEADERS) + len(BAD_WEIGHTS) + 2 and all(said)
    assert ann.node.phase == Pending(Token("ann", 1, 1))
    assert ann.node.inbox == []
    end_round(bob, vector(2))
    wait_until(lambda: ann.node.counts.models == bob.node.counts.models == 1)
    wait_until(lambda: len(ann.node.inbox) == 1)


def test_a_token_of_a_foreign_name_does_no_harm(place):
    ann, eve = place.enter("ann"), place.enter("eve")
    wait_until(lambda: ann.present)
    foreign = eve._session.liveliness().declare_token("polytempo/test/ticket/eve/one/two/three")
    wait_until(lambda: any(event == "refused" for event, _ in ann.events))
    foreign.undeclare()
    assert ann.node.pairing.hints == {}


def test_peers_that_share_other_parts_of_a_model_do_not_understand_each_other():
    """Though what they share is as long: each number would mean another one."""

    def wire(personal):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        return Wire("run", Layout(module, Parts([personal])))

    one, other = wire("0.*"), wire("1.*")
    assert one.size == other.size
    assert one.model != other.model and one.model == wire("0.*").model
