"""The examples as a newcomer runs them: a server and two clients, here in threads."""

import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from polytempo.network.session import free_ports

EXAMPLES = Path(__file__).parent.parent / "examples"
WAIT = 120  # seconds, on a busy machine


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fleet(example, folder, **options):
    """What the server returns, and what each client does."""
    address, results = queue.Queue(), {}
    there, everybody = set(), threading.Event()  # nobody trains before all are there

    def server():
        try:
            results["server"] = example.serve(
                folder / "server", listen="127.0.0.1:0", listening=address.put, **options
            )
        except BaseException as error:
            results["server"] = error
            address.put(None)

    def client(number, where):
        def watch(event):
            if event["event"] == "connected":
                there.add(number)
                if len(there) == example.CLIENTS:
                    everybody.set()
            elif event["event"] == "begun":
                everybody.wait(WAIT)

        results[number] = example.join(where, number, folder, watch=watch)

    threads = [threading.Thread(target=server, daemon=True)]
    threads[0].start()
    where = address.get(timeout=WAIT)
    assert where is not None, results["server"]
    for number in range(example.CLIENTS):
        threads.append(threading.Thread(target=client, args=(number, where), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("name", ["with_numpy", "with_sklearn", "with_torch"])
def test_an_example_learns(name, tmp_path):
    found = fleet(load(name), tmp_path)
    result = found["server"]
    assert result.summary["complete"], result.summary
    assert result.accuracy > 0.7, "each client has half of the labels: guessing is 20%"
    history = result.history
    assert {row["clients"] for row in history} <= {1, 2} and history[-1]["clients"] == 2
    assert found[0]["complete"] and found[1]["complete"]
    done = sum(found[client]["acknowledged"] for client in (0, 1))
    assert done == result.summary["arrivals"]
    assert (tmp_path / "client-0" / "model.safetensors").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_the_example_with_transformers_trains_what_it_shares(tmp_path, monkeypatch):
    """The Trainer keeps state that belongs to its process. Here both clients live in one process,
    so they take turns."""
    example = load("with_transformers")
    train, turn = example.Client.train, threading.Lock()

    def alone(*arguments):
        with turn:
            return train(*arguments)

    monkeypatch.setattr(example.Client, "train", alone)
    found = fleet(example, tmp_path, updates=4)
    assert found["server"].summary["complete"]
    assert found[0]["acknowledged"] + found[1]["acknowledged"] == 4
    sent = load_file(tmp_path / "client-0" / "model.safetensors")
    assert {"classifier.weight", "bert.encoder.layer.1.output.dense.bias"} < sent.keys()
    assert not any("embeddings" in name or "layer.0" in name for name in sent), "they stay"
    begin = example.travels(example.make())
    moved = [name for name in sent if not np.array_equal(sent[name], begin[name].numpy())]
    assert "classifier.weight" in moved


def test_an_example_runs_as_it_says_it_does(tmp_path):
    """Real processes, on the command line that its first lines name. (On a busy machine, one client
    may have done all the work before the other has begun.)"""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, EXAMPLES / "with_numpy.py"]
    said = subprocess.PIPE
    server = subprocess.Popen([*command, "server", address], cwd=tmp_path, stdout=said, text=True)
    clients = [
        subprocess.Popen([*command, "client", address, number], cwd=tmp_path) for number in "01"
    ]
    try:
        out, _ = server.communicate(timeout=WAIT)
        assert out.startswith("accuracy ") and server.returncode == 0
        done, end = [None], time.monotonic() + WAIT
        while 0 not in done and time.monotonic() < end:
            time.sleep(0.1)
            done = [client.poll() for client in clients]
        assert 0 in done
    finally:
        for process in (server, *clients):
            process.kill()
            process.wait()
    result = json.loads((tmp_path / "runs" / "numpy" / "result.json").read_text())
    assert result["complete"] and result["accuracy"] > 0.7
