"""A model that is trained by nobody: tests say what it has become."""

from polytempo.nodes import FUSIONS, Pairing, PeerNode


class Still:
    def __init__(self, params, iteration=0):
        self.params, self.iteration = params, iteration

    def fuse(self, params):
        self.params = params

    def state_dict(self):
        return {"params": self.params, "iteration": self.iteration}

    def load_state_dict(self, state):
        self.params, self.iteration = state["params"], state["iteration"]


def still_node(pairing: Pairing, params, fusion="progress", **options) -> PeerNode:
    given = {"target": 40, "local_steps": 5} | options
    return PeerNode(pairing, Still(params), FUSIONS.create(fusion), **given)
