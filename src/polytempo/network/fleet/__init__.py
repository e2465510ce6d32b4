"""A server and its clients on a network (gRPC), around the nodes of `polytempo.nodes`.

server.py    drives a `ServerNode`; admission.py says who may take part
client.py    drives a `ClientNode` and a `Trainer`
store.py     what the server keeps on disk: a journal (journal.py) and checkpoints
sending.py, reading.py, records.py    messages and records as bytes (fleet.proto, payload.py)
metrics.py   /metrics and /healthz
"""
