"""Data for federations: sources, partitions, splits and shifts."""

from polytempo.data import partition
from polytempo.data.federation import Federation
from polytempo.data.fetch import Got, get
from polytempo.data.partition import PARTITIONS
from polytempo.data.shift import SHIFTS
from polytempo.data.source import SOURCES, data_folder
from polytempo.data.sources import DatasetInfo, available

__all__ = [
    "PARTITIONS",
    "SHIFTS",
    "SOURCES",
    "DatasetInfo",
    "Federation",
    "Got",
    "available",
    "data_folder",
    "get",
    "partition",
]
