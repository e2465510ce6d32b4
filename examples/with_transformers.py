"""A client that trains with the Trainer of Hugging Face transformers (pip install
"polytempo[network,transformers]"). Only the classifier and the last layer travel here; leave out
`SHARED` to send all.

    python examples/with_transformers.py server 127.0.0.1:7500
    python examples/with_transformers.py client 127.0.0.1:7500 0    # one of these for each client
    python examples/with_transformers.py client 127.0.0.1:7500 1
"""

import sys
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import polytempo as pt

CLIENTS = 2
SHARED = ("classifier", "pooler", "layer.1")


def make():
    """A tiny one, from nothing; `from_pretrained` is what you would use."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=100, intermediate_size=64, num_labels=2, **small)
    return BertForSequenceClassification(config)


def travels(model):
    state = model.state_dict()
    return {name: value for name, value in state.items() if any(part in name for part in SHARED)}


def samples(client):
    """Is there a word from the second half of the vocabulary?"""
    x = torch.randint(1, 100, (80, 8), generator=torch.Generator().manual_seed(client))
    y = (x > 90).any(1).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(x, y, strict=True)]


class Client:
    def __init__(self, data):
        cut = len(data) * 3 // 4
        self.data, self.tests, self.model = data[:cut], data[cut:], make()

    def load(self, parameters):
        found = {name: torch.from_numpy(value) for name, value in parameters.items()}
        self.model.load_state_dict(found, strict=False)

    def train(self, parameters, task):
        self.load(parameters)
        with tempfile.TemporaryDirectory() as folder:
            given = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
            arguments = TrainingArguments(
                output_dir=folder,
                num_train_epochs=task.epochs,
                learning_rate=task.lr,
                per_device_train_batch_size=task.batch_size,
                **given,
            )
            trainer = Trainer(self.model, arguments, train_dataset=self.data)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return {name: value.numpy() for name, value in travels(self.model).items()}

    @torch.no_grad()
    def evaluate(self, parameters):
        self.load(parameters)
        self.model.eval()
        x, y = (torch.stack([row[key] for row in self.tests]) for key in ("input_ids", "labels"))
        return float((self.model(input_ids=x).logits.argmax(1) == y).float().mean())


def serve(out="runs/transformers", updates=20, **options):
    beginning = {name: value.numpy() for name, value in travels(make()).items()}
    options = {"strategy": "fedasync", "lr": 1e-3, "epochs": 1, **options}
    return pt.serve(beginning, clients=CLIENTS, updates=updates, out=out, **options)


def join(address, client, out="runs/transformers-clients", **options):
    trainer = Client(samples(client))
    count, tested = len(trainer.data), len(trainer.tests)
    options = {"samples": count, "tested": tested, "out": f"{out}/client-{client}", **options}
    return pt.join(address, trainer, **options)


if __name__ == "__main__":
    what, address, *number = sys.argv[1:]
    if what == "server":
        print(f"accuracy {serve(listen=address).accuracy:.1%}")  # noqa: T201
    else:
        join(address, int(number[0]))
