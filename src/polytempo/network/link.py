"""Between the node of a peer and the network: delivers events, carries out actions.

One thread owns the node. Everything that happens is a job in its queue: what Zenoh's callbacks
report, what the training loop says at a round's end, and deadlines. So no event meets a node
half-way through another, and nothing here needs a lock. A job never waits for the network: models
are sent by other threads, because a send waits while the line is congested (the alternative, which
is Zenoh's default for `put`, is to drop the message).
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from polytempo.core.errors import PolytempoError, Refused
from polytempo.network.session import Address, open_session
from polytempo.network.wire import MOST_HEADER, Message, Wire
from polytempo.nodes import Fusion, Identity, PeerNode, Snapshot, Token, protocol

if TYPE_CHECKING:
    import zenoh

T = TypeVar("T")
Job = Callable[[], object]
Record = Callable[..., None]  # record(event, **what): keeps a log
_CLAIM, _EXCHANGE = "claim", "exchange"
_YES, _NO = b"yes", b"no"
_BESIDES = 2**20  # bytes: far more than a message has in addition to the model
_POLL = 0.02  # seconds between two looks at something that another thread brings about
_SENDERS = 4
END_SECONDS = 20.0  # for threads to end when the peer leaves; then it leaves without them


class Link:
    """A peer's place in the network, from `with` to its end."""

    def __init__(self, node: PeerNode, wire: Wire, record: Record, address: Address) -> None:
        self.node, self.wire, self.record, self.address = node, wire, record, address
        self.present: dict[str, int] = {}  # the incarnation of each other peer that lives
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._deadlines: list[tuple[float, int, Token]] = []
        self._standing: dict[Token, zenoh.LivelinessToken] = {}
        self._callbacks = 0  # Zenoh runs each on a thread of its own ...
        self._ended: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()  # ... named here
        self.failure: Exception | None = None  # what ended this link
        self._phase = type(node.phase).__name__
        self._steps = 0  # of the local round that the node has asked for
        self._letters: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # to be sent
        # Daemons: one that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name="polytempo node", daemon=True)
        self._senders = [
            threading.Thread(target=self._send_letters, name=f"polytempo sender {n}", daemon=True)
            for n in range(_SENDERS)
        ]

    # -- for the training loop ------------------------------------------------------------------

    def __enter__(self) -> Link:
        import zenoh

        self._zenoh = zenoh
        self._session = open_session(self.address, self.wire.most_payload + _BESIDES)
        try:
            self._declare()
        except BaseException:
            self._session.close()  # type: ignore[no-untyped-call]
            raise
        for thread in (self._thread, *self._senders):
            thread.start()
        return self

    def _declare(self) -> None:
        me, key = self.node.identity, self.wire.key
        # What others may ask stands before they hear of us.
        self._declared: list[Any] = [
            self._session.declare_queryable(key(kind, *me), self._callback(answer))
            for kind, answer in ((_CLAIM, self._claimed), (_EXCHANGE, self._exchanged))
        ]
        presence = self._session.liveliness()
        for kind in ("peer", "ticket"):
            self._declared.append(
                presence.declare_subscriber(
                    key(kind, "**"), self._callback(self._presence), history=True
                )
            )
        self._declared.append(presence.declare_token(key("peer", *me)))

    def __exit__(self, *_: object) -> None:
        """Undeclare, close and join: Python aborts if a thread of Zenoh's outlives it. Threads that
        do not end in time are recorded; what the peer has learnt is not lost with them."""
        self._jobs.put(None)
        stuck = _join([self._thread], END_SECONDS)
        for _each in self._senders:  # after all that the node's thread wanted to send
            self._letters.put(None)
        # Whoever waits for a model gives up after the time-out of an exchange.
        stuck += _join(self._senders, END_SECONDS + self.node.pairing.exchange_timeout)
        for declared in (*self._standing.values(), *reversed(self._declared)):
            declared.undeclare()
        self._session.close()  # type: ignore[no-untyped-call]
        stuck += self._join_callbacks()
        if stuck:
            self.record("stuck", threads=stuck)

    def _join_callbacks(self) -> list[str]:
        """Zenoh's threads say that they end, and which they are."""
        end = time.monotonic() + END_SECONDS
        ending: list[threading.Thread] = []
        for silent in range(self._callbacks, 0, -1):
            try:
                ending.append(self._ended.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                return [*_join(ending, END_SECONDS), f"{silent} of Zenoh's"]
        return _join(ending, END_SECONDS)

    def tell(self, event: protocol.Event) -> int:
        """Something happens to the training loop. Returns how many steps to train now; 0: the peer
        has done its part."""

        def job() -> int:
            self._steps = 0
            self._handle(event)
            return self._steps

        return self._ask(job)

    def wait_for(self, others: int, seconds: float, stop: Callable[[], bool]) -> bool:
        """Wait until this many other peers are there; returns whether they came in time."""
        end = time.monotonic() + seconds
        while len(self.present) < others and not stop():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        return True

    def leave(self) -> None:
        """Stop taking part, and wait for a pairing under way, which its time-outs bound."""
        self.tell(protocol.Stop())
        while not self._ask(lambda: isinstance(self.node.phase, protocol.Idle)):
            time.sleep(_POLL)

    # -- the thread that owns the node -------------------------------------------------------

    def _post(self, job: Callable[..., object], *what: object) -> None:
        self._jobs.put(partial(job, *what))

    def _callback(self, job: Callable[..., object]) -> Any:
        """Posts what Zenoh reports; the last thing that its thread does is to say which it is."""
        self._callbacks += 1
        ended = lambda: self._ended.put(threading.current_thread())  # noqa: E731
        return self._zenoh.handlers.Callback(partial(self._post, job), ended)

    def _ask(self, question: Callable[[], T]) -> T:
        """Let the node's thread answer."""
        answer: Future[T] = Future()

        def job() -> None:
            try:
                if self.failure is not None:
                    raise self.failure
                answer.set_result(question())
            except Exception as error:
                self.failure = error
                answer.set_exception(error)

        self._jobs.put(job)
        return answer.result()

    def _serve(self) -> None:
        while True:
            now = time.monotonic()
            if self._deadlines and self._deadlines[0][0] <= now:
                passed = protocol.DeadlinePassed(heapq.heappop(self._deadlines)[2])
                job: Job | None = partial(self._handle, passed)
            else:
                wait = self._deadlines[0][0] - now if self._deadlines else None
                try:
                    job = self._jobs.get(timeout=wait)
                except queue.Empty:
                    continue
            if job is None:
                return
            try:
                job()
            except Exception as error:  # the training loop raises it at the next round's end
                self.failure = error

    def _handle(self, event: protocol.Event, query: zenoh.Query | None = None) -> None:
        """Let the node take an event, `query` if another peer asks, and do what it wants."""
        actions = self.node.handle(event)
        phase = type(self.node.phase).__name__
        if phase != self._phase:
            self._phase = phase
            self.record("phase", phase=phase)
        for action in actions:
            self._act(action, query)

    def _act(self, action: protocol.Action, query: zenoh.Query | None) -> None:
        """A node answers a question at once, so that an answer belongs to the query at hand."""
        match action:
            case protocol.Announce(token):
                key = self.wire.key("ticket", *token)
                self._standing[token] = self._session.liveliness().declare_token(key)
            case protocol.Withdraw(token):
                self._standing.pop(token).undeclare()  # type: ignore[no-untyped-call]
            case protocol.Claim(token, timeout):
                self._query(token, None, timeout, self._claim_answered)
            case protocol.Exchange(token, snapshot, timeout):
                self._send(self._query, token, snapshot, timeout, self._exchange_answered)
            case protocol.AnswerClaim(to, token, granted):
                assert query is not None
                if granted:
                    self.record("granted", token=list(token), to=list(to))
                with query:
                    self._reply(query, _CLAIM, _YES if granted else _NO, express=True)
            case protocol.AnswerExchange(to, token, answer):
                assert query is not None
                if answer is None:
                    self._refuse(query, f"the ticket {tuple(token)} was not granted to {to.peer}")
                else:
                    self._send(self._send_back, query, token, answer)
            case protocol.SetDeadline(token, seconds):
                at = time.monotonic() + seconds
                heapq.heappush(self._deadlines, (at, token.ticket, token))
            case protocol.Train(steps):
                self._steps = steps
            case protocol.Paired(fusion):
                self.record("paired", **self._sides(fusion), to=list(fusion.partner))
            case protocol.Fused(fusion):
                self.record("fused", **self._sides(fusion), partner=list(fusion.partner))
            case protocol.Discarded(fusion):
                self.record("discarded", **self._sides(fusion), partner=list(fusion.partner))

    def _sides(self, fusion: Fusion) -> dict[str, Any]:
        side = "owner" if fusion.token.owner == self.node.identity else "claimer"
        return {"token": list(fusion.token), "side": side}

    # -- presence -------------------------------------------------------------------------------

    def _presence(self, sample: zenoh.Sample) -> None:
        stands = sample.kind == self._zenoh.SampleKind.PUT
        try:
            who = self.wire.parse(str(sample.key_expr))
        except Refused as error:
            self.record("refused", why=str(error))
            return
        me = self.node.identity
        if who.peer == me.peer:
            if isinstance(who, Identity) and stands and who.incarnation > me.incarnation:
                raise PolytempoError(
                    f"another process now runs as {me.peer!r} (incarnation {who.incarnation}, this "
                    f"one is {me.incarnation}); give each peer its own --id"
                )
        elif isinstance(who, Token):
            self._handle(protocol.Appeared(who) if stands else protocol.Vanished(who))
        elif stands:
            self.present[who.peer] = max(who.incarnation, self.present.get(who.peer, 0))
            self.record("joined", who=list(who))
        else:
            if self.present.get(who.peer) == who.incarnation:
                del self.present[who.peer]
            self.record("left", who=list(who))
            self._handle(protocol.Gone(who))

    # -- as the owner of a ticket ---------------------------------------------------------------

    def _claimed(self, query: zenoh.Query) -> None:
        try:
            message = self._read(query, weights=False)
        except Refused as error:
            self._refuse(query, str(error))
            return
        self._handle(protocol.Claimed(message.by, message.token), query)

    def _exchanged(self, query: zenoh.Query) -> None:
        try:
            message = self._read(query, weights=True)
        except Refused as error:
            self._refuse(query, str(error))
            return
        assert message.snapshot is not None
        self._handle(protocol.Exchanged(message.by, message.token, message.snapshot), query)

    def _send_back(self, query: zenoh.Query, token: Token, snapshot: Snapshot) -> None:
        with query:
            header, payload = self.wire.write(self.node.identity, token, snapshot)
            self._reply(query, _EXCHANGE, payload, attachment=header)

    def _reply(self, query: zenoh.Query, kind: str, payload: bytes, **more: Any) -> None:
        """Under our own key: that of the query may be a pattern."""
        try:
            query.reply(self.wire.key(kind, *self.node.identity), payload, **more)
        except self._zenoh.ZError as error:  # the line broke: silence to the claimer
            self.record("unsent", why=str(error))

    def _refuse(self, query: zenoh.Query, why: str) -> None:
        self.record("refused", why=why)
        with query:
            try:
                query.reply_err(why.encode()[:500])
            except self._zenoh.ZError as error:
                self.record("unsent", why=str(error))

    # -- as a claimer ---------------------------------------------------------------------------

    def _query(
        self,
        token: Token,
        snapshot: Snapshot | None,
        timeout: float,
        done: Callable[[Token, Sequence[zenoh.Reply]], None],
    ) -> None:
        """Ask the token's owner; `done` gets the replies, none if nobody answered in time."""
        replies: list[zenoh.Reply] = []
        header, payload = self.wire.write(self.node.identity, token, snapshot)
        kind = _CLAIM if snapshot is None else _EXCHANGE

        def over() -> None:
            self._post(done, token, replies)

        try:
            self._session.get(
                self.wire.key(kind, *token.owner),
                self._zenoh.handlers.Callback(replies.append, over),
                payload=payload,
                attachment=header,
                timeout=timeout,
                consolidation=self._zenoh.ConsolidationMode.NONE,
                **self._manner(kind),
            )
        except self._zenoh.ZError as error:
            self.record("unsent", why=str(error))
            over()

    def _claim_answered(self, token: Token, replies: Sequence[zenoh.Reply]) -> None:
        answers = {_YES: True, _NO: False}
        answer = self._answer(token, replies)
        granted = None if answer is None else answers.get(answer.payload.to_bytes())
        self._handle(protocol.ClaimAnswered(token, granted))

    def _exchange_answered(self, token: Token, replies: Sequence[zenoh.Reply]) -> None:
        snapshot = None
        answer = self._answer(token, replies)
        try:
            if answer is not None:
                message = self._read(answer, weights=True)
                if (message.by, message.token) != (token.owner, token):
                    raise Refused(f"the answer of {message.by} is not from the owner of {token}")
                snapshot = message.snapshot
        except Refused as error:
            self.record("refused", why=str(error))
        self._handle(protocol.ExchangeAnswered(token, snapshot))

    def _answer(self, token: Token, replies: Sequence[zenoh.Reply]) -> zenoh.Sample | None:
        """The one good reply. That there is none is all that Zenoh says of a failure."""
        for reply in replies:
            if reply.ok is not None:
                return reply.ok
        why = [reply.err.payload.to_bytes()[:500].decode(errors="replace") for reply in replies]  # type: ignore[union-attr]
        self.record("unanswered", token=list(token), why=why)
        return None

    # -- both -----------------------------------------------------------------------------------

    def _read(self, letter: zenoh.Query | zenoh.Sample, *, weights: bool) -> Message:
        """The message in a query or a reply; their sizes are looked at before their bytes."""
        header, payload = letter.attachment, letter.payload
        if header is not None and len(header) > MOST_HEADER:
            raise Refused(f"its header has {len(header)} bytes; at most {MOST_HEADER} are read")
        size = 0 if payload is None else len(payload)
        if size > self.wire.most_payload:
            raise Refused(f"it has {size} bytes; at most {self.wire.most_payload} are read")
        return self.wire.read(
            b"" if header is None else header.to_bytes(),
            b"" if payload is None else payload.to_bytes(),
            weights=weights,
        )

    def _send(self, send: Callable[..., None], *what: Any) -> None:
        """On the next thread that is free to send."""
        self._letters.put(partial(send, *what))

    def _send_letters(self) -> None:
        while (letter := self._letters.get()) is not None:
            try:
                letter()
            except Exception as error:  # the training loop raises it at the next round's end
                self.failure = error

    def _manner(self, kind: str) -> dict[str, Any]:
        """A claim overtakes the models on the line; neither is ever dropped. A reply travels in
        the manner of its query."""
        priority = self._zenoh.Priority
        return {
            "congestion_control": self._zenoh.CongestionControl.BLOCK,
            "priority": priority.INTERACTIVE_HIGH if kind == _CLAIM else priority.DATA_LOW,
            "express": kind == _CLAIM,
        }


def _join(threads: Sequence[threading.Thread], seconds: float) -> list[str]:
    """Wait for these threads, so long in all; returns the names of those that still run."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
