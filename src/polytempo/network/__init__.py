"""Peers on a real network: the engine that drives the nodes of `polytempo.nodes` over Eclipse
Zenoh. Needs the extra `network`."""
