"""The core: server, strategies' contract, messages, bank, parameters, tasks. No I/O, no clock."""
